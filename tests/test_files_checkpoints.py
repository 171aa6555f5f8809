"""The one reader of checkpoints and state dicts, on files of each kind, damaged ones and others."""

import pytest
import torch
from safetensors.torch import save_file

from lightning_taskinfo._files import read_checkpoint

STATE = {"net.weight": torch.arange(6.0).reshape(2, 3), "net.bias": torch.ones(2)}


def saved(path, content):
    torch.save(content, path)
    return path


def test_reads_a_checkpoint_with_what_lightning_keeps_beside_it(tmp_path):
    content = {"state_dict": STATE, "hyper_parameters": {"width": 3}}
    found = read_checkpoint("checkpoint", saved(tmp_path / "last.ckpt", content))
    torch.testing.assert_close(found.state, STATE)
    assert found.content["hyper_parameters"] == {"width": 3}


def test_reads_a_state_dict_and_leaves_out_what_is_no_tensor(tmp_path):
    state = {**STATE, "critic._extra_state": {"step": 3}}
    torch.testing.assert_close(
        read_checkpoint("center", str(saved(tmp_path / "w.pt", state))).state, STATE
    )


def test_reads_safetensors(tmp_path):
    save_file(STATE, tmp_path / "model.safetensors")
    torch.testing.assert_close(read_checkpoint("c", tmp_path / "model.safetensors").state, STATE)


@pytest.mark.parametrize("content", [[1, 2], {}, {"epoch": 3}, torch.nn.Linear(2, 2)], ids=repr)
def test_refuses_files_of_something_else(tmp_path, content):
    path = saved(tmp_path / "odd.pt", content)
    with pytest.raises(ValueError, match=r"`center` must be the file of a Lightning .*odd\.pt"):
        read_checkpoint("center", path)


def test_refuses_a_damaged_file_and_one_that_is_not_there(tmp_path):
    path = saved(tmp_path / "cut.ckpt", STATE)
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(ValueError, match=r"`center` must be .*cut\.ckpt \("):
        read_checkpoint("center", path)
    with pytest.raises(ValueError, match=r"`center` must be .*none at .*gone\.ckpt"):
        read_checkpoint("center", tmp_path / "gone.ckpt")
