"""What all probes share: the schedule as the logger saw it, samples, checkpoints, and errors that help."""

from collections import namedtuple
from dataclasses import dataclass

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import EarlyStopping, ModelCheckpoint
from pytorch_lightning.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, SubsetRandomSampler

from lightning_taskinfo.callbacks import FisherTrace, LocalMinimum
from lightning_taskinfo.callbacks._samples import inputs_and_targets
from lightning_taskinfo.fisher import fisher_trace
from tests.callbacks.runs import PROBES, Classifier, Noisy, digits, fit, make_trainer, read_csv

all_probes = pytest.mark.parametrize("probe", PROBES.values(), ids=PROBES)


def stored_steps(logger, name):
    return [row["step"] for row in read_csv(logger) if name in row]


@all_probes
@pytest.mark.parametrize(
    ("schedule", "accumulate", "expected"),
    [
        ({"every_n_steps": 1}, 1, [1, 2, 3, 4, 5, 6, 7, 8]),
        ({"every_n_steps": 3}, 1, [3, 6]),
        ({"every_n_steps": 1}, 2, [1, 2, 3, 4]),
        ({"every_n_steps": 3}, 3, [3]),  # 4 batches an epoch: steps after batches 3 and 4
        ({"every_n_epochs": 1}, 1, [4, 8]),
        ({"every_n_epochs": 2}, 1, [8]),
        ({"every_n_epochs": 1}, 3, [2, 4]),
    ],
    ids=str,
)
def test_the_logger_stores_every_due_measurement_once(tmp_path, probe, schedule, accumulate, expected):
    callback, logger = probe(**schedule, data="train_batch"), CSVLogger(tmp_path)
    fit(tmp_path, callback, logger=logger, log_every_n_steps=3, accumulate_grad_batches=accumulate)
    assert stored_steps(logger, callback.headline[0]) == expected
    assert [row["step"] for row in callback.history] == expected


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
    monitor = f"mine/{callback.headline[0]}"
    saved = ModelCheckpoint(tmp_path, monitor=monitor, save_top_k=2, filename="{step}")
    stopping = EarlyStopping(monitor, patience=0, min_delta=1e9, check_on_train_epoch_end=True)
    trainer = fit(tmp_path, callback, saved, stopping, enable_checkpointing=True, max_epochs=9)
    assert trainer.current_epoch == 2
    assert trainer.global_step == 8
    assert sorted(float(v) for v in saved.best_k_models.values()) == pytest.approx(
        sorted(row[callback.headline[0]] for row in callback.history)
    )


@all_probes
def test_resuming_gives_the_history_of_the_uninterrupted_run(tmp_path, probe):
    arguments = {"loader": DataLoader(digits(), batch_size=8), "max_epochs": 4}

    def run(**more):
        callbacks = [probe(every_n_steps=3, data=data, name=data) for data in ("train_batch", "train")]
        trainer = fit(tmp_path, *callbacks, model=lambda: Classifier(dropout=0.0), **{**arguments, **more})
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


class Locked(Noisy):
    def __deepcopy__(self, memo):
        raise TypeError("cannot copy a lock")


@pytest.mark.parametrize("kind", ["cannot be copied", "iterable", "sampler"])
def test_otherwise_the_first_batches_are_collected(tmp_path, kind):
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(digits())

    loader = {
        "cannot be copied": lambda: DataLoader(Locked(), batch_size=8),
        "iterable": lambda: DataLoader(Stream(), batch_size=8),
        "sampler": lambda: DataLoader(digits(), batch_size=8, sampler=SubsetRandomSampler(range(20))),
    }[kind]()
    callback = Recording(every_n_steps=1, data="train", max_samples=12)
    fit(tmp_path, callback, loader=loader)
    assert callback.history[0]["step"] == 2, "the pool is full after two batches"
    assert all(torch.equal(seen, callback.seen[0]) and len(seen) == 12 for seen in callback.seen)
    few = Recording(every_n_steps=1, data="train", max_samples=1000)
    trainer = fit(tmp_path, few, loader=loader)
    assert few.history[0]["step"] == trainer.global_step // 2, "all there is after an epoch"


def test_val_looks_at_validation_data(tmp_path):
    class Validated(Classifier):
        def validation_step(self, batch, batch_idx):
            pass

    callback, held_out = Recording(every_n_epochs=1, data="val"), digits(64)
    fit(tmp_path, callback, model=Validated(), val=DataLoader(held_out, batch_size=8))
    assert torch.equal(callback.seen[0], held_out.tensors[0])
    with pytest.raises(ValueError, match=r"`data='val'` needs a loader of an indexed dataset.*got NoneType"):
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


@dataclass
class Batch:
    image: Tensor
    target: Tensor
    comment: str = ""


Pair = namedtuple("Pair", ["x", "y"])
X, Y = torch.ones(2, 4), torch.zeros(2, dtype=torch.long)


@pytest.mark.parametrize(
    "batch",
    [(X, Y), [X, Y], Pair(X, Y), {"x": X, "y": Y}, {"image": X, "labels": Y, "id": 3}, Batch(X, Y, "a")],
    ids=str,
)
def test_plain_batches_need_no_batch_fn(batch):
    assert inputs_and_targets(batch) == (X, Y)


@pytest.mark.parametrize(
    ("batch", "found"),
    [
        ((X, Y, Y), "tuple of Tensor, Tensor, Tensor"),
        (X, "Tensor"),
        ({"a": X, "b": X, "label": Y}, "dict with a, b, label"),
        ({"image": X, "mask": Y}, "dict with image, mask"),
        ([], "list of nothing"),
    ],
    ids=str,
)
def test_other_batches_are_described(tmp_path, batch, found):
    with pytest.raises(ValueError, match=f"got {found}; set `batch_fn`"):
        inputs_and_targets(batch)


def test_batch_fn_and_forward_fn(tmp_path):
    class Odd(Classifier):
        def forward(self, x):
            return {"logits": super().forward(x)}

        def training_step(self, batch, batch_idx):
            return nn.functional.cross_entropy(self(batch["deep"]["x"])["logits"], batch["y"])

    def collate(samples):
        x, y = (torch.stack(part) for part in zip(*samples, strict=True))
        return {"deep": {"x": x}, "y": y, "z": y}

    def run(**arguments):
        callback = FisherTrace(every_n_epochs=1, **arguments)
        fit(tmp_path, callback, model=Odd(), loader=DataLoader(digits(), batch_size=8, collate_fn=collate))
        return callback.history

    with pytest.raises(ValueError, match="got dict with deep, y, z; set `batch_fn`"):
        run()
    pick = {"batch_fn": lambda batch: (batch["deep"]["x"], batch["y"])}
    with pytest.raises(ValueError, match="FisherTrace needs a tensor of outputs, got dict; set `forward_fn`"):
        run(**pick)
    assert len(run(**pick, forward_fn=lambda module, x: module(x)["logits"])) == 2


# Bad input


@all_probes
@pytest.mark.parametrize("argument", ["every_n_steps", "every_n_epochs", "max_samples", "mc_samples"])
def test_refuses_non_positive(probe, argument):
    with pytest.raises(ValueError, match=f"`{argument}` must be at least 1, got 0"):
        probe(**{argument: 0})


@all_probes
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"labels": "true"}, "`labels` must be one of .*, got 'true'"),
        ({"likelihood": "poisson"}, "`likelihood` must be one of .*, got 'poisson'"),
        ({"data": "test"}, "`data` must be one of train_batch, train, val.*, got 'test'"),
        ({"every_n_steps": 1, "every_n_epochs": 2}, "`every_n_epochs` must be left out beside `every_n_steps`, got 2"),
    ],
    ids=str,
)
def test_refuses_wrong_arguments_when_made(probe, arguments, message):
    with pytest.raises(ValueError, match=message):
        probe(**arguments)


@all_probes
def test_refuses_a_module_without_trainable_parameters(tmp_path, probe):
    class Still(Classifier):
        def __init__(self):
            super().__init__()
            self.requires_grad_(False)

    with pytest.raises(ValueError, match="needs a parameter with `requires_grad=True`, got none"):
        fit(tmp_path, probe(), model=Still())


class Regression(Classifier):
    def training_step(self, batch, batch_idx):
        return self(batch[0]).square().mean()


@all_probes
@pytest.mark.parametrize("data", ["train_batch", "train"])
def test_refuses_a_likelihood_that_does_not_fit_before_the_first_step(tmp_path, probe, data):
    real = torch.utils.data.TensorDataset(torch.randn(16, 4), torch.randn(16, 3))
    model = Regression()
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(ValueError, match=r"`targets` must be class indices .* got torch.float32 of shape \[2, 3\]"):
        fit(tmp_path, probe(data=data), model=model, loader=DataLoader(real, batch_size=8))
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


@all_probes
def test_weights_that_are_not_finite_leave_a_gap_and_one_warning(tmp_path, probe):
    class Diverging(Classifier):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            if self.global_step == 2:
                nn.init.constant_(self.net[4].weight, torch.nan)

    callback = probe(every_n_steps=1, data="train_batch")
    with pytest.warns(UserWarning, match="could not measure at step 3 .*weights of 'net.0.weight' are not finite"):
        fit(tmp_path, callback, model=Diverging())
    assert [row["step"] for row in callback.history] == [1, 2]


@all_probes
def test_an_empty_loader_measures_nothing(tmp_path, probe):
    callback = probe(every_n_steps=1)
    fit(tmp_path, callback, loader=DataLoader(digits()), limit_train_batches=0)
    assert callback.history == []


def test_batch_size_one(tmp_path):
    class Plain(Classifier):
        def __init__(self):
            super().__init__()
            self.net = nn.Linear(4, 3)

    callback = FisherTrace(every_n_steps=1)
    fit(tmp_path, callback, model=Plain(), loader=DataLoader(digits(4), batch_size=1), max_epochs=1)
    assert len(callback.history) == 4
    assert all(
        row["fisher_trace"] > 0 and row["fisher_trace_standard_error"] != row["fisher_trace_standard_error"]
        for row in callback.history
    )


def test_a_module_without_forward_is_told_to_set_forward_fn(tmp_path):
    class NoForward(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def training_step(self, batch, batch_idx):
            return nn.functional.cross_entropy(self.layer(batch[0]), batch[1])

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    with pytest.raises(ValueError, match=r"calls the module on the inputs of a batch, which failed .*set `forward_fn`"):
        fit(tmp_path, FisherTrace(), model=NoForward())
    callback = FisherTrace(every_n_steps=8, forward_fn=lambda module, x: module.layer(x), labels="exact")
    model = NoForward()
    fit(tmp_path, callback, model=model, loader=DataLoader(digits(), batch_size=8))
    expected = fisher_trace(model.layer, digits().tensors[0][-8:], labels="exact")
    assert callback.history[-1]["fisher_trace"] == pytest.approx(expected.item())
