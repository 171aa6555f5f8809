"""``InformationInWeights(structure="kron")`` against dense float64 matrices, and refusals that name the layer."""

import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_taskinfo.callbacks import InformationInWeights
from lightning_taskinfo.fisher.kron_metric import KroneckerFisher
from tests.callbacks.runs import Classifier, digits, fit


class Net(Classifier):
    def __init__(self, *middle):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 5), *(middle or (nn.Tanh(),)), nn.Linear(5, 3))


@pytest.fixture
def loader():
    return DataLoader(digits(), batch_size=8)


def dense_blocks(model, n=32):
    """The curvature ``N·B⊗A`` of each parameter as a matrix, one sample at a time by the definition of the factors."""
    first, _, second = model.net
    factors = {key: torch.zeros(size, size).double() for key, size in {"B0": 5, "A0": 4, "B2": 3, "A2": 5}.items()}
    for x in digits().tensors[0].double():
        hidden = first(x).tanh()
        p = second(hidden).softmax(-1)
        fisher = p.diag() - p.outer(p)
        jacobian = second.weight * (1 - hidden**2)
        seen = {"B0": jacobian.T @ fisher @ jacobian, "A0": x.outer(x), "B2": fisher, "A2": hidden.outer(hidden)}
        factors = {key: value + seen[key].detach() / n for key, value in factors.items()}
    layers = {"net.0": "0", "net.2": "2"}
    weights = {f"{name}.weight": n * torch.kron(factors[f"B{i}"], factors[f"A{i}"]) for name, i in layers.items()}
    return weights | {f"{name}.bias": n * factors[f"B{i}"] for name, i in layers.items()}


def expected(model, center, *, prior_std, beta):
    """KL of two Gaussians, tr(HΣ)/2 and the effective number of parameters, by inverses and determinants."""
    kls, penalty, effective = {}, 0.0, 0.0
    for name, H in dense_blocks(model).items():
        eye = torch.eye(len(H)).double()
        sigma = beta * torch.linalg.inv(H + beta / prior_std**2 * eye)
        moved = (model.get_parameter(name) - center[name]).flatten()
        quadratic = (sigma.trace() + moved @ moved) / prior_std**2
        kls[name] = 0.5 * (quadratic - len(H) - torch.logdet(sigma / prior_std**2)).item()
        penalty += 0.5 * (H @ sigma).trace().item()
        effective += (H @ torch.linalg.inv(H + beta / prior_std**2 * eye)).trace().item()
    x, y = digits().tensors
    loss, kl = F.cross_entropy(model(x.double()), y, reduction="sum").item(), sum(kls.values())
    return {
        "information_nats": kl,
        "expected_loss": loss,
        "curvature_penalty": penalty,
        "c_beta": loss + penalty + beta * kl,
        "effective_parameters": effective,
        "information_nats_per_parameter": kl / 43,
        "information_nats/net.0": kls["net.0.weight"] + kls["net.0.bias"],
        "information_nats/net.2": kls["net.2.weight"] + kls["net.2.bias"],
    }


@pytest.mark.parametrize(("prior_std", "beta"), [(0.1, 1.0), (0.5, 3.0)])
def test_equals_dense_linear_algebra(tmp_path, loader, prior_std, beta):
    start = {}

    class Kept(Net):
        def on_train_start(self):
            start.update({n: p.detach().clone() for n, p in self.named_parameters()})

    callback = InformationInWeights(structure="kron", labels="exact", prior_std=prior_std, beta=beta)
    model = fit(tmp_path, callback, model=Kept, loader=loader, precision="64-true").lightning_module.eval()
    row, reference = callback.history[-1], expected(model, start, prior_std=prior_std, beta=beta)
    assert [entry["step"] for entry in callback.history] == [4, 8]
    assert {name: row[name] for name in reference} == pytest.approx(reference, rel=1e-8)
    for std in (0.1 * prior_std, 10 * prior_std, 100 * prior_std):
        other = expected(model, start, prior_std=std, beta=beta)["information_nats"]
        assert row[f"information_nats_at_prior_std/{std:g}"] == pytest.approx(other, rel=1e-8)


def test_drawn_labels_repeat_and_average_to_the_exact_ones(tmp_path, loader):
    def last(**arguments):
        callback = InformationInWeights(structure="kron", per_layer=False, **arguments)
        fit(tmp_path, callback, model=Net, loader=loader)
        return callback.history[-1]["information_nats"]

    assert last() == last()
    assert last(seed=1) != last()
    assert last(mc_samples=200) == pytest.approx(last(labels="exact"), rel=0.03)


def test_training_is_not_changed(tmp_path, loader):
    alone = fit(tmp_path, model=Net, loader=loader).lightning_module.state_dict()
    callback = InformationInWeights(structure="kron", every_n_steps=1)
    watched = fit(tmp_path, callback, model=Net, loader=loader).lightning_module
    assert all(torch.equal(alone[name], value) for name, value in watched.state_dict().items())
    assert not any(m._forward_hooks or m._forward_pre_hooks or m._backward_hooks for m in watched.modules())
    assert len(callback.history) == 8


def test_factors_of_several_batches_are_those_of_all_samples():
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)).double(), digits().tensors[0].double()
    whole, parts = KroneckerFisher(labels="exact"), KroneckerFisher(labels="exact")
    whole.update(net, x)
    for part in (x[:5], x[:0], x[5:]):
        parts.update(net, part)
    torch.testing.assert_close(whole.compute(), parts.compute())


class Functional(Net):
    def forward(self, x):
        return self.net[2](F.relu(self.net[0](x)))


class Twice(Net):
    def forward(self, x):
        return self.net[2](self.net[1](self.net[0](self.net[0](x)[:, :4])))


class Tied(Net):
    def __init__(self):
        super().__init__(nn.Tanh(), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5))
        self.net[4].weight = self.net[2].weight


@pytest.mark.parametrize("structure", ["diagonal", "kron"])
def test_a_single_output(tmp_path, structure):
    class Regression(Classifier):
        def __init__(self):
            super().__init__()
            self.net = nn.Linear(4, 1)

        def training_step(self, batch, batch_idx):
            return F.mse_loss(self(batch[0]), batch[1])

    data = TensorDataset(digits().tensors[0], torch.randn(32, 1))
    callback = InformationInWeights(structure=structure, labels="exact", likelihood="gaussian", prior_center="zero")
    model = fit(tmp_path, callback, model=Regression, loader=DataLoader(data, batch_size=8)).lightning_module
    x = data.tensors[0].double()
    H = x.T @ x if structure == "kron" else (x.T @ x).diag().diag()
    kl = 0.0
    for matrix, w in ((H, model.net.weight), (torch.tensor([[32.0]]).double(), model.net.bias)):
        v = torch.linalg.inv(torch.eye(len(matrix)) + 0.01 * matrix)
        kl += 0.5 * (v.trace() - len(v) - torch.logdet(v) + w.double().square().sum() / 0.01).item()
    assert callback.history[-1]["information_nats"] == pytest.approx(kl, rel=1e-5)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: Net(nn.BatchNorm1d(5)), "linear and convolution layers have .* got 'net.1.weight' of BatchNorm1d"),
        (lambda: Net(nn.GELU()), "BackPACK has no Kronecker factors for this model.*GELU"),
        (Functional, "BackPACK has no Kronecker factors for this model.*Linear"),
        (Twice, "layers that are called once, got a second call of 'net.0'"),
        (Tied, "need weights of one layer each, got 'net.4.weight' tied"),
    ],
)
def test_refuses_by_name_before_training(tmp_path, loader, model, message):
    model = model()
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(ValueError, match=message):
        fit(tmp_path, InformationInWeights(structure="kron"), model=model, loader=loader)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"structure": "full"}, "`structure` must be one of diagonal, kron, got 'full'"),
        ({"structure": "kron", "labels": "empirical"}, "`labels` must be 'sampled' or 'exact' .*, got 'empirical'"),
        ({"structure": "kron", "likelihood": "bernoulli"}, "`likelihood` must be categorical or gaussian"),
    ],
    ids=str,
)
def test_refuses_wrong_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        InformationInWeights(**arguments)


def test_says_how_to_get_backpack(monkeypatch):
    monkeypatch.setitem(sys.modules, "backpack", None)  # what makes an import fail
    with pytest.raises(
        ModuleNotFoundError, match=r"Install BackPACK for this: `pip install lightning-taskinfo\[backpack"
    ):
        InformationInWeights(structure="kron")
    InformationInWeights()
