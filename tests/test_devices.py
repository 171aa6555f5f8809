"""Every tensor says on which device it is made: with "meta" as the default device, all numbers come out the same.

This stands for a GPU that the tests do not have. Model and data are on the CPU; a tensor made without a device is on
"meta", where it has no values, and whatever meets it fails.
"""

from collections.abc import Callable
from contextlib import nullcontext
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Generator, Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_taskinfo.callbacks import FisherTrace, InformationInWeights, LocalMinimum, PACBayesCertificate
from lightning_taskinfo.certificates import Prior, certify, pareto_front
from lightning_taskinfo.distributions import (
    LowRankCurvature,
    diagonal_curvature,
    kronecker_curvature,
    layer_input_matrices,
    neuron_curvature,
    post_distribution,
    pre_distribution,
)
from lightning_taskinfo.fisher import (
    FisherInformation,
    fisher_diagonal,
    fisher_trace,
    gradient_gram,
    kronecker_factors,
    layer_traces,
    per_sample_squared_norms,
)
from lightning_taskinfo.fisher.kron_metric import KroneckerFisher
from lightning_taskinfo.regularizers import (
    Lautum,
    LocalMinimumRegularizer,
    MultiKernelMMD,
    MutualInformation,
    TemporalEnsembling,
    WeightInformation,
    estimate_mutual_information,
)
from lightning_taskinfo.variational import add_weight_noise, sampling, weight_kl
from tests.callbacks.runs import Classifier, digits, fit
from tests.fisher import networks

Act = Callable[[], Any]


class Tokens(nn.Module):
    """Embeddings, attention, layer norm."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 4)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.table(tokens)
        return self.head(self.norm(h + self.attention(h, h, h)[0]).mean(1))


def chain() -> tuple[nn.Module, Tensor]:
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)), torch.randn(9, 5)


NETWORKS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "chain": chain,
    "images": lambda: (
        nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(27, 3)),
        torch.randn(9, 2, 5, 5),
    ),
    "tokens": lambda: (Tokens(), torch.randint(7, (9, 4))),
    "raw": lambda: (networks.Raw(), torch.randn(9, 5)),
    "twice": lambda: (networks.Twice(), torch.randn(9, 5)),
}
LABELS = torch.arange(9) % 3


def same_on_another_default_device(prepare: Callable[[], Act], **tolerance: float) -> None:
    """What ``prepare`` makes is made on the CPU; what it returns runs with another default device."""
    results = []
    for place in (nullcontext(), torch.device("meta")):
        torch.manual_seed(0)
        act = prepare()
        with place:
            leaves = tree_leaves(act())
        results.append([x.detach() if isinstance(x, Tensor) else x for x in leaves])
    assert {x.device.type for x in results[1] if isinstance(x, Tensor)} <= {"cpu"}
    torch.testing.assert_close(results[1], results[0], rtol=tolerance.get("rel", 1e-6), atol=1e-7, equal_nan=True)


MEASURES = {
    "trace": fisher_trace,
    "norms": per_sample_squared_norms,
    "layers": layer_traces,
    "diagonal": fisher_diagonal,
    "gram": gradient_gram,
    "kron": lambda *args, **kwargs: [vars(f) for f in kronecker_factors(*args, **kwargs).values()],
}


@pytest.mark.filterwarnings("ignore::UserWarning")  # about engines that are slower
@pytest.mark.parametrize("labels", ["sampled", "exact", "empirical"])
@pytest.mark.parametrize("measure", MEASURES)
@pytest.mark.parametrize("network", NETWORKS)
def test_measuring_functions(network, measure, labels):
    if measure == "gram" and labels == "exact":
        pytest.skip("a Gram matrix has one gradient a sample")

    def prepare() -> Act:
        model, inputs = NETWORKS[network]()
        model.eval()
        return lambda: MEASURES[measure](model, inputs, LABELS, labels=labels, chunk_size=4)

    same_on_another_default_device(prepare, rel=1e-4)


@pytest.mark.parametrize("labels", ["sampled", "exact", "empirical"])
@pytest.mark.parametrize("likelihood", ["bernoulli", "gaussian"])
def test_likelihoods(likelihood, labels):
    def prepare() -> Act:
        model, inputs = chain()
        targets = torch.rand(9, 3)
        g = Generator().manual_seed(0)
        return lambda: fisher_diagonal(model, inputs, targets, labels=labels, likelihood=likelihood, generator=g)

    same_on_another_default_device(prepare)


@pytest.mark.parametrize("engine", ["hooks", "per_sample", "loop", "backpack"])
def test_engines(engine):
    def prepare() -> Act:
        model, inputs = chain()
        return lambda: fisher_diagonal(model, inputs, engine=engine)

    same_on_another_default_device(prepare)


@pytest.mark.parametrize("kind", ["trace", "diagonal", "kron"])
def test_metrics(kind):
    def prepare() -> Act:
        model, inputs = chain()
        metric = KroneckerFisher() if kind == "kron" else FisherInformation(quantity=kind)

        def act() -> Any:
            metric.update(model, inputs[:5])
            metric.update(model, inputs[5:])
            return metric.compute()

        return act

    same_on_another_default_device(prepare)


def curvatures(model: nn.Module, inputs: Tensor) -> dict[str, Callable[[], Any]]:
    diagonal = fisher_diagonal(model, inputs, labels="exact")
    direction = {name: p.detach()[None] for name, p in model.named_parameters()}
    scales = torch.ones(1)
    return {
        "diagonal": lambda: diagonal_curvature(diagonal),
        "neuron": lambda: neuron_curvature(model, layer_input_matrices(model, inputs)),
        "kron": lambda: kronecker_curvature(kronecker_factors(model, inputs, labels="exact"), scale=9),
        "low_rank": lambda: LowRankCurvature(diagonal, direction, scales),
    }


@pytest.mark.parametrize("structure", ["diagonal", "neuron", "kron", "low_rank"])
def test_distributions(structure):
    def prepare() -> Act:
        model, inputs = chain()
        center = deepcopy(model)
        curvature = curvatures(model, inputs)[structure]
        g = Generator().manual_seed(0)

        def act() -> Any:
            pre = pre_distribution(center, prior_std=0.1)
            post = post_distribution(model, pre, curvature())
            with post.with_weights(model, g):
                outputs = model(inputs)
            return outputs, post.sample(g), post.kl(pre), post.log_det(), pre.sample(g), pre.kl(pre), pre.log_det()

        return act

    same_on_another_default_device(prepare)


@pytest.mark.parametrize("structure", ["isotropic", "diagonal", "layer_inputs", "neuron", "kron"])
def test_certificates(structure):
    def prepare() -> Act:
        start, inputs = chain()
        model = deepcopy(start)
        model[0].bias.data += 1
        prior = Prior(start, origin="random")

        def act() -> Any:
            found = certify(model, (inputs, LABELS), prior, structure=structure, draws=5, betas=(1.0, 10.0))
            front = pareto_front(model, (inputs, LABELS), prior, structure=("diagonal",), betas=(1.0,))
            return found.bound, found.kl, found.risk_interval, [row.bound for row in front]

        return act

    same_on_another_default_device(prepare)


def test_noisy_weights():
    def prepare() -> Act:
        model, inputs = chain()

        def act() -> Any:
            add_weight_noise(model)
            with sampling(model):
                loss = model(inputs).square().mean() + weight_kl(model)
            loss.backward()
            return loss, [p.grad for p in model.parameters()]

        return act

    same_on_another_default_device(prepare)


def penalties() -> dict[str, Act]:
    model, inputs = chain()
    outputs = model(inputs)
    lautum = Lautum(input_shape=(5,), num_outputs=3)
    many = torch.randn(60, 5)
    mutual = MutualInformation(input_shape=(5,), feature_dim=3)
    mmd = MultiKernelMMD()
    ensembling = TemporalEnsembling(num_samples=9, num_outputs=3, weight=1.0)
    minimum = LocalMinimumRegularizer(weight=1.0, parts=2, start=0)
    noisy = add_weight_noise(deepcopy(model))
    information = WeightInformation(num_samples=9)
    index = torch.arange(9)
    batch = inputs[:8], LABELS[:8]
    loss_fn = nn.CrossEntropyLoss()

    def fitted() -> Tensor:
        lautum.fit_inputs([many])
        return lautum(inputs, outputs)

    return {
        "lautum": fitted,
        "mutual_information": lambda: mutual(inputs, outputs),
        "mk_mmd": lambda: mmd(outputs, outputs.flip(0) + 1),
        "temporal_ensembling": lambda: ensembling(outputs, index, epoch=0) + ensembling(outputs + 1, index, epoch=1),
        "local_minimum": lambda: minimum(model, lambda part: loss_fn(model(part[0]), part[1]), batch),
        "information": lambda: information(noisy),
    }


PENALTIES = ("lautum", "mutual_information", "mk_mmd", "temporal_ensembling", "local_minimum", "information")


@pytest.mark.parametrize("name", PENALTIES)
def test_regularizers(name):
    def prepare() -> Act:
        penalty = penalties()[name]

        def act() -> Any:
            values = [penalty(), penalty()]
            values[-1].backward()
            return values

        return act

    same_on_another_default_device(prepare)


@pytest.mark.parametrize("critic", ["separable", "bilinear", "concatenated"])
def test_estimate_of_mutual_information(critic):
    def prepare() -> Act:
        inputs = torch.randn(60, 2)
        features = inputs + torch.randn(60, 2)
        return lambda: estimate_mutual_information(inputs, features, critic=critic, steps=30, batch_size=8)

    same_on_another_default_device(prepare)


CALLBACKS = {
    "trace": lambda: FisherTrace(every_n_steps=2, mc_samples=2),
    "train_step": lambda: FisherTrace(every_n_steps=2, data="train_step", labels="empirical"),
    "information": lambda: InformationInWeights(every_n_steps=2),
    "kron": lambda: InformationInWeights(every_n_steps=2, structure="kron"),
    "minimum": lambda: LocalMinimum(every_n_steps=2),
    "certificate": lambda: PACBayesCertificate(draws=5, betas=(1.0,), pareto=False, prior_origin="random"),
}


@pytest.mark.parametrize("name", CALLBACKS)
def test_callbacks(tmp_path, name):
    """What a callback measures, and makes of it, has another default device; Lightning's own code has not."""

    class Plain(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.net, _ = chain()
            self.net[0] = nn.Linear(4, 4)

    def history(elsewhere: bool) -> Any:
        callback = CALLBACKS[name]()
        for method in ("observe", "summarise") if elsewhere else ():
            setattr(callback, method, on_meta(getattr(callback, method)))
        fit(tmp_path, callback, model=Plain, loader=torch.utils.data.DataLoader(digits(), batch_size=8))
        return callback.history

    torch.testing.assert_close(history(True), history(False), equal_nan=True, rtol=1e-5, atol=1e-7)
    assert history(False)


def on_meta(hook: Callable) -> Callable:
    def called(*args: Any, **kwargs: Any) -> Any:
        with torch.device("meta"):
            return hook(*args, **kwargs)

    return called
