"""Where a prior is centred: a module, its state or a checkpoint; and what it refuses."""

from copy import deepcopy

import pytest
import torch
from torch import nn

from lightning_taskinfo.certificates import Prior, certify
from lightning_taskinfo.certificates.prior import hash_of
from tests.certificates.conftest import blobs, fit

QUICK = {"draws": 20, "betas": (1.0,), "structure": "diagonal"}


def frozen_start():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    model[0].requires_grad_(False)
    model.register_buffer("scale", torch.ones(3))
    return model


def test_a_prior_taken_before_training_equals_that_of_a_copy(data):
    model = frozen_start()
    copied = Prior(deepcopy(model), "random initialisation")
    taken = Prior.of(model, "random initialisation")
    fit(model, data)
    assert certify(model, data, taken, **QUICK) == certify(model, data, copied, **QUICK)


def test_a_frozen_base_is_not_copied_and_still_compared(data):
    model = frozen_start()
    prior = Prior.of(model, "random initialisation")
    assert sorted(prior.center) == ["2.bias", "2.weight"]
    fit(model, data)
    assert certify(model, data, prior, **QUICK).valid
    model[0].weight.data[0, 0] += 1
    model.scale[0] = 2
    reasons = certify(model, data, prior, **QUICK).reasons
    assert ["`0.weight`" in reasons[0], "`scale`" in reasons[1], len(reasons)] == [True, True, 2]


def test_hashes_know_values_and_shapes():
    x = torch.arange(6.0)
    one = hash_of(x)
    assert one == hash_of(x.clone())
    assert one != hash_of(x.view(2, 3))
    assert one != hash_of(x + 1)
    assert hash_of(torch.empty(0)) != hash_of(torch.tensor(1.0, dtype=torch.bfloat16))


@pytest.mark.parametrize("kind", ["state_dict", "lightning"])
def test_a_checkpoint_is_a_centre(trained, start, data, prior, tmp_path, kind):
    path = tmp_path / "start.pt"
    state = start.state_dict()
    torch.save(state if kind == "state_dict" else {"state_dict": state, "epoch": 3}, path)
    from_file = certify(trained, data, Prior(path, "random initialisation"), **QUICK)
    assert from_file == certify(trained, data, prior, **QUICK)


def test_a_fresh_head_is_centred_at_zero(trained, start, data):
    other = deepcopy(start)
    other[2] = nn.Linear(8, 5)  # the head of another task
    with pytest.raises(
        ValueError, match=r"`center` .*`2.weight` with shape \(2, 8\), got \(5, 8\)"
    ):
        certify(trained, data, Prior(other, "pretrained"), **QUICK)
    found = certify(trained, data, Prior(other, "pretrained", fresh=["2."]), **QUICK)
    zero = {**start.state_dict(), "2.weight": torch.zeros(2, 8), "2.bias": torch.zeros(2)}
    assert found == certify(trained, data, Prior(zero, "pretrained"), **QUICK)
    assert found.valid


def test_a_prior_of_another_network_is_refused(trained, data):
    other = nn.ModuleDict({"trunk": nn.Linear(4, 8), "head": nn.Linear(8, 2)})
    with pytest.raises(
        ValueError, match=r"`center` must hold `0.weight` with shape \(8, 4\), got nothing; `fresh`"
    ):
        certify(trained, data, Prior(other, "another network"), **QUICK)


@pytest.mark.parametrize("content", [b"no weights", {"state_dict": [1]}, None])
def test_a_file_without_weights_is_refused(tmp_path, content):
    path = tmp_path / "start.pt"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content:
        torch.save(content, path)
    with pytest.raises(ValueError, match=r"`center` .*start\.pt"):
        Prior(path)


def test_samples_that_the_centre_was_trained_on_are_refused(trained, start, data):
    seen = torch.cat([torch.randn(50, 4), data[0][:3]])
    with pytest.raises(ValueError, match=r"`data` .*got 3 of 600"):
        certify(trained, data, Prior(start, "pretrained", seen=seen), **QUICK)
    unlabelled = blobs(200, 5)[0]
    with pytest.raises(ValueError, match=r"`unlabelled` .*got 9 of 200"):
        certify(
            trained,
            data,
            Prior(start, "pretrained", seen=unlabelled[:9]),
            unlabelled=unlabelled,
            **QUICK,
        )


def test_beginnings_of_names_are_a_sequence():
    with pytest.raises(ValueError, match=r"`fresh` .*got 'head'"):
        Prior(fresh="head")


def test_a_prior_is_shown_without_its_tensors():
    shown = repr(Prior.of(nn.Linear(300, 300), origin="random initialisation"))
    assert "random initialisation" in shown
    assert "tensor" not in shown
