"""``taskinfo rank``: what it prints and writes, and how it says no."""

import pytest
import pytorch_lightning as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from lightning_taskinfo.cli import main
from lightning_taskinfo.data import save_npz
from lightning_taskinfo.transfer import StartRanking
from tests.transfer.tiny import tiny_task


def make_net(classes=3):
    """Read pixels, and have a head."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, classes))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    save_npz(tmp_path / "target.npz", tiny_task(1, name="target", samples=120))
    torch.manual_seed(0)
    torch.save(make_net().state_dict(), tmp_path / "good.pt")
    broken = make_net()
    with torch.no_grad():
        broken[1].weight.zero_()
    torch.save(broken.state_dict(), tmp_path / "broken.pt")
    monkeypatch.chdir(tmp_path)
    return tmp_path


BASE = ["rank", "--model=tests.cli.test_networks_rank.make_net", "--data=target.npz", "--labels=60"]
STARTS = "--starts={good: good.pt, broken: broken.pt}"


def test_prints_writes_and_draws(folder, capsys):
    more = [
        "--curve={20: 0.5, 80: 0.2}",
        "--picture=ranking.png",
        "--fine_tune.steps=3",
    ]
    assert main([*BASE, STARTS, *more]) == 0
    ranking = StartRanking.load(folder / "ranking.json")
    assert {start.name for start in ranking.starts} == {"good", "broken", "scratch"}
    assert ranking["good"].missed < ranking["broken"].missed
    assert ranking["good"].call is not None
    assert ranking["good"].onset is not None
    assert ranking.best.fine_tuned is not None
    assert (folder / "ranking.png").read_bytes().startswith(b"\x89PNG")
    assert ranking.reading() in capsys.readouterr().out


def test_without_scratch(folder):
    assert main([*BASE, STARTS, "--scratch=false", '--layers=["1","2"]']) == 0
    ranking = StartRanking.load(folder / "ranking.json")
    assert {start.name for start in ranking.starts} == {"good", "broken"}
    assert [layer.name for layer in ranking.best.layers] == ["1", "2"]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--starts={}"], "`starts`"),
        (["--starts={scratch: good.pt}"], "`starts`"),
        (["--starts={a: nowhere.pt}"], "`starts`"),
        ([STARTS, "--labels=0"], "`labels`"),
        ([STARTS, "--picture=ranking.txt"], "`picture`"),
        ([STARTS, "--out=."], "`out` must be a file, got the folder ."),
        ([STARTS, "--model.classes=4"], "`starts`"),
        ([STARTS, "--data=nowhere.npz"], "A dataset"),
    ],
)
def test_says_no_before_anything_is_written(folder, capsys, arguments, named):
    assert main([*BASE, *arguments]) == 2
    assert named in capsys.readouterr().err
    assert not (folder / "ranking.json").exists()


class Stream(IterableDataset):
    def __init__(self, samples):
        self.samples = samples

    def __iter__(self):
        yield from self.samples


class Streamed(pl.LightningDataModule):
    def __init__(self, samples: int = 120):
        super().__init__()
        self.samples = samples

    def train_dataloader(self):
        samples = list(tiny_task(1, name="target", samples=120).train())
        return DataLoader(Stream(samples[: self.samples]), batch_size=16)


def test_a_stream_of_samples_is_ranked_like_a_file(folder):
    assert main([*BASE, STARTS]) == 0
    file = StartRanking.load(folder / "ranking.json")
    assert main([*BASE, STARTS, "--data=tests.cli.test_networks_rank.Streamed"]) == 0
    stream = StartRanking.load(folder / "ranking.json")
    assert stream["good"].missed == pytest.approx(file["good"].missed)


def test_of_fewer_labels_all_are_taken(folder):
    assert main([*BASE, STARTS, "--labels=1000"]) == 0
    assert StartRanking.load(folder / "ranking.json").samples == 120


def test_data_without_samples_are_refused_by_their_own_name(folder, capsys):
    data = ["--data=tests.cli.test_networks_rank.Streamed", "--data.samples=0"]
    assert main([*BASE, STARTS, *data]) == 2
    assert "`data` must yield batches (inputs, labels), got none." in capsys.readouterr().err
