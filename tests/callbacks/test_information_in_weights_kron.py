"""``InformationInWeights(structure="kron")`` against dense float64 matrices, and on networks of every kind."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_taskinfo.callbacks import InformationInWeights
from lightning_taskinfo.fisher import fisher_diagonal, kronecker_factors
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
    factors = {
        key: torch.zeros(size, size).double()
        for key, size in {"B0": 5, "A0": 4, "B2": 3, "A2": 5}.items()
    }
    for x in digits().tensors[0].double():
        hidden = first(x).tanh()
        p = second(hidden).softmax(-1)
        fisher = p.diag() - p.outer(p)
        jacobian = second.weight * (1 - hidden**2)
        seen = {
            "B0": jacobian.T @ fisher @ jacobian,
            "A0": x.outer(x),
            "B2": fisher,
            "A2": hidden.outer(hidden),
        }
        factors = {key: value + seen[key].detach() / n for key, value in factors.items()}
    layers = {"net.0": "0", "net.2": "2"}
    weights = {
        f"{name}.weight": n * torch.kron(factors[f"B{i}"], factors[f"A{i}"])
        for name, i in layers.items()
    }
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
        "loss_nats": loss,
        "quadratic_loss_nats": loss + penalty,
        "effective_parameters": effective,
        "information_nats/net.0": kls["net.0.weight"] + kls["net.0.bias"],
        "information_nats/net.2": kls["net.2.weight"] + kls["net.2.bias"],
    }


@pytest.mark.parametrize(("prior_std", "beta"), [(0.1, 1.0), (0.5, 3.0)])
def test_equals_dense_linear_algebra(tmp_path, loader, prior_std, beta):
    start = {}

    class Kept(Net):
        def on_train_start(self):
            start.update({n: p.detach().clone() for n, p in self.named_parameters()})

    callback = InformationInWeights(
        structure="kron", labels="exact", prior_std=prior_std, beta=beta
    )
    model = fit(
        tmp_path, callback, model=Kept, loader=loader, precision="64-true"
    ).lightning_module.eval()
    row, reference = callback.history[-1], expected(model, start, prior_std=prior_std, beta=beta)
    assert [entry["step"] for entry in callback.history] == [4, 8]
    assert {name: row[name] for name in reference} == pytest.approx(reference, rel=1e-8)


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
    assert not any(
        m._forward_hooks or m._forward_pre_hooks or m._backward_hooks for m in watched.modules()
    )
    assert len(callback.history) == 8


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
    callback = InformationInWeights(
        structure=structure, labels="exact", likelihood="gaussian", prior_center="zero"
    )
    model = fit(
        tmp_path, callback, model=Regression, loader=DataLoader(data, batch_size=8)
    ).lightning_module
    x = data.tensors[0].double()
    H = x.T @ x if structure == "kron" else (x.T @ x).diag().diag()
    kl = 0.0
    for matrix, w in ((H, model.net.weight), (torch.tensor([[32.0]]).double(), model.net.bias)):
        v = torch.linalg.inv(torch.eye(len(matrix)) + 0.01 * matrix)
        kl += 0.5 * (v.trace() - len(v) - torch.logdet(v) + w.double().square().sum() / 0.01).item()
    assert callback.history[-1]["information_nats"] == pytest.approx(kl, rel=1e-5)


@pytest.mark.parametrize(
    "model",
    [lambda: Net(nn.BatchNorm1d(5)), lambda: Net(nn.GELU()), Functional, Twice, Tied],
    ids=["batch_norm", "gelu", "functional", "twice", "tied"],
)
def test_any_network_has_an_information(tmp_path, loader, model):
    """Close to that of the diagonal: correlations and the approximation count, but no number of places."""

    def nats(structure):
        callback = InformationInWeights(structure=structure, labels="exact", prior_center="zero")
        fit(tmp_path, callback, model=model(), loader=loader)
        return callback.history[-1]["information_nats"]

    assert 0.7 < nats("kron") / nats("diagonal") < 1.3


class Images(Classifier):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Flatten(), nn.Linear(36, 3))
        self.net[2].requires_grad_(False)


def test_the_information_of_a_convolution_does_not_grow_with_its_positions(tmp_path):
    """Each structure sees the same trace; before, nine positions made it nine times too large."""
    g = torch.Generator().manual_seed(0)
    data = TensorDataset(
        torch.randn(32, 2, 5, 5, generator=g), torch.randint(3, (32,), generator=g)
    )

    def penalty(structure):
        callback = InformationInWeights(structure=structure, labels="exact", prior_std=1e-3)
        fit(tmp_path, callback, model=Images, loader=DataLoader(data, batch_size=8))
        return callback.history[-1]["effective_parameters"]

    assert penalty("kron") == pytest.approx(penalty("diagonal"), rel=0.1)


def hugging_face(kind):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    small = {
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 16,
    }
    if kind == "bert":
        config = transformers.BertConfig(
            vocab_size=20, max_position_embeddings=12, num_labels=3, **small
        )
        return transformers.BertForSequenceClassification(config), torch.randint(20, (12, 6))
    if kind == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=20,
            n_positions=12,
            n_embd=8,
            n_layer=1,
            n_head=2,
            num_labels=3,
            pad_token_id=0,
            bos_token_id=0,
            eos_token_id=0,
        )
        return transformers.GPT2ForSequenceClassification(config), torch.randint(1, 20, (12, 6))
    config = transformers.ViTConfig(
        image_size=8, patch_size=4, num_channels=2, num_labels=3, **small
    )
    return transformers.ViTForImageClassification(config), torch.randn(12, 2, 8, 8)


@pytest.mark.filterwarnings("ignore::UserWarning")  # about engines that are slower
@pytest.mark.parametrize("kind", ["bert", "vit", "gpt2"])
def test_transformers(tmp_path, kind):
    """Both structures see about the same trace, and the blocks of vectors have the very same diagonal."""
    network, inputs = hugging_face(kind)

    class Wrapped(Classifier):
        def __init__(self):
            super().__init__()
            self.net = network

        def forward(self, x):
            return self.net(x).logits

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.01)

    data = TensorDataset(inputs, torch.arange(12) % 3)
    callbacks = [
        InformationInWeights(structure=structure, labels="exact", prior_std=1e-3, name=structure)
        for structure in ("diagonal", "kron")
    ]
    model = fit(
        tmp_path, *callbacks, model=Wrapped, loader=DataLoader(data, batch_size=6)
    ).lightning_module.eval()
    diagonal, kron = (callback.history[-1] for callback in callbacks)
    assert kron["information_nats"] > 0
    assert kron["effective_parameters"] == pytest.approx(diagonal["effective_parameters"], rel=0.3)
    factors = kronecker_factors(model, inputs, labels="exact")
    exact = fisher_diagonal(model, inputs, labels="exact")
    assert factors.keys() == exact.keys()
    for name, of_parameter in factors.items():
        if of_parameter.columns is None:
            torch.testing.assert_close(
                of_parameter.diagonals()[0], exact[name].flatten(), rtol=1e-3, atol=1e-7
            )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"structure": "full"}, "`structure` must be one of diagonal, kron, got 'full'"),
    ],
    ids=str,
)
def test_refuses_wrong_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        InformationInWeights(**arguments)
