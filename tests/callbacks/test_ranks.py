"""Two processes log what one logs on the same samples, and a failing one hangs nobody."""

import copy
import json
import os
import warnings

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader

from lightning_taskinfo._batches import Reader
from lightning_taskinfo.callbacks import (
    FisherTrace,
    HardSamples,
    InformationInWeights,
    LocalMinimum,
)
from tests.callbacks.runs import Classifier, Noisy, digits, fit

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")


class Plain(Classifier):
    """The same weights in every process, and no batch norm, whose statistics they would not share."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


class Save(pl.Callback):
    """Writes the histories of every process at the end."""

    def __init__(self, folder, *probes):
        self.folder, self.probes = folder, probes

    def on_train_end(self, trainer, pl_module):
        histories = [probe.history for probe in self.probes]
        (self.folder / f"{trainer.global_rank}.json").write_text(json.dumps(histories))


def on_two_ranks(folder, *probes, loader, **arguments):
    """Return the histories of each process; batches of the loader are shared between two."""
    fit(
        folder,
        *probes,
        Save(folder, *probes),
        model=Plain,
        loader=loader,
        strategy="ddp_fork",
        devices=2,
        **{"max_epochs": 1, **arguments},
    )
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def close(a, b):
    assert len(a) == len(b) > 0
    for x, y in zip(a, b, strict=True):
        assert x.keys() == y.keys()
        for key in x:
            assert x[key] == pytest.approx(y[key], rel=1e-5, nan_ok=True), key


@pytest.mark.parametrize("kind", ["tensors", "random transforms"])
def test_two_processes_log_what_one_logs(tmp_path, kind):
    """An odd number of samples: the pool's shards are uneven."""

    def run(ranks):
        data = digits(24) if kind == "tensors" else Noisy(24)
        probes = [
            FisherTrace(
                every_n_steps=1, data="train", max_samples=13, mc_samples=2, name="sampled"
            ),
            FisherTrace(
                every_n_steps=1, data="train", max_samples=13, labels="exact", name="exact"
            ),
            FisherTrace(every_n_steps=1, data="train", max_samples=1, labels="exact", name="one"),
            InformationInWeights(every_n_steps=1, max_samples=13),
            InformationInWeights(every_n_steps=1, max_samples=1, name="information from one"),
            InformationInWeights(every_n_steps=1, max_samples=13, structure="kron", name="kron"),
            LocalMinimum(every_n_steps=1, max_samples=13),
        ]
        if ranks == 2:
            return on_two_ranks(
                tmp_path, *probes, loader=DataLoader(data, batch_size=12), max_steps=1
            )
        fit(tmp_path, *probes, model=Plain, loader=DataLoader(data, batch_size=24), max_epochs=1)
        return [probe.history for probe in probes]

    alone = run(1)
    first, second = run(2)
    for a, b, c in zip(alone, first, second, strict=True):
        close(b, c)
        if kind == "tensors":  # the training step saw the same samples too
            close(a, b)
    assert [len(history) for history in first] == [1] * len(alone)


class Batch(FisherTrace):
    """Keeps which samples it measured."""

    def observe(self, model, samples):
        self.share = (len(samples.inputs), samples.first, samples.total)
        return super().observe(model, samples)

    def summarise(self, observed, samples):
        return {
            **super().summarise(observed, samples),
            "first": float(self.share[1]),
            "total": float(self.share[2]),
        }


def test_the_batches_of_two_processes_are_one_batch(tmp_path):
    probe = Batch(every_n_steps=1, max_samples=9, labels="sampled")
    step = HardSamples(every_n_steps=1, name="step")
    first, second = on_two_ranks(
        tmp_path, probe, step, loader=DataLoader(digits(24), batch_size=12)
    )
    assert [(row["first"], row["total"]) for row in first[0]] == [(0.0, 9.0)]
    assert [(row["first"], row["total"]) for row in second[0]] == [(5.0, 9.0)]
    for name in ("fisher_trace", "fisher_trace_standard_error", "sgd_temperature"):
        assert [row[name] for row in first[0]] == [row[name] for row in second[0]]
    close(first[1], second[1])
    x, y = digits(24).tensors
    model, total = Plain(), []
    optimizer = model.configure_optimizers()
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()  # norms are measured after it
    for n in range(24):
        loss = nn.functional.cross_entropy(model(x[n : n + 1]), y[n : n + 1])
        total.append(
            sum(g.square().sum() for g in torch.autograd.grad(loss, [*model.parameters()])).item()
        )
    assert first[1][0]["squared_gradient_norm"] == pytest.approx(sum(total) / 24, rel=1e-5)


class Scores(pl.Callback):
    """Writes what every process knows of the samples, and what a loop over each step's samples gives."""

    def __init__(self, folder, norms):
        self.folder, self.norms, self.steps = folder, norms, []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        x, y = batch
        with torch.no_grad():
            self.losses = nn.functional.cross_entropy(pl_module.net(x), y, reduction="none")

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        x, y = batch
        net = copy.deepcopy(pl_module.net)
        for n in range(len(x)):
            loss = nn.functional.cross_entropy(net(x[n : n + 1]), y[n : n + 1])
            norm = sum(g.square().sum() for g in torch.autograd.grad(loss, [*net.parameters()]))
            index = (digits(26).tensors[0] == x[n]).all(1).nonzero().item()
            self.steps.append((index, self.losses[n].item(), norm.item()))

    def on_train_end(self, trainer, pl_module):
        samples = self.norms.samples
        known = [samples.loss.tolist(), samples.squared_norm.tolist(), samples.seen.tolist()]
        (self.folder / f"{trainer.global_rank}.json").write_text(
            json.dumps({"known": known, "steps": self.steps})
        )


def test_two_processes_know_all_samples_and_so_does_a_checkpoint(tmp_path):
    """Shuffled, 26 samples in batches of 5: processes repeat samples where they come to an end."""

    def run(max_epochs, ckpt_path=None):
        norms = HardSamples(rank_by="squared_norm")
        checkpoints = ModelCheckpoint(tmp_path, save_last=True)
        loader = DataLoader(digits(26), batch_size=5, shuffle=True)
        arguments = {
            "strategy": "ddp_fork",
            "devices": 2,
            "enable_checkpointing": True,
            "ckpt_path": ckpt_path,
        }
        callbacks = (norms, Scores(tmp_path, norms), checkpoints)
        fit(tmp_path, *callbacks, model=Plain, loader=loader, max_epochs=max_epochs, **arguments)
        return [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]

    halves = run(2), run(3, tmp_path / "last.ckpt")
    steps = []
    for first, second in halves:
        assert first["known"] == second["known"]
        steps += first["steps"] + second["steps"]
        losses, norms, seen = first["known"]
        assert sum(seen) == len(steps)
        for index in range(26):
            rows = [step for step in steps if step[0] == index]
            assert seen[index] == len(rows)
            assert losses[index] == pytest.approx(
                sum(loss for _, loss, _ in rows) / len(rows), rel=1e-4
            )
            assert norms[index] == pytest.approx(
                sum(norm for *_, norm in rows) / len(rows), rel=1e-4
            )


class FailsOnOne(FisherTrace):
    """Fails on the second process at the first step, wherever it is told to."""

    def __init__(self, where, **probe):
        super().__init__(**probe)
        self.where, self.rank, self.steps = where, 0, 0

    def on_train_start(self, trainer, pl_module):
        super().on_train_start(trainer, pl_module)
        self.rank = trainer.global_rank

        def broken(batch):
            if self.where == "batch" and self.rank == 1 and trainer.global_step == 1:
                raise RuntimeError("no")
            return batch

        self._source.reader = Reader(broken)

    def observe(self, model, samples):
        self.steps += 1
        if self.where == "observe" and self.rank == 1 and self.steps == 1:
            raise RuntimeError("no")
        return super().observe(model, samples)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("where", ["observe", "batch"])
def test_one_failing_process_hangs_nobody(tmp_path, where):
    probe = FailsOnOne(where, every_n_steps=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # in the processes; what they say is tested in one
        first, second = on_two_ranks(tmp_path, probe, loader=DataLoader(digits(24), batch_size=4))
    assert [row["step"] for row in first[0]] == [row["step"] for row in second[0]] == [2, 3]


class Locked(Noisy):
    """Cannot be copied: the first batches are collected."""

    def __deepcopy__(self, memo):
        raise TypeError("cannot copy a lock")


class CollectsLater(FisherTrace):
    """The second process cannot read the first batch."""

    def __init__(self, **probe):
        super().__init__(**probe)
        self.failed = False

    def on_train_start(self, trainer, pl_module):
        super().on_train_start(trainer, pl_module)
        collect = self._source.collect

        def fails_once(batch, last):
            if trainer.global_rank == 1 and not self.failed:
                self.failed = True
                raise RuntimeError("no")
            collect(batch, last)

        self._source.collect = fails_once


@pytest.mark.timeout(60)
def test_processes_whose_pools_are_not_full_at_the_same_time_do_not_wait_for_each_other(tmp_path):
    how = {"every_n_steps": 1, "data": "train", "labels": "exact"}
    probes = [
        FisherTrace(max_samples=9, name="uneven", **how),  # 5 and 4, from batches of 4
        FisherTrace(max_samples=1, name="one", **how),
        CollectsLater(max_samples=8, name="later", **how),
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        first, second = on_two_ranks(tmp_path, *probes, loader=DataLoader(Locked(24), batch_size=4))
    assert first == second
    assert [[row["step"] for row in history] for history in first] == [[2, 3], [1, 2, 3], [2, 3]]


def test_local_minimum_does_not_share_batches(tmp_path):
    probe = LocalMinimum(data="train_batch", every_n_steps=1)
    with pytest.raises(
        Exception, match="`data` must be 'train' or 'val' with several processes, got 'train_batch'"
    ):
        on_two_ranks(tmp_path, probe, loader=DataLoader(digits(24), batch_size=4))


def test_local_minimum_does_not_share_what_it_collects(tmp_path):
    with pytest.raises(
        Exception, match=r"`data='train'` needs a dataset that can be copied \(cannot copy a lock\)"
    ):
        on_two_ranks(tmp_path, LocalMinimum(), loader=DataLoader(Locked(24), batch_size=4))
