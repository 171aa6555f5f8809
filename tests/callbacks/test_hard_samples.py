"""``HardSamples``: losses against those of the very training step, norms against a loop over samples after it."""

import copy
import itertools
import math
import warnings
from collections import Counter
from pathlib import Path

import pytest
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.loggers import CSVLogger
from pytorch_lightning.plugins import MixedPrecision
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from lightning_taskinfo import FisherTrace, HardSamples, TaskInfoWarning
from tests.callbacks.runs import Classifier, digits, fit, read_csv


class Dropping(Classifier):
    """Dropout, and no batch norm: a sample's gradient is its own. Keeps what a loop over each step's samples gives."""

    reduction = "mean"

    def __init__(self, dropout=0.5):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 3))
        self.expected = []  # a batch: numbers of samples, losses, squared norms after the step

    def training_step(self, batch, batch_idx):
        x, y = batch
        twin, state = copy.deepcopy(self.net), torch.get_rng_state()
        loss = F.cross_entropy(self(x), y, reduction=self.reduction)
        after = torch.get_rng_state()
        torch.set_rng_state(state)
        with torch.no_grad():
            losses = F.cross_entropy(twin(x), y, reduction="none").float()
        torch.set_rng_state(after)
        self.expected.append((numbers(x), losses, None))
        return loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if (batch_idx + 1) % self.trainer.accumulate_grad_batches:
            return  # no optimizer step
        if batch is None or not self.expected:  # left out, or a training step of its own
            return
        x, y = named(batch) if isinstance(batch, dict) else batch
        twin = copy.deepcopy(self.net).eval()
        with torch.enable_grad():
            norms = [self.squared_norm(twin, x, y, n) for n in range(len(x))]
        self.expected[-1] = (*self.expected[-1][:2], torch.stack(norms))

    @staticmethod
    def squared_norm(net, x, y, n):
        loss = F.cross_entropy(net(x), y, reduction="none")[n]
        gradients = torch.autograd.grad(loss, [*net.parameters()])
        return sum(g.square().sum() for g in gradients)


class Summed(Dropping):
    reduction = "sum"


class Plain(Dropping):
    def __init__(self):
        super().__init__(dropout=0.0)


def numbers(x):
    """Return which of all samples these are, by comparing them."""
    return [(digits().tensors[0] == row).all(1).nonzero().item() for row in x]


def means(batches, part):
    """Return the mean of losses (1) or norms (2) by sample over batches."""
    sums, counts = torch.zeros(32), torch.zeros(32)
    for batch in batches:
        if batch[part] is None:
            continue
        for n, value in zip(batch[0], batch[part], strict=True):
            sums[n] += value
            counts[n] += 1
    return sums / counts


def scaled():
    return MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=2.0**10))


def loader(**arguments):
    return DataLoader(digits(), **{"batch_size": 8, "shuffle": True, **arguments})


@pytest.mark.parametrize(
    ("model", "callback", "loaded", "trainer", "rtol"),
    [
        (Dropping, {}, {}, {}, 1e-4),
        (Dropping, {}, {"num_workers": 2, "persistent_workers": True}, {}, 1e-4),
        (Dropping, {}, {"batch_size": 5, "drop_last": True}, {"limit_train_batches": 4}, 1e-4),
        (Summed, {}, {}, {}, 1e-4),
        (Dropping, {}, {}, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}, 1e-4),
        (Dropping, {}, {}, {"plugins": [scaled]}, 0.03),
        (Dropping, {}, {}, {"precision": "bf16-mixed"}, 0.06),
    ],
    ids=["mean", "workers", "parts of epochs", "sum", "accumulation", "gradient scaler", "bf16"],
)
def test_samples_have_the_losses_and_norms_of_a_loop(
    tmp_path, model, callback, loaded, trainer, rtol
):
    trainer = {
        key: [make() for make in value] if key == "plugins" else value
        for key, value in trainer.items()
    }
    callback = HardSamples(every_n_steps=1, **callback)
    module = model()
    fit(tmp_path, callback, model=module, loader=loader(**loaded), max_epochs=3, **trainer)
    samples = callback.samples
    known = len(samples.seen)
    close = {"rtol": rtol, "atol": rtol, "equal_nan": True}
    torch.testing.assert_close(samples.loss, means(module.expected, 1)[:known], **close)
    torch.testing.assert_close(samples.squared_norm, means(module.expected, 2)[:known], **close)
    assert samples.seen.tolist() == [
        sum(n in batch[0] for batch in module.expected) for n in range(known)
    ]
    assert (
        samples.ranking().tolist()
        == samples.loss.nan_to_num(-1).argsort(descending=True)[: (samples.seen > 0).sum()].tolist()
    )


def test_norms_are_of_the_first_samples_of_a_batch(tmp_path):
    callback = HardSamples(max_samples=3, rank_by="squared_norm")
    module = Dropping()
    fit(tmp_path, callback, model=module, loader=loader(), max_epochs=3)
    read = [(numbers[:3], None, norms[:3]) for numbers, _, norms in module.expected]
    close = {"rtol": 1e-4, "atol": 1e-4, "equal_nan": True}
    torch.testing.assert_close(callback.samples.squared_norm, means(read, 2), **close)
    torch.testing.assert_close(callback.samples.loss, means(module.expected, 1))


@pytest.mark.parametrize(("every", "accumulate"), [(1, 1), (3, 1), (1, 2)])
def test_logs_the_mean_over_the_samples_of_a_step(tmp_path, every, accumulate):
    module, callback, logger = Dropping(), HardSamples(every_n_steps=every), CSVLogger(tmp_path)
    fit(tmp_path, callback, model=module, logger=logger, accumulate_grad_batches=accumulate)
    expected = module.expected[every * accumulate - 1 :: every * accumulate]
    assert [row["step"] for row in callback.history] == [
        every * (i + 1) for i in range(len(expected))
    ]
    for row, (_, losses, norms) in zip(callback.history, expected, strict=True):
        assert row["sample_loss"] == pytest.approx(losses.mean().item(), rel=1e-5)
        assert row["squared_gradient_norm"] == pytest.approx(norms.mean().item(), rel=1e-5)
        error = (norms.std() / len(norms) ** 0.5).item()
        assert row["squared_gradient_norm_standard_error"] == pytest.approx(error, rel=1e-4)
        layers = row["squared_gradient_norm/net.0"] + row["squared_gradient_norm/net.3"]
        assert layers == pytest.approx(row["squared_gradient_norm"])
    key = next(key for key in read_csv(logger)[0] if key.endswith("squared_gradient_norm"))
    assert [row[key] for row in read_csv(logger) if key in row] == [
        r["squared_gradient_norm"] for r in callback.history
    ]


def test_a_training_shorter_than_the_schedule_is_measured_at_its_end(tmp_path):
    callback = HardSamples(every_n_steps=100)
    with warnings.catch_warnings():
        warnings.simplefilter("error", TaskInfoWarning)
        fit(tmp_path, callback, model=Plain)
    assert [row["step"] for row in callback.history] == [8]
    assert callback.samples.seen.tolist() == [2] * 32


def test_without_norms_the_network_is_run_by_the_training_alone(tmp_path):
    def passes(*callbacks):
        counts = Counter()

        class Counted(Classifier):
            def forward(self, x):
                counts["forward"] += 1
                out = super().forward(x)
                if out.requires_grad:
                    out.register_hook(lambda _: counts.update(["backward"]))
                return out

        fit(tmp_path, *callbacks, model=Counted)
        return counts

    assert passes() == {"forward": 8, "backward": 8}
    assert passes(HardSamples(norms=False)) == {"forward": 8, "backward": 8}


# Which samples


def test_somebody_else_may_read_the_loader_in_between(tmp_path):
    class Reads(pl.Callback):
        def on_train_batch_end(self, trainer, *_):
            state = torch.get_rng_state()
            for _ in itertools.islice(trainer.train_dataloader, 1 + trainer.global_step % 3):
                pass
            torch.set_rng_state(state)

    module, callback = Plain(), HardSamples()
    fit(tmp_path, callback, Reads(), model=module, max_epochs=3)
    torch.testing.assert_close(
        callback.samples.loss, means(module.expected, 1), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("breaks", [False, True])
def test_loader_and_strategy_are_left_as_they_were(tmp_path, breaks):
    class Broken(Plain):
        def training_step(self, batch, batch_idx):
            if batch_idx == 2 and breaks:
                raise ArithmeticError("no")
            return super().training_step(batch, batch_idx)

    class Look(pl.Callback):
        def on_train_batch_start(self, trainer, *_):
            found.append((trainer.train_dataloader.batch_sampler, trainer.strategy))

    found, own, module = [], loader(), Broken()
    before = {**vars(own)}
    try:
        fit(
            tmp_path,
            HardSamples(),
            HardSamples(name="second"),
            Look(),
            model=module,
            loader=own,
        )
    except ArithmeticError:
        assert breaks
    assert found[0][0] is not own.batch_sampler
    assert vars(own) == before
    assert "process_dataloader" not in vars(found[0][1])
    assert all(not m._forward_hooks for m in module.modules())


def test_loaders_that_are_made_anew_are_followed(tmp_path):
    class Reloading(pl.LightningDataModule):
        def train_dataloader(self):
            return loader()

    module, callback = Plain(), HardSamples()
    fit(
        tmp_path,
        callback,
        model=module,
        loader=Reloading(),
        max_epochs=3,
        reload_dataloaders_every_n_epochs=1,
    )
    torch.testing.assert_close(
        callback.samples.loss, means(module.expected, 1), rtol=1e-4, atol=1e-5
    )


class Stream(IterableDataset):
    def __iter__(self):
        for n, (x, y) in enumerate(digits()):
            yield {"x": x, "target": y, "number": n}


class Batches:
    def __iter__(self):
        return iter(DataLoader(digits(), batch_size=8))

    def __len__(self):
        return 4


class Named(Plain):
    def training_step(self, batch, batch_idx):
        return super().training_step((batch["x"], batch["target"]), batch_idx)


def named(batch):
    return batch["x"], batch["target"]


def test_a_stream_has_numbers_where_the_batch_says_so(tmp_path):
    module, callback = (
        Named(),
        HardSamples(batch_fn=named, index_fn=lambda batch: batch["number"]),
    )
    fit(tmp_path, callback, model=module, loader=DataLoader(Stream(), batch_size=8))
    torch.testing.assert_close(
        callback.samples.loss, means(module.expected, 1), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize(
    ("make", "model"),
    [
        (lambda: DataLoader(Stream(), batch_size=8), Named),
        (lambda: Batches(), Plain),
        (lambda: loader(num_workers=1, in_order=False), Plain),
    ],
    ids=["stream", "batches", "out of order"],
)
def test_samples_without_numbers_are_not_ranked(tmp_path, make, model):
    callback = HardSamples(every_n_steps=1, batch_fn=named if model is Named else None)
    with pytest.warns(TaskInfoWarning, match="`index_fn`"):
        fit(tmp_path, callback, model=model, loader=make(), max_epochs=1)
    assert not len(callback.samples.seen)
    assert callback.history


def sorted_by_first(samples):
    return [torch.stack(part) for part in zip(*sorted(samples, key=lambda s: s[0][0]), strict=True)]


def test_a_collating_function_of_ones_own_is_asked_about(tmp_path):
    with pytest.warns(TaskInfoWarning, match="'sorted_by_first'.*`index_fn`"):
        fit(
            tmp_path,
            HardSamples(),
            model=Plain,
            loader=loader(collate_fn=sorted_by_first),
            max_epochs=1,
        )
    with warnings.catch_warnings():
        warnings.simplefilter("error", TaskInfoWarning)
        fit(tmp_path, HardSamples(), model=Plain, max_epochs=1)


@pytest.mark.parametrize("found", [[0.5] * 8, [1] * 7, None, [-1] * 8, [10**12] * 8, [2**70] * 8])
def test_numbers_that_are_none_of_samples_are_refused(tmp_path, found):
    with pytest.raises(ValueError, match="`index_fn`"):
        fit(tmp_path, HardSamples(index_fn=lambda batch: found), model=Plain)


class Shuffled(Plain):
    """The training step has the samples in another order than the batch."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        order = x[:, 0].argsort()
        return F.cross_entropy(self(x[order]), y[order])


class Sorting(nn.Sequential):
    """The first layer has the samples in another order, and those behind it do not."""

    def forward(self, x):
        order = x[:, 0].argsort()
        first, *others = self
        return nn.Sequential(*others)(first(x[order])[order.argsort()])


class Rolling(nn.Sequential):
    """Without a number in the graph."""

    def forward(self, x):
        first, *others = self
        hidden = first(torch.cat([x[1:], x[:1]]))
        return nn.Sequential(*others)(torch.cat([hidden[-1:], hidden[:-1]]))


class Sorted(Plain):
    def __init__(self):
        super().__init__()
        self.net = Sorting(*self.net)


class Rolled(Plain):
    def __init__(self):
        super().__init__()
        self.net = Rolling(*self.net)


@pytest.mark.parametrize("model", [Sorted, Rolled])
def test_rows_that_are_moved_on_the_way_are_found_again(tmp_path, model):
    module, callback = model(), HardSamples(rank_by="squared_norm")
    fit(tmp_path, callback, model=module, max_epochs=3)
    close = {"rtol": 1e-4, "atol": 1e-5}
    samples = callback.samples
    torch.testing.assert_close(samples.loss, means(module.expected, 1), **close)
    torch.testing.assert_close(samples.squared_norm, means(module.expected, 2), **close)


def test_losses_in_another_order_are_refused_and_norms_are_in_that_of_the_batch(tmp_path):
    with pytest.raises(ValueError, match="targets"):
        fit(tmp_path, HardSamples(), model=Shuffled)
    callback, usual = (HardSamples(rank_by="squared_norm") for _ in range(2))
    fit(tmp_path, callback, model=Shuffled)
    fit(tmp_path, usual, model=Plain)
    close = {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(callback.samples.squared_norm, usual.samples.squared_norm, **close)
    assert callback.samples.loss.isnan().all()


# What can be read


class Smoothed(Plain):
    def training_step(self, batch, batch_idx):
        super().training_step(batch, batch_idx)
        weight = torch.tensor([1.0, 2.0, 3.0])
        return F.cross_entropy(self.net(batch[0]), batch[1], label_smoothing=0.1, weight=weight)


def test_losses_are_without_smoothing_and_weights(tmp_path):
    module, callback = Smoothed(), HardSamples(norms=False)
    fit(tmp_path, callback, model=module)
    torch.testing.assert_close(
        callback.samples.loss, means(module.expected, 1), rtol=1e-4, atol=1e-5
    )
    assert callback.samples.squared_norm.isnan().all()


class Own(Plain):
    def training_step(self, batch, batch_idx):
        out = self(batch[0])
        return (out.exp().sum(1).log() - (out * F.one_hot(batch[1], 3)).sum(1)).mean()


def test_a_loss_that_is_not_known_is_refused_or_done_without(tmp_path):
    with pytest.raises(ValueError, match="rank_by='squared_norm'"):
        fit(tmp_path, HardSamples(), model=Own)
    callback = HardSamples(rank_by="squared_norm")
    usual = HardSamples(rank_by="squared_norm")
    fit(tmp_path, callback, model=Own)
    fit(tmp_path, usual, model=Plain)
    torch.testing.assert_close(
        callback.samples.squared_norm, usual.samples.squared_norm, rtol=1e-3, atol=1e-4
    )
    assert callback.samples.loss.isnan().all()
    assert math.isnan(callback.history[0]["sample_loss"])


class Twice(nn.Sequential):
    def forward(self, x):
        return super().forward(x + super().forward(x).sum(1, keepdim=True))


class Reused(Plain):
    def __init__(self):
        super().__init__()
        self.net = Twice(*self.net)


class Manual(Plain):
    automatic_optimization = False


class Centred(nn.Module):
    def forward(self, x):
        return x - x.mean(0)


class Mixed(Plain):
    def __init__(self):
        super().__init__()
        self.net.insert(1, Centred())


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x):
        return x + self.a(x).tanh()


def partly_compiled():
    module = Plain()
    module.net.insert(0, torch.compile(Residual(), backend="aot_eager"))
    return module


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Manual, "automatic optimization"),
        (lambda: torch.compile(Plain(), backend="aot_eager"), "losses of samples.*compiled"),
    ],
)
def test_refuses_by_name_before_the_first_step(tmp_path, model, message):
    model = model()
    with pytest.raises(ValueError, match=message):
        fit(tmp_path, HardSamples(), model=model)
    assert model.global_step == 0


@pytest.mark.parametrize(
    "model", [Reused, partly_compiled, lambda: torch.compile(Plain(), backend="eager")]
)
def test_networks_of_many_kinds_are_read(tmp_path, model):
    module, callback = model(), HardSamples(rank_by="squared_norm")
    fit(tmp_path, callback, model=module)
    expected = means(getattr(module, "_orig_mod", module).expected, 2)
    torch.testing.assert_close(callback.samples.squared_norm, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("model", [Reused, Mixed])
def test_losses_alone_can_be_followed_of_any_network(tmp_path, model):
    module, callback = model(), HardSamples(norms=False, every_n_steps=2)
    fit(tmp_path, callback, model=module)
    torch.testing.assert_close(
        callback.samples.loss, means(module.expected, 1), rtol=1e-4, atol=1e-5
    )
    assert callback.headline == ("sample_loss",)
    assert len(callback.history) == 4


def test_a_skipped_step_leaves_a_gap(tmp_path):
    class Skipping(Plain):
        def training_step(self, batch, batch_idx):
            return None if batch_idx == 1 else super().training_step(batch, batch_idx)

    module, callback = Skipping(), HardSamples(every_n_steps=1)
    with pytest.warns(
        UserWarning, match="could not measure at step 2 .*the training step had no backward pass"
    ):
        fit(tmp_path, callback, model=module, max_epochs=1)
    assert [row["step"] for row in callback.history] == [1, 3, 4]
    assert callback.samples.seen.sum() == 24


def test_a_batch_that_cannot_be_read_is_refused_first_and_a_gap_later(tmp_path):
    seen = []

    def some(batch):
        if not seen or not torch.equal(seen[-1], batch[0]):
            seen.append(batch[0].clone())
        if len(seen) == fails_at:
            raise LookupError("no images in this batch")
        return batch

    fails_at = 1
    with pytest.raises((LookupError, ValueError), match="no images in this batch"):
        fit(tmp_path, HardSamples(batch_fn=some), model=Plain)
    seen.clear()
    fails_at = 2
    callback = HardSamples(every_n_steps=1, batch_fn=some)
    with pytest.warns(UserWarning, match="could not measure at step 2 .*no images in this batch"):
        fit(tmp_path, callback, model=Plain, max_epochs=1)
    assert [row["step"] for row in callback.history] == [1, 3, 4]


def test_what_is_not_finite_does_not_count(tmp_path):
    class Diverging(Plain):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx) * (
                math.nan if self.global_step >= 2 else 1.0
            )

    module, callback = Diverging(), HardSamples(every_n_steps=1)
    with pytest.warns(UserWarning, match="could not measure at step 3 .*finite numbers"):
        fit(tmp_path, callback, model=module, max_epochs=1)
    assert [row["step"] for row in callback.history] == [1, 2]
    assert callback.samples.squared_norm.isfinite().sum() == 16


# Beside others, in checkpoints


def test_callback_metrics_have_it(tmp_path):
    callback = HardSamples(every_n_steps=2)
    key = callback._key("squared_gradient_norm")
    saved = ModelCheckpoint(tmp_path, monitor=key, save_top_k=2)
    fit(tmp_path, callback, saved, model=Plain, enable_checkpointing=True)
    values = {row["step"]: row["squared_gradient_norm"] for row in callback.history}
    assert sorted(map(float, saved.best_k_models.values())) == pytest.approx(
        sorted([values[4], values[8]])
    )


def test_a_resumed_training_goes_on_with_its_samples(tmp_path):
    def run(callback, **arguments):
        trainer = fit(tmp_path, callback, model=Plain, loader=loader(shuffle=False), **arguments)
        trainer.save_checkpoint(tmp_path / "end.ckpt")
        return callback.samples

    whole = run(HardSamples(rank_by="squared_norm"), max_epochs=4)
    half = run(HardSamples(rank_by="squared_norm"), max_epochs=2)
    resumed = run(
        HardSamples(rank_by="squared_norm"), max_epochs=4, ckpt_path=tmp_path / "end.ckpt"
    )
    assert half.seen.tolist() == [2] * 32
    assert resumed.seen.tolist() == [4] * 32
    torch.testing.assert_close(
        (resumed.loss, resumed.squared_norm), (whole.loss, whole.squared_norm)
    )
    stored = torch.load(tmp_path / "end.ckpt", weights_only=True)["callbacks"]["HardSamples"][
        "samples"
    ]
    assert stored.numel() * stored.element_size() == 5 * 4 * 32  # five numbers a sample


def test_a_second_fit_goes_on_and_another_module_begins_anew(tmp_path):
    module, callback = Plain(), HardSamples()
    fit(tmp_path, callback, model=module)
    fit(tmp_path, callback, model=module)
    assert callback.samples.seen.tolist() == [4] * 32
    with pytest.warns(TaskInfoWarning, match="another module"):
        fit(tmp_path, callback, model=Plain)
    assert callback.samples.seen.tolist() == [2] * 32


def test_loggers_get_table_and_figure(tmp_path, monkeypatch):
    monkeypatch.setattr("lightning_taskinfo.callbacks.hard_samples.LISTED", 5)
    logger, callback = CSVLogger(tmp_path), HardSamples()
    fit(tmp_path, callback, model=Plain, logger=logger)
    (stored,) = Path(logger.log_dir).glob("*samples_table.csv")
    lines = [line.split(",") for line in stored.read_text().split()]
    assert lines[0] == ["rank", "index", "loss", "squared_norm", "seen"]
    assert [int(line[1]) for line in lines[1:]] == callback.samples.ranking()[:5].tolist()
    assert len([*Path(logger.log_dir).glob("*samples_figure.png")]) == 1


def test_beside_itself_and_another_callback(tmp_path):
    alone, beside, second = (HardSamples(name=name, every_n_steps=1) for name in "abc")
    fit(tmp_path, alone)
    fit(tmp_path, beside, FisherTrace(every_n_steps=1), second)
    assert alone.history == beside.history == second.history
    torch.testing.assert_close(alone.samples.loss, second.samples.loss)


@pytest.mark.parametrize(
    "argument",
    [
        {"rank_by": "size"},
        {"max_samples": 0},
        {"every_n_steps": 0},
    ],
)
def test_refuses_wrong_arguments(argument):
    (name,) = argument
    with pytest.raises((ValueError, TypeError), match=f"`{name}`.*{argument[name]}"):
        HardSamples(**argument)


def test_norms_cannot_rank_where_they_are_not_read():
    with pytest.raises(ValueError, match=r"`rank_by`.*squared_norm"):
        HardSamples(norms=False, rank_by="squared_norm")


def test_norms_are_measured_where_values_are_logged(tmp_path):
    logged, short = HardSamples(every_n_steps=3), HardSamples()
    ranking = HardSamples(rank_by="squared_norm")
    both = HardSamples(rank_by="squared_norm", every_n_steps=3)
    every_third = slice(2, None, 3)
    due = {logged: every_third, short: slice(0), ranking: slice(None), both: every_third}
    for callback, steps in due.items():
        module = Dropping()
        fit(tmp_path, callback, model=module, loader=loader(shuffle=False), max_epochs=2)
        assert len(module.expected) == 8
        expected = means(module.expected[steps], 2)
        found = callback.samples.squared_norm
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4, equal_nan=True)
        torch.testing.assert_close(callback.samples.loss, means(module.expected, 1))
    assert [row["step"] for row in short.history] == [8]
    assert short.history[-1]["squared_gradient_norm"] > 0


def test_a_training_that_stops_before_any_value_is_due_logs_its_last_step(tmp_path):
    class Stops(pl.Callback):
        def on_train_batch_end(self, trainer, *_):
            trainer.should_stop = trainer.global_step == 5

    module, callback = Plain(), HardSamples()
    with warnings.catch_warnings():
        warnings.simplefilter("error", TaskInfoWarning)
        fit(tmp_path, callback, Stops(), model=module, max_epochs=2)
    (row,) = callback.history
    assert row["step"] == 5
    _, losses, norms = module.expected[-1]
    assert row["sample_loss"] == pytest.approx(losses.mean().item(), rel=1e-5)
    assert row["squared_gradient_norm"] == pytest.approx(norms.mean().item(), rel=1e-5)
    assert callback.samples.loss.isfinite().sum() > 0


def test_norms_of_a_training_of_unknown_length_are_read_where_they_are_logged(tmp_path):
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(digits())

    callback = HardSamples(every_n_steps=3, index_fn=lambda batch: [*range(8)])
    fit(tmp_path, callback, model=Plain, loader=DataLoader(Stream(), batch_size=8), max_epochs=1)
    assert callback.samples.seen.tolist() == [4] * 8
    assert [row["step"] for row in callback.history] == [3]
    sums = callback._sums.table
    assert sums[2].tolist() == [4.0] * 8, "losses of all four steps"
    assert sums[3].tolist() == [1.0] * 8, "norms of the third"


def test_a_loader_may_use_the_memory_of_its_labels_again(tmp_path):
    labels = torch.empty(8, dtype=torch.long)

    def into_one_place(rows):
        torch.stack([y for _, y in rows], out=labels)
        return torch.stack([x for x, _ in rows]), labels

    class Copying(Plain):
        def training_step(self, batch, batch_idx):
            return super().training_step((batch[0], batch[1].clone()), batch_idx)

    module, callback = Copying(), HardSamples(norms=False)
    with pytest.warns(TaskInfoWarning, match="`index_fn`"):
        fit(tmp_path, callback, model=module, loader=loader(collate_fn=into_one_place))
    torch.testing.assert_close(callback.samples.loss, means(module.expected, 1))


def test_a_batch_that_lightning_leaves_out_moves_no_numbers(tmp_path):
    def some_are_none(rows):
        x, y = torch.utils.data.default_collate(rows)
        return None if 3 in numbers(x) else (x, y)

    module, callback = Plain(), HardSamples(norms=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fit(tmp_path, callback, model=module, loader=loader(collate_fn=some_are_none), max_epochs=4)
    expected = means(module.expected, 1)
    torch.testing.assert_close(callback.samples.loss, expected, equal_nan=True)
    assert callback.samples.seen[3] == 0


def test_a_training_that_is_resumed_within_an_epoch_knows_its_samples(tmp_path):
    def run(module, callback, **arguments):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*ended before the epoch ended|.*exists and is not")
            saved = ModelCheckpoint(tmp_path, every_n_train_steps=2, save_top_k=-1)
            loaded = loader(shuffle=False)
            fit(
                tmp_path, saved, callback, model=module, loader=loaded, enable_checkpointing=True,
                **arguments,
            )  # fmt: skip

    first, second, callback = Plain(), Plain(), HardSamples(norms=False)
    run(first, HardSamples(norms=False), max_epochs=1)
    run(second, callback, max_epochs=2, ckpt_path=tmp_path / "epoch=0-step=2.ckpt")
    assert len(second.expected) == 6
    assert second.expected[0][0] == [*range(8)], "Lightning begins with the first samples again"
    everything = first.expected[:2] + second.expected
    torch.testing.assert_close(callback.samples.loss, means(everything, 1))
