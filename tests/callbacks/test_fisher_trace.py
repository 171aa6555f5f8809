"""``FisherTrace`` against the function on the same samples, and against a loop over the training step's samples."""

import math
from collections import Counter

import pytest
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.plugins import MixedPrecision
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_taskinfo.callbacks import FisherTrace
from lightning_taskinfo.fisher import layer_traces, per_sample_squared_norms
from tests.callbacks.runs import Classifier, digits, fit


class Plain(Classifier):
    """No batch norm and no dropout: a sample's gradient is its own, in training too."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


@pytest.mark.parametrize("labels", ["exact", "empirical"])
def test_the_last_value_is_that_of_the_trained_weights_on_the_last_batch(tmp_path, labels):
    callback = FisherTrace(every_n_steps=8, max_samples=5, labels=labels)
    model = fit(tmp_path, callback, loader=DataLoader(digits(), batch_size=8)).lightning_module
    x, y = (part[24:29] for part in digits().tensors)
    model.eval()
    norms = per_sample_squared_norms(model, x, y, labels=labels)
    (row,) = callback.history
    assert row["fisher_trace"] == pytest.approx(norms.mean().item())
    assert row["fisher_trace_standard_error"] == pytest.approx(norms.std().item() / 5**0.5)
    for layer, trace in layer_traces(model, x, y, labels=labels).items():
        assert row[f"fisher_trace/{layer}"] == pytest.approx(trace.item())


def test_sampled_labels_repeat_with_the_seed(tmp_path):
    def run(seed):
        callback = FisherTrace(every_n_steps=1, seed=seed, mc_samples=2)
        fit(tmp_path, callback)
        return [row["fisher_trace"] for row in callback.history]

    assert run(0) == run(0)
    assert run(0) != run(1)


def test_every_measurement_draws_labels_of_its_own(tmp_path):
    class Still(Plain):
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.0)

    callback = FisherTrace(every_n_steps=1, data="train", max_samples=8)
    fit(tmp_path, callback, loader=DataLoader(digits(), batch_size=8), model=Still)
    assert len({row["fisher_trace"] for row in callback.history}) == len(callback.history) > 1


def test_more_draws_come_closer_to_the_exact_value(tmp_path):
    def run(**arguments):
        callback = FisherTrace(every_n_steps=8, data="train", max_samples=4, per_layer=False, **arguments)
        fit(tmp_path, callback, loader=DataLoader(digits(), batch_size=8), model=Plain)
        return callback.history[-1]["fisher_trace"]

    exact, few, many = run(labels="exact"), run(), run(mc_samples=3000)
    assert many == pytest.approx(exact, rel=0.05)
    assert abs(many - exact) < abs(few - exact)


@pytest.mark.parametrize("labels", ["exact", "empirical"])
def test_the_likelihood_is_the_one_asked_for(tmp_path, labels):
    class Regression(Plain):
        def training_step(self, batch, batch_idx):
            return F.mse_loss(self(batch[0]), batch[1])

    data = TensorDataset(digits().tensors[0], torch.randn(32, 3, generator=torch.Generator().manual_seed(2)))
    callback = FisherTrace(every_n_steps=8, data="train", labels=labels, likelihood="gaussian")
    model = fit(tmp_path, callback, loader=DataLoader(data, batch_size=8), model=Regression).lightning_module
    total = 0.0
    for x, y in data:  # F of N(f, 1): the sum over outputs of |∇f|²; by the data's labels |∇(f - y)²/2|²
        outputs = model(x.unsqueeze(0)).squeeze(0)
        scalars = [*outputs] if labels == "exact" else [0.5 * (outputs - y).square().sum()]
        for scalar in scalars:
            gradients = torch.autograd.grad(scalar, [*model.parameters()], retain_graph=True)
            total += sum(g.square().sum().item() for g in gradients)
    assert callback.history[-1]["fisher_trace"] == pytest.approx(total / 32, rel=1e-5)


def test_layers_can_be_left_out(tmp_path):
    callback = FisherTrace(every_n_steps=8, per_layer=False)
    fit(tmp_path, callback)
    assert callback.history[0].keys() == {"step", "fisher_trace", "fisher_trace_standard_error", "sgd_temperature"}


def test_the_temperature_is_the_rate_that_the_step_used(tmp_path):
    class Decaying(Classifier):
        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), 0.8)
            scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    callback = FisherTrace(every_n_steps=1)
    fit(tmp_path, callback, model=Decaying, max_epochs=1)
    assert [row["sgd_temperature"] for row in callback.history] == pytest.approx([0.1, 0.05, 0.025, 0.0125])
    callback = FisherTrace(every_n_steps=1)
    fit(tmp_path, callback, model=Decaying, max_epochs=1, accumulate_grad_batches=2)
    assert callback.history[0]["sgd_temperature"] == pytest.approx(0.05)


def test_the_temperature_is_that_of_the_batch_of_every_measurement(tmp_path):
    class Constant(Classifier):
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.6)

    class Manual(Constant):
        automatic_optimization = False

        def training_step(self, batch, batch_idx):
            for _ in range(2):
                self.optimizers().zero_grad()
                super().training_step(batch, batch_idx).backward()
                self.optimizers().step()

    def run(model=Constant, **schedule):
        callback, loader = FisherTrace(**schedule), DataLoader(digits(), batch_size=12)  # 12, 12 and 8
        fit(tmp_path, callback, loader=loader, model=model)
        return {row["step"]: row["sgd_temperature"] for row in callback.history}

    assert run(every_n_steps=2) == pytest.approx({2: 0.05, 4: 0.05, 6: 0.075})
    assert run(every_n_epochs=1) == pytest.approx({3: 0.075, 6: 0.075})
    assert run(data="train") == pytest.approx({6: 0.075}), "at the end of training, wherever that is"
    assert run(Manual, every_n_steps=5) == pytest.approx({6: 0.075, 10: 0.05}), "two steps a batch"


def test_batches_that_are_not_measured_are_not_looked_into(tmp_path):
    looked = []

    def batch_fn(batch):
        looked.append(len(looked))
        return batch

    callback = FisherTrace(every_n_steps=4, batch_fn=batch_fn)
    fit(tmp_path, callback)
    assert [row["step"] for row in callback.history] == [4, 8]
    assert len(looked) == 2 + 2 * 2, "the first batch is checked and compared; then size and samples"


def test_plot(tmp_path):
    callback = FisherTrace(every_n_steps=2)
    fit(tmp_path, callback)
    figure, ax = callback.plot()
    (line,) = ax.get_lines()
    assert line.get_xdata().tolist() == [2, 4, 6, 8]
    assert ax.get_ylabel() == "trace of the Fisher information"
    assert callback.plot(ax=ax)[0] is figure


# The training step's own backward pass


class StepReference(FisherTrace):
    """Measures, before each step, what the step's samples will show: by a loop, in the weights of that moment."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.expected = [*getattr(self, "expected", []), self.loop(pl_module, *batch)]
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)

    def loop(self, model, x, y):
        total = []
        for n in range(min(len(x), self.max_samples)):
            gradients = torch.autograd.grad(F.cross_entropy(model(x[n : n + 1]), y[n : n + 1]), [*model.parameters()])
            total.append(sum(g.square().sum() for g in gradients))
        return torch.stack(total)


class Summed(Plain):
    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self(batch[0]), batch[1], reduction="sum")


def scaled():
    return MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=2.0**10))


@pytest.mark.parametrize(
    ("model", "probe", "trainer", "rtol"),
    [
        (Plain, {}, {}, 1e-5),
        (Plain, {"max_samples": 3}, {}, 1e-5),
        (Summed, {"loss_reduction": "sum"}, {}, 1e-5),
        (Plain, {}, {"accumulate_grad_batches": 2}, 1e-5),
        (Plain, {}, {"plugins": [scaled]}, 0.02),
        (Plain, {}, {"precision": "bf16-mixed"}, 0.05),
    ],
    ids=["mean", "few samples", "sum", "accumulation", "gradient scaler", "bf16"],
)
def test_reads_the_training_step(tmp_path, model, probe, trainer, rtol):
    trainer = {key: [make() for make in value] if key == "plugins" else value for key, value in trainer.items()}
    callback = StepReference(every_n_steps=1, data="train_step", labels="empirical", **probe)
    fit(tmp_path, callback, model=model, **trainer)
    every = trainer.get("accumulate_grad_batches", 1)
    expected = callback.expected[every - 1 :: every]
    measured = [row["fisher_trace_train_step"] for row in callback.history]
    assert measured == pytest.approx([norms.mean().item() for norms in expected], rel=rtol)
    row, norms = callback.history[-1], expected[-1]
    error = (norms.std() / len(norms) ** 0.5).item()
    assert row["fisher_trace_train_step_standard_error"] == pytest.approx(error, rel=5 * rtol)
    layers = row["fisher_trace_train_step/net.0"] + row["fisher_trace_train_step/net.2"]
    assert layers == pytest.approx(row["fisher_trace_train_step"])


def test_reads_the_last_training_step_of_an_epoch(tmp_path):
    callback = StepReference(every_n_epochs=1, data="train_step", labels="empirical")
    fit(tmp_path, callback, model=Plain)
    measured = {row["step"]: row["fisher_trace_train_step"] for row in callback.history}
    assert measured == {step: pytest.approx(callback.expected[step - 1].mean().item(), rel=1e-5) for step in (4, 8)}


def test_the_training_step_runs_nothing_of_its_own(tmp_path):
    """With a batch norm in train mode; that the training stays the same is tested for all kinds of data."""

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

    callback = FisherTrace(every_n_steps=1, data="train_step", labels="empirical")
    assert passes(callback) == passes() == {"forward": 8, "backward": 8}
    assert len(callback.history) == 8
    assert passes(FisherTrace(every_n_steps=1))["backward"] > 8, "which the count would show"


@pytest.mark.parametrize(("log_every_n_steps", "expected"), [(50, [4, 8]), (2, [2, 4, 6, 8])])
def test_callback_metrics_have_it_now_and_then(tmp_path, log_every_n_steps, expected):
    seen = {}

    class Look(pl.Callback):
        def on_train_batch_end(self, trainer, *_):
            if (value := trainer.callback_metrics.get("taskinfo/fisher_trace_train_step")) is not None:
                seen.setdefault(value.item(), trainer.global_step)

    callback = FisherTrace(every_n_steps=1, data="train_step", labels="empirical")
    saved = ModelCheckpoint(tmp_path, monitor="taskinfo/fisher_trace_train_step", save_top_k=2)
    arguments = {"enable_checkpointing": True, "log_every_n_steps": log_every_n_steps}
    fit(tmp_path, callback, Look(), saved, model=Plain, **arguments)
    assert list(seen.values()) == expected
    values = {row["step"]: row["fisher_trace_train_step"] for row in callback.history}
    assert list(seen) == pytest.approx([values[step] for step in expected])
    assert sorted(map(float, saved.best_k_models.values())) == pytest.approx(sorted([values[4], values[8]]))


@pytest.mark.parametrize(("every_n_steps", "between"), [(1, [True, True, False]), (2, [False, False, False])])
def test_hooks_stay_between_steps_that_follow_each_other(tmp_path, every_n_steps, between):
    class Look(pl.Callback):
        def hooked(self, pl_module):
            return any(m._forward_hooks for m in pl_module.modules())

        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            batches.append(self.hooked(pl_module))

        def on_train_epoch_end(self, trainer, pl_module):
            assert not self.hooked(pl_module)

    batches = []
    callback = FisherTrace(every_n_steps=every_n_steps, data="train_step", labels="empirical")
    fit(tmp_path, callback, Look(), model=Plain, limit_train_batches=3, max_epochs=2)
    assert batches == 2 * between
    assert len(callback.history) == 6 // every_n_steps


def test_no_hook_stays_when_training_breaks(tmp_path):
    class Broken(Plain):
        def training_step(self, batch, batch_idx):
            super().training_step(batch, batch_idx)
            raise ArithmeticError("no")

    model = Broken()
    with pytest.raises(ArithmeticError):
        fit(tmp_path, FisherTrace(every_n_steps=1, data="train_step", labels="empirical"), model=model)
    assert all(not m._forward_hooks for m in model.modules())


def test_a_skipped_step_leaves_a_gap(tmp_path):
    class Skipping(Plain):
        def training_step(self, batch, batch_idx):
            return None if batch_idx == 1 else super().training_step(batch, batch_idx)

    callback = FisherTrace(every_n_steps=1, data="train_step", labels="empirical")
    with pytest.warns(UserWarning, match="could not measure at step 2 .*the training step had no backward pass"):
        fit(tmp_path, callback, model=Skipping, max_epochs=1)
    assert [row["step"] for row in callback.history] == [1, 3, 4]


def test_a_first_batch_that_cannot_be_read_is_refused(tmp_path):
    def nothing(batch):
        raise LookupError("no images in this batch")

    callback, model = FisherTrace(every_n_steps=3, data="train_step", labels="empirical", batch_fn=nothing), Plain()
    with pytest.raises((LookupError, ValueError), match="no images in this batch"):
        fit(tmp_path, callback, model=model, max_epochs=1)
    assert model.global_step == 0


def test_a_batch_that_cannot_be_read_leaves_a_gap_with_the_reason(tmp_path):
    seen = []

    def some(batch):
        seen.append(batch)
        if len(seen) == 3:  # once before the first step
            raise LookupError("no images in this batch")
        return batch

    callback = FisherTrace(every_n_steps=1, data="train_step", labels="empirical", batch_fn=some)
    with pytest.warns(UserWarning, match="could not measure at step 2 .*no images in this batch"):
        fit(tmp_path, callback, model=Plain, max_epochs=1)
    assert [row["step"] for row in callback.history] == [1, 3, 4]


def test_a_step_without_finite_gradients_leaves_a_gap(tmp_path):
    class Diverging(Plain):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx) * (math.nan if self.global_step >= 2 else 1.0)

    callback = FisherTrace(every_n_steps=1, data="train_step", labels="empirical")
    with pytest.warns(UserWarning, match="could not measure at step 3 .*gradients of the training step are not finite"):
        fit(tmp_path, callback, model=Diverging, max_epochs=1)
    assert [row["step"] for row in callback.history] == [1, 2]


class Reused(Plain):
    def forward(self, x):
        return self.net(x + self.net(x).sum(1, keepdim=True))


class Manual(Plain):
    automatic_optimization = False


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Reused, "cannot measure this model: layer 'net.0' was called more than once"),
        (Manual, "needs automatic optimization, got a module that does its own"),
        (lambda: torch.compile(Plain(), backend="eager"), "cannot look into compiled modules"),
    ],
)
def test_refuses_by_name(tmp_path, model, message):
    with pytest.raises(ValueError, match=message):
        fit(tmp_path, FisherTrace(every_n_steps=1, data="train_step", labels="empirical"), model=model)


def test_refuses_wrong_arguments():
    with pytest.raises(ValueError, match="`labels` must be 'empirical' with `data='train_step'`, got 'sampled'"):
        FisherTrace(data="train_step")
    with pytest.raises(ValueError, match="`loss_reduction` must be one of mean, sum, got 'none'"):
        FisherTrace(loss_reduction="none")


@pytest.mark.parametrize("argument", [{"mc_samples": 2}, {"likelihood": "gaussian"}, {"forward_fn": len}])
def test_refuses_what_a_training_step_has_no_use_for(argument):
    (name,) = argument
    with pytest.raises(ValueError, match=f"`{name}` must be left out with `data='train_step'`"):
        FisherTrace(data="train_step", labels="empirical", **argument)
    FisherTrace(**argument)
