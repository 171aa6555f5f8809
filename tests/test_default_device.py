"""No tensor is made without a device: with another default device, all stay where model and data are.

A machine with a GPU is not needed for this. Tensors on ``meta`` have no values, so that the first use of one that was
made without a device is an error.
"""

from functools import wraps
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_taskinfo.callbacks import (
    FisherTrace,
    HardSamples,
    InformationInWeights,
    LocalMinimum,
    PACBayesCertificate,
)
from lightning_taskinfo.certificates import Prior, certify
from lightning_taskinfo.fisher import (
    FisherInformation,
    fisher_diagonal,
    fisher_trace,
    gradient_gram,
    kronecker_factors,
    layer_traces,
    per_sample_squared_norms,
)
from lightning_taskinfo.regularizers import estimate_mutual_information
from tests import penalised_net
from tests.callbacks.runs import Classifier, make_trainer


def default_device(device: str) -> torch.device:
    """Return what sets another default device, as a context.

    ``torch.set_default_device`` would not do: put back to ``"cpu"``, every function of torch goes on to be called
    through Python, in all tests that follow in this process.
    """
    return torch.device(device)


class Net(nn.Module):
    """Sorted rows, a table that is a head too, and a weight that is computed from another."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 4)
        self.position = nn.Embedding(3, 4)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(3, device=tokens.device)
        order = tokens.sum(1).argsort()
        h = self.table(tokens[order]) + self.position(places)
        h = self.normed(h)[order.argsort()]
        return nn.functional.linear(h.tanh(), self.table.weight).mean(1)


@pytest.fixture
def batch():
    generator = torch.Generator().manual_seed(0)
    return torch.randint(7, (6, 3), generator=generator), torch.randint(
        7, (6,), generator=generator
    )


@pytest.mark.parametrize("labels", ["sampled", "exact", "empirical"])
@pytest.mark.parametrize(
    "measure", [fisher_trace, fisher_diagonal, layer_traces, per_sample_squared_norms]
)
def test_functions(measure, labels, batch):
    torch.manual_seed(0)
    model = Net()
    expected = measure(model, *batch, labels=labels, chunk_size=4)
    with default_device("meta"):
        found = measure(model, *batch, labels=labels, chunk_size=4)
    if labels != "sampled":
        torch.testing.assert_close(found, expected)


def test_gram_matrix_and_kronecker_factors(batch):
    torch.manual_seed(0)
    model = Net()
    expected = gradient_gram(model, *batch)
    with default_device("meta"):
        torch.testing.assert_close(gradient_gram(model, *batch), expected)
        factors = kronecker_factors(model, batch[0], labels="exact")
    assert all(part.rows.device.type == "cpu" for part in factors.values())


def test_metric(batch):
    torch.manual_seed(0)
    model = Net()
    with default_device("meta"):
        metric = FisherInformation(labels="empirical")
        metric.update(model, *batch)
        found = metric.compute().trace
    expected = fisher_trace(model, *batch, labels="empirical")
    torch.testing.assert_close(found, expected.double(), rtol=1e-5, atol=0.0)


class LogsOnCPU:
    """A module that logs with the usual default device: Lightning makes tensors of its own there."""

    def log(self, *arguments, **options):
        with default_device("cpu"):
            super().log(*arguments, **options)

    def log_dict(self, *arguments, **options):
        with default_device("cpu"):
            super().log_dict(*arguments, **options)


class Penalised(LogsOnCPU, penalised_net.Net):
    def training_step(self, batch, batch_idx):
        with default_device("meta"):
            return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("name", penalised_net.WEIGHTS)
def test_penalties_in_a_fit(name):
    weights = {name: penalised_net.WEIGHTS[name]}
    models = [net(weights) for net in (penalised_net.Net, Penalised)]
    for model in models:
        torch.manual_seed(0)
        penalised_net.fit(model)
    expected, found = (model.state_dict() for model in models)
    torch.testing.assert_close(found, expected)


def test_mutual_information():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(100, 3, generator=generator)
    expected = estimate_mutual_information(x, 2 * x, steps=3)
    with default_device("meta"):
        found = estimate_mutual_information(x, 2 * x, steps=3)
    assert found == expected


@pytest.mark.parametrize("structure", ["diagonal", "kron"])
def test_certificate(structure):
    torch.manual_seed(0)
    model, start = nn.Linear(4, 3), nn.Linear(4, 3)
    x, y = torch.randn(60, 4), torch.randint(3, (60,))
    options = {"structure": structure, "betas": (0.1, 1.0), "draws": 20, "progress": False}
    expected = certify(model, (x, y), Prior.of(start), **options)
    with default_device("meta"):
        found = certify(model, (x, y), Prior.of(start), **options)
    assert found.bound == expected.bound


class Watched(LogsOnCPU, Classifier):
    """Without batch norm, which no certificate covers."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def on_meta(callback: Any) -> Any:
    """Run the hooks of a callback, and nothing else, with the other default device: Lightning has slips of its own."""

    def wrapped(hook):
        @wraps(hook)
        def run(*arguments, **options):
            with default_device("meta"):
                return hook(*arguments, **options)

        return run

    for name in dir(callback):
        if name.startswith("on_") or name in ("setup", "teardown", "state_dict"):
            setattr(callback, name, wrapped(getattr(callback, name)))
    return callback


@pytest.mark.parametrize(
    "make",
    [
        lambda: FisherTrace(every_n_steps=2),
        lambda: FisherTrace(every_n_steps=2, data="train", max_samples=6),
        lambda: InformationInWeights(every_n_steps=2),
        lambda: InformationInWeights(every_n_steps=2, structure="kron"),
        lambda: LocalMinimum(every_n_steps=2),
        lambda: HardSamples(every_n_steps=2),
        lambda: PACBayesCertificate(draws=20, betas=(1.0,), prior_origin="random"),
    ],
    ids=[
        "trace",
        "trace of fixed samples",
        "information",
        "kron",
        "minimum",
        "step",
        "certificate",
    ],
)
def test_callbacks_in_a_fit(tmp_path, make):
    torch.manual_seed(0)
    x, y = torch.randn(16, 4), torch.randint(3, (16,))
    callback = on_meta(make())
    trainer = make_trainer(tmp_path, callback, max_epochs=1)
    trainer.fit(Watched(), DataLoader(TensorDataset(x, y), batch_size=4))
    assert callback.history
