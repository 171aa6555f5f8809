"""What all probes share: the schedule as the logger saw it, samples and checkpoints."""

import itertools
import random
import warnings
from collections import namedtuple
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import EarlyStopping, ModelCheckpoint
from pytorch_lightning.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
)

from lightning_taskinfo._batches import Reader, read_batch
from lightning_taskinfo.callbacks import FisherTrace, HardSamples, LocalMinimum
from lightning_taskinfo.callbacks.report import summary
from lightning_taskinfo.callbacks.source import Source, read_samples
from tests.callbacks.runs import PROBES, Classifier, Noisy, digits, fit, make_trainer, read_csv

pytestmark = pytest.mark.usefixtures("no_pictures")
all_probes = pytest.mark.parametrize("probe", PROBES.values(), ids=PROBES)


def stored_steps(logger, name):
    return [row["step"] for row in read_csv(logger) if name in row]


DUE = {  # by the number of batches that make a step, of 4 an epoch: schedules, and when they are due
    1: [
        ({"every_n_steps": 1}, [1, 2, 3, 4, 5, 6, 7, 8]),
        ({"every_n_steps": 3}, [3, 6]),
        ({"every_n_epochs": 1}, [4, 8]),
        ({"every_n_epochs": 2}, [8]),
    ],
    2: [({"every_n_steps": 1}, [1, 2, 3, 4])],
    3: [  # steps after batches 3 and 4
        ({"every_n_steps": 3}, [3]),
        ({"every_n_epochs": 1}, [2, 4]),
    ],
}


@pytest.mark.parametrize("accumulate", DUE)
def test_the_logger_stores_every_due_measurement_once(tmp_path, accumulate):
    expected = {}
    for number, (schedule, steps) in enumerate(DUE[accumulate]):
        for kind, probe in PROBES.items():
            callback = probe(**schedule, data="train_batch", name=f"{kind} {number}")
            expected[callback] = steps
    logger = CSVLogger(tmp_path)
    settings = {"log_every_n_steps": 3, "accumulate_grad_batches": accumulate}
    fit(tmp_path, *expected, logger=logger, **settings)
    for callback, steps in expected.items():
        assert stored_steps(logger, f"{callback.name}/{callback.headline[0]}") == steps
        assert [row["step"] for row in callback.history] == steps


@pytest.mark.parametrize("log_every_n_steps", [1, 2, 50])
def test_whatever_the_logging_interval(tmp_path, log_every_n_steps):
    callback, logger = FisherTrace(every_n_steps=2), CSVLogger(tmp_path)
    fit(tmp_path, callback, logger=logger, log_every_n_steps=log_every_n_steps)
    stored = {row["step"]: row["fisher_trace"] for row in read_csv(logger) if "fisher_trace" in row}
    assert stored == {row["step"]: pytest.approx(row["fisher_trace"]) for row in callback.history}
    assert list(stored) == [2, 4, 6, 8]


def test_limited_batches_and_iterable_data_have_a_last_batch_too(tmp_path):
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(digits())

    for arguments in ({"limit_train_batches": 3}, {"loader": DataLoader(Stream(), batch_size=11)}):
        callback = FisherTrace(every_n_epochs=1)
        fit(tmp_path, callback, **arguments)
        assert [row["step"] for row in callback.history] == [3, 6]


@all_probes
def test_checkpointing_and_early_stopping_see_it(tmp_path, probe):
    callback = probe(every_n_steps=4, data="train_batch", name="mine")
    monitor = f"taskinfo/mine/{callback.headline[0]}"
    saved = ModelCheckpoint(tmp_path, monitor=monitor, save_top_k=2, filename="{step}")
    stopping = EarlyStopping(monitor, patience=0, min_delta=1e9, check_on_train_epoch_end=True)
    trainer = fit(tmp_path, callback, saved, stopping, enable_checkpointing=True, max_epochs=9)
    assert trainer.current_epoch == 2
    assert trainer.global_step == 8
    assert sorted(float(v) for v in saved.best_k_models.values()) == pytest.approx(
        sorted(row[callback.headline[0]] for row in callback.history)
    )


def test_resuming_gives_the_history_of_the_uninterrupted_run(tmp_path):
    arguments = {"loader": DataLoader(digits(), batch_size=8), "max_epochs": 4}

    def run(**more):
        callbacks = [
            probe(every_n_steps=3, data=data, name=data)
            for probe in PROBES.values()
            for data in ("train_batch", "train")
        ]
        trainer = fit(
            tmp_path, *callbacks, model=lambda: Classifier(dropout=0.0), **{**arguments, **more}
        )
        trainer.save_checkpoint(tmp_path / "end.ckpt")
        return callbacks

    whole = run()
    run(max_epochs=2)
    for a, b in zip(whole, run(ckpt_path=tmp_path / "end.ckpt"), strict=True):
        assert a.history == b.history
        assert len(b.history) >= 5


def test_the_state_is_plain_and_keyed_by_class_and_name(tmp_path):
    callback = FisherTrace(every_n_steps=1, name="mine")
    fit(tmp_path, callback).save_checkpoint(tmp_path / "end.ckpt")
    states = torch.load(tmp_path / "end.ckpt", weights_only=True)["callbacks"]
    assert states["FisherTrace(mine)"]["history"] == callback.history
    assert FisherTrace(every_n_steps=99, name="mine").state_key == callback.state_key
    assert FisherTrace().state_key == "FisherTrace"


def test_a_second_fit_goes_on(tmp_path):
    callback, logger = FisherTrace(every_n_steps=4), CSVLogger(tmp_path)
    trainer, model = make_trainer(tmp_path, callback, logger=logger, max_epochs=1), Classifier()
    trainer.fit(model, DataLoader(digits(), batch_size=8))
    trainer.fit_loop.max_epochs = 3
    trainer.fit(model, DataLoader(digits(), batch_size=8))
    assert stored_steps(logger, "fisher_trace") == [4, 8, 12]


@pytest.mark.parametrize("schedule", [{}, {"every_n_steps": 4}], ids=str)
def test_a_second_training_of_the_same_length_is_measured_at_its_end(tmp_path, schedule):
    """Another trainer counts its steps from 0: ending with the same step is not having looked."""
    callback, model = LocalMinimum(**schedule, subset_size=4), Classifier()
    for _ in range(2):
        fit(tmp_path, callback, model=model)
    steps = [8] if not schedule else [4, 8]
    assert [row["step"] for row in callback.history] == 2 * steps
    gammas = [row["local_minimum/gamma"] for row in callback.history]
    assert len(set(gammas)) == len(gammas)


def test_a_training_that_has_nothing_left_to_do_is_not_measured_again(tmp_path):
    callback, logger = LocalMinimum(subset_size=4), CSVLogger(tmp_path)
    trainer, model = make_trainer(tmp_path, callback, logger=logger), Classifier()
    for _ in range(2):
        trainer.fit(model, DataLoader(digits(), batch_size=8))
    assert [row["step"] for row in callback.history] == [8]
    assert stored_steps(logger, "local_minimum/gamma") == [8]


# At what


class Recording(FisherTrace):
    """Keeps what it was given."""

    def observe(self, model, samples):
        self.seen = [*getattr(self, "seen", []), samples.inputs.clone()]
        return super().observe(model, samples)


@pytest.mark.parametrize(("max_samples", "expected"), [(5, 5), (100, 32)])
def test_the_train_subset_is_fixed(tmp_path, max_samples, expected):
    callback = Recording(every_n_steps=3, data="train", max_samples=max_samples)
    data = digits()
    fit(tmp_path, callback, loader=DataLoader(data, batch_size=8, shuffle=True))
    assert len(callback.seen) == 3  # steps 3 and 6, and 8 at the end
    assert all(torch.equal(seen, callback.seen[0]) for seen in callback.seen)
    rows = [(data.tensors[0] == x).all(1).nonzero().item() for x in callback.seen[0]]
    assert len(set(rows)) == expected
    other = Recording(every_n_steps=3, data="train", max_samples=5, seed=1)
    fit(tmp_path, other)
    assert not torch.equal(other.seen[0], callback.seen[0][:5])


def test_the_dataset_itself_is_not_read(tmp_path):
    data = Noisy()
    fit(tmp_path, FisherTrace(every_n_steps=1, data="train"), loader=DataLoader(data, batch_size=8))
    assert data.read == 2 * 32


class Drawn(Noisy):
    """Nothing but draws, a column from each of the global generators."""

    def __getitem__(self, index):
        return torch.tensor([torch.rand(()), np.random.rand(), random.random(), 0.0]), self.y[index]  # noqa: NPY002


def test_transforms_draw_as_the_number_of_the_sample_says(tmp_path):
    def seen(max_samples):
        callback = Recording(every_n_epochs=1, data="train", max_samples=max_samples)
        fit(tmp_path, callback, loader=DataLoader(Drawn(), batch_size=8), max_epochs=1)
        return callback.seen[0]

    every, few = seen(32), seen(5)
    assert [len(column.unique()) for column in every.T[:3]] == [32, 32, 32]
    assert {*map(tuple, few.tolist())} <= {*map(tuple, every.tolist())}


class Locked(Noisy):
    def __init__(self, error=TypeError):
        super().__init__()
        self.error = error

    def __deepcopy__(self, memo):
        raise self.error("cannot copy a lock")


class Stream(IterableDataset):
    def __iter__(self):
        return iter(digits())


@pytest.mark.parametrize(
    "kind",
    [
        "a lock",
        "not implemented",
        "a graph",
        "iterable",
        "sampler",
        "batch sampler",
        "sampler of a part",
        "batches",
    ],
)
def test_otherwise_the_first_batches_are_collected(tmp_path, kind):
    loader = {
        "a lock": lambda: DataLoader(Locked(), batch_size=8),
        "not implemented": lambda: DataLoader(Locked(NotImplementedError), batch_size=8),
        "a graph": lambda: DataLoader(
            Locked(RuntimeError), batch_size=8
        ),  # what torch raises for other than leaves
        "iterable": lambda: DataLoader(Stream(), batch_size=8),
        "sampler": lambda: DataLoader(
            digits(), batch_size=8, sampler=SubsetRandomSampler(range(20))
        ),
        "batch sampler": lambda: DataLoader(
            digits(), batch_sampler=[[*range(8)], [*range(8, 16)], [*range(16, 20)]]
        ),
        "sampler of a part": lambda: DataLoader(
            digits(), batch_size=8, sampler=DistributedSampler(range(20), num_replicas=1, rank=0)
        ),
        "batches": lambda: DataLoader(
            [digits()[i : i + 8] for i in range(0, 32, 8)], batch_size=None
        ),
    }[kind]()
    callback = Recording(every_n_steps=1, data="train", max_samples=12)
    fit(tmp_path, callback, loader=loader)
    assert callback.history[0]["step"] == 2, "the pool is full after two batches"
    assert all(torch.equal(seen, callback.seen[0]) and len(seen) == 12 for seen in callback.seen)
    few = Recording(every_n_steps=1, data="train", max_samples=1000)
    trainer = fit(tmp_path, few, loader=loader)
    assert few.history[0]["step"] == trainer.global_step // 2, "all there is after an epoch"


def test_a_probe_that_needs_all_samples_in_each_process_collects_where_there_is_one(tmp_path):
    callback = LocalMinimum(every_n_steps=1, max_samples=12, subset_size=4)
    fit(tmp_path, callback, loader=DataLoader(Stream(), batch_size=8), max_epochs=1)
    assert [row["step"] for row in callback.history] == [2, 3, 4]


def test_what_is_collected_stays_when_a_loader_fills_the_same_tensors_again():
    trainer = SimpleNamespace(lightning_module=nn.Linear(1, 2), world_size=1, global_rank=0)
    source = Source(trainer, "train", 3, 0, Reader(), split=True, missing=3)
    x, y = torch.zeros(2, 1, requires_grad=True), torch.zeros(2, dtype=torch.long)
    for step in range(2):
        with torch.no_grad():
            x.fill_(step), y.fill_(step)
        source.collect((x, y), last=False)
    x.data.fill_(9), y.fill_(9)
    inputs, targets = source.pool
    assert not source.missing
    assert inputs.flatten().tolist() == targets.tolist() == [0, 0, 1]
    assert not inputs.requires_grad


def test_val_looks_at_validation_data(tmp_path):
    class Validated(Classifier):
        def validation_step(self, batch, batch_idx):
            pass

    held_out = digits(64)
    loader = DataLoader(held_out, batch_size=8)
    for val in (loader, [loader]):
        callback = Recording(every_n_epochs=1, data="val")
        fit(tmp_path, callback, model=Validated(), val=val)
        assert torch.equal(callback.seen[0], held_out.tensors[0])
    with pytest.raises(
        ValueError, match=r"`data='val'` needs a loader of an indexed dataset.*got NoneType"
    ):
        fit(tmp_path, Recording(data="val"))


def test_batch_hooks_of_the_module_apply_to_the_subset(tmp_path):
    class Scaled(Classifier):
        def on_before_batch_transfer(self, batch, dataloader_idx):
            return batch[0] + 1, batch[1]

        def on_after_batch_transfer(self, batch, dataloader_idx):
            return batch[0] * 2, batch[1]

    callback, data = Recording(every_n_epochs=1, data="train"), digits()
    fit(tmp_path, callback, model=Scaled(), loader=DataLoader(data, batch_size=8))
    assert torch.equal(callback.seen[0], (data.tensors[0] + 1) * 2)


@pytest.mark.parametrize("both", [False, True])
def test_batch_hooks_of_the_data_module_apply_to_the_subset(tmp_path, both):
    """Where the module has the same hooks, Lightning calls those of the data module alone."""
    data = digits()

    class Shifted(Classifier):
        def on_before_batch_transfer(self, batch, dataloader_idx):
            return batch[0] + 10, batch[1]

    class Data(pl.LightningDataModule):
        def train_dataloader(self):
            return DataLoader(data, batch_size=8)

        def on_before_batch_transfer(self, batch, dataloader_idx):
            return batch[0] + 1, batch[1]

        def on_after_batch_transfer(self, batch, dataloader_idx):
            return batch[0] * 2, batch[1]

    callback = Recording(every_n_epochs=1, data="train")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*both")
        make_trainer(tmp_path, callback).fit(Shifted() if both else Classifier(), datamodule=Data())
    assert torch.equal(callback.seen[0], (data.tensors[0] + 1) * 2)


def test_the_subset_has_the_precision_of_the_training(tmp_path):
    callback = Recording(every_n_epochs=1, data="train")
    fit(tmp_path, callback, precision="64-true")
    assert callback.seen[0].dtype == torch.float64


@dataclass
class Batch:
    image: Tensor
    target: Tensor
    comment: str = ""


@dataclass
class Stereo:
    left: Tensor
    right: Tensor
    target: Tensor


Pair = namedtuple("Pair", ["x", "y"])
Triple = namedtuple("Triple", ["x", "y", "weight"])
X, Y = torch.ones(2, 4), torch.zeros(2, dtype=torch.long)


@pytest.mark.parametrize(
    "batch",
    [
        (X, Y),
        [X, Y],
        Pair(X, Y),
        {"x": X, "y": Y},
        {"image": X, "labels": Y, "id": 3},
        Batch(X, Y, "a"),
    ],
    ids=str,
)
def test_plain_batches_need_no_batch_fn(batch):
    assert read_batch(batch) == (X, Y)


@pytest.mark.parametrize("name", ["targets", "target", "labels", "label", "y"])
def test_targets_go_by_any_of_their_names(name):
    assert read_batch({name: Y, "image": X}) == (X, Y)


@pytest.mark.parametrize("data", ["train_batch", "train"])
@pytest.mark.parametrize(
    "kind", [lambda x, y: {"image": x, "label": y}, Batch, Pair], ids=["dict", "dataclass", "tuple"]
)
def test_trainings_on_plain_batches_need_no_batch_fn(tmp_path, data, kind):
    class Unpacking(Classifier):
        def training_step(self, batch, batch_idx):
            return nn.functional.cross_entropy(self(read_batch(batch)[0]), read_batch(batch)[1])

    def history(model, collate):
        callback = FisherTrace(every_n_steps=2, data=data)
        loader = DataLoader(digits(), batch_size=8, collate_fn=collate)
        fit(tmp_path, callback, model=model, loader=loader, max_epochs=1)
        return callback.history

    def parts(samples):
        return [torch.stack(part) for part in zip(*samples, strict=True)]

    assert history(Unpacking, lambda samples: kind(*parts(samples))) == history(Classifier, parts)


@pytest.mark.parametrize(
    ("batch", "found"),
    [
        ((X, Y, Y), "tuple of Tensor, Tensor, Tensor"),
        (X, r"Tensor of torch.float32 and shape \[2, 4\]"),
        ({"image": X, "mask": Y}, "dict with image, mask"),
        ({"target": X, "label": Y}, "dict with target, label"),
        ((X, [0, 1]), "tuple of Tensor, list"),
        (Batch, "type"),
        ([], "list of nothing"),
    ],
    ids=str,
)
def test_other_batches_are_described(tmp_path, batch, found):
    with pytest.raises(ValueError, match=f"got {found}; set `batch_fn`"):
        read_batch(batch)


@pytest.mark.parametrize(
    ("batch_fn", "found"),
    [
        (lambda batch: batch[0], "got Tensor"),
        (lambda batch: (*batch, 3), "got tuple of Tensor, Tensor, int"),
        (
            lambda batch: (batch["x"], batch["y"]),
            r"got TypeError \(.*\) for list of Tensor, Tensor",
        ),
    ],
    ids=["one tensor", "three", "fails"],
)
@pytest.mark.parametrize("data", ["train_batch", "train"])
def test_a_batch_fn_that_picks_no_pair_is_named(tmp_path, batch_fn, found, data):
    callback = FisherTrace(every_n_steps=2, data=data, batch_fn=batch_fn)
    with pytest.raises(
        ValueError, match=rf"`batch_fn` must return \(inputs, targets\) of every batch, {found}"
    ):
        fit(tmp_path, callback, max_epochs=1)


def test_batch_fn_and_forward_fn(tmp_path):
    class Odd(Classifier):
        def forward(self, x):
            return {"scores": super().forward(x)}

        def training_step(self, batch, batch_idx):
            return nn.functional.cross_entropy(self(batch["deep"]["x"])["scores"], batch["y"])

    def collate(samples):
        x, y = (torch.stack(part) for part in zip(*samples, strict=True))
        return {"deep": {"x": x}, "y": y, "z": y}

    def run(**arguments):
        callback = FisherTrace(every_n_epochs=1, **arguments)
        fit(
            tmp_path,
            callback,
            model=Odd(),
            loader=DataLoader(digits(), batch_size=8, collate_fn=collate),
        )
        return callback.history

    with pytest.raises(ValueError, match="`batch_fn`"):
        run()
    pick = {"batch_fn": lambda batch: (batch["deep"]["x"], batch["y"])}
    with pytest.raises(ValueError, match="dict with scores; set `forward_fn`"):
        run(**pick)
    assert len(run(**pick, forward_fn=lambda module, x: module(x)["scores"])) == 2


def test_a_checkpoint_of_a_long_training_stays_small_and_keeps_the_extremes(tmp_path):
    history = [{"step": step, "fisher_trace": float((step * 37) % 1999)} for step in range(2000)]
    long, resumed = FisherTrace(), FisherTrace()
    long.history = history
    torch.save(long.state_dict(), tmp_path / "state.pt")
    assert (tmp_path / "state.pt").stat().st_size < 20_000
    resumed.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert summary(resumed.history, ["fisher_trace"]) == summary(history, ["fisher_trace"])
    steps = [row["step"] for row in resumed.history]
    assert steps[0] == 0
    assert steps[-1] == 1999
    assert steps == sorted(steps)
    assert max(b - a for a, b in itertools.pairwise(steps)) <= 8


class Combined(Classifier):
    """Trains on the labelled samples; the others are there for a penalty."""

    def training_step(self, batch, batch_idx):
        return super().training_step(batch["labeled"], batch_idx)


@pytest.mark.parametrize(
    "unlabeled", [lambda x, y: x, lambda x, y: (x, y)], ids=["inputs", "pairs"]
)
@pytest.mark.parametrize(
    "batch_fn", [None, lambda batch: batch["labeled"]], ids=["by itself", "batch_fn"]
)
def test_the_labelled_part_of_combined_loaders_is_measured(tmp_path, unlabeled, batch_fn):
    def history(model, loader, **arguments):
        callbacks = [
            probe(every_n_steps=2, data=data, name=data, **arguments)
            for probe in PROBES.values()
            for data in ("train", "train_batch")
        ]
        fit(tmp_path, *callbacks, model=model, loader=loader, max_epochs=1)
        return [callback.history for callback in callbacks]

    def others(samples):
        return unlabeled(*torch.utils.data.default_collate(samples))

    labeled = DataLoader(digits(), batch_size=8)
    loaders = {
        "labeled": labeled,
        "unlabeled": DataLoader(digits(40), batch_size=10, collate_fn=others),
    }
    # No dropout: a second loader draws a seed.
    alone = history(partial(Classifier, dropout=0.0), labeled)
    assert history(partial(Combined, dropout=0.0), loaders, batch_fn=batch_fn) == alone


class Numbered(Dataset):
    """A dataset of one's own, which counts how often it is read."""

    def __init__(self):
        self.reads = 0

    def __len__(self):
        return 8

    def __getitem__(self, index):
        self.reads += 1
        return torch.tensor([float(index)]), torch.rand(1)


def zip_all(samples):
    return [*zip(*samples, strict=True)]


def test_tensors_are_read_as_they_are_and_a_dataset_with_a_state_from_a_copy():
    x, y = torch.arange(8.0)[:, None], torch.arange(8)
    plain = TensorDataset(x, y)
    chosen = [1, 4, 6]
    for dataset in (plain, Subset(plain, range(8))):
        inputs, targets = read_samples(DataLoader(dataset, collate_fn=zip_all), chosen, seed=0)
        assert [x.item() for x in inputs] == [y.item() for y in targets] == [1, 4, 6]
        start = plain.tensors[0].untyped_storage().data_ptr()
        assert inputs[0].untyped_storage().data_ptr() == start, "not copied"
    own = Numbered()
    for dataset in (own, Subset(own, range(8))):
        inputs, drawn = read_samples(DataLoader(dataset), chosen, seed=0)
        again = read_samples(DataLoader(dataset), chosen[1:], seed=0)[1]
        assert inputs.flatten().tolist() == [1, 4, 6]
        assert torch.equal(drawn[1:], again), "as the sample's number says"
    assert own.reads == 0


def test_another_callback_may_hold_a_probe(tmp_path):
    class Holder(pl.Callback):
        def __init__(self) -> None:
            self.probe = HardSamples()

        def on_fit_start(self, *arguments):
            self.probe.on_fit_start(*arguments)

        def on_train_start(self, *arguments):
            self.probe.on_train_start(*arguments)

        def on_train_batch_start(self, *arguments):
            self.probe.on_train_batch_start(*arguments)

        def on_before_backward(self, *arguments):
            self.probe.on_before_backward(*arguments)

        def on_train_batch_end(self, *arguments):
            self.probe.on_train_batch_end(*arguments)

        def on_train_end(self, *arguments):
            self.probe.on_train_end(*arguments)

    holder = Holder()
    fit(tmp_path, holder)
    assert holder.probe.history
