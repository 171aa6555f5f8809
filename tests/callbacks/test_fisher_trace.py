"""``FisherTrace`` against the function on the same samples, and against a loop over the training step's samples."""

import pytest
import torch
import torch.nn.functional as F
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
        callback = FisherTrace(
            every_n_steps=8, data="train", max_samples=4, per_layer=False, **arguments
        )
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

    data = TensorDataset(
        digits().tensors[0], torch.randn(32, 3, generator=torch.Generator().manual_seed(2))
    )
    callback = FisherTrace(every_n_steps=8, data="train", labels=labels, likelihood="gaussian")
    model = fit(
        tmp_path, callback, loader=DataLoader(data, batch_size=8), model=Regression
    ).lightning_module
    total = 0.0
    for (
        x,
        y,
    ) in data:  # F of N(f, 1): the sum over outputs of |∇f|²; by the data's labels |∇(f - y)²/2|²
        outputs = model(x.unsqueeze(0)).squeeze(0)
        scalars = [*outputs] if labels == "exact" else [0.5 * (outputs - y).square().sum()]
        for scalar in scalars:
            gradients = torch.autograd.grad(scalar, [*model.parameters()], retain_graph=True)
            total += sum(g.square().sum().item() for g in gradients)
    assert callback.history[-1]["fisher_trace"] == pytest.approx(total / 32, rel=1e-5)


def test_layers_can_be_left_out(tmp_path):
    callback = FisherTrace(every_n_steps=8, per_layer=False)
    fit(tmp_path, callback)
    assert callback.history[0].keys() == {
        "step",
        "fisher_trace",
        "fisher_trace_standard_error",
        "sgd_temperature",
    }


def test_the_temperature_is_the_rate_that_the_step_used(tmp_path):
    class Decaying(Classifier):
        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), 0.8)
            scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
            }

    callback = FisherTrace(every_n_steps=1)
    fit(tmp_path, callback, model=Decaying, max_epochs=1)
    assert [row["sgd_temperature"] for row in callback.history] == pytest.approx(
        [0.1, 0.05, 0.025, 0.0125]
    )
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
        callback, loader = (
            FisherTrace(**schedule),
            DataLoader(digits(), batch_size=12),
        )  # 12, 12 and 8
        fit(tmp_path, callback, loader=loader, model=model)
        return {row["step"]: row["sgd_temperature"] for row in callback.history}

    assert run(every_n_steps=2) == pytest.approx({2: 0.05, 4: 0.05, 6: 0.075})
    assert run(every_n_epochs=1) == pytest.approx({3: 0.075, 6: 0.075})
    assert run(data="train") == pytest.approx({6: 0.075}), (
        "at the end of training, wherever that is"
    )
    assert run(Manual, every_n_steps=5) == pytest.approx({6: 0.075, 10: 0.05}), "two steps a batch"


def test_batches_that_are_not_measured_are_not_looked_into(tmp_path):
    looked = []

    def batch_fn(batch):
        looked.append(len(looked))
        return batch

    callback = FisherTrace(every_n_steps=4, batch_fn=batch_fn)
    fit(tmp_path, callback)
    assert [row["step"] for row in callback.history] == [4, 8]
    assert len(looked) == 2 + 2 * 2, (
        "the first batch is checked and compared; then size and samples"
    )


def test_plot(tmp_path):
    callback = FisherTrace(every_n_steps=2)
    fit(tmp_path, callback)
    figure, ax = callback.plot()
    (line,) = ax.get_lines()
    assert line.get_xdata().tolist() == [2, 4, 6, 8]
    assert ax.get_ylabel() == "trace of the Fisher information"
    assert callback.plot(ax=ax)[0] is figure
