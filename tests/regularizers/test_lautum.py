"""Lautum information of a network's outputs: against dense covariances, and never NaN."""

import math
import os
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_taskinfo.functional.gaussian import lautum_from_correlations
from lightning_taskinfo.regularizers import Lautum
from lightning_taskinfo.regularizers.lautum import _covariance
from tests.functional.test_gaussian import canonical_correlations

D, K = 6, 3


def correlated(N: int = 200, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Inputs with unequal, dependent columns, and outputs that follow them in part."""
    g = torch.Generator().manual_seed(seed)
    x = (
        torch.randn(N, D, generator=g)
        @ torch.randn(D, D, generator=torch.Generator().manual_seed(9))
        + 3
    )
    w = x[:, :K] * torch.tensor([1.0, 10.0, 0.1]) + 2 * torch.randn(N, K, generator=g) - 5
    return x, w


def dense(
    x: Tensor, cov_w: Tensor, cov_xw: Tensor, n: float, ridge: float = 1e-3, shrinkage: float = 0.05
) -> Tensor:
    """The definition: ridges, full inverses, the factor n/(n+r), the cut, the shrinkage."""
    cov_x = torch.cov(x.double().T, correction=0)
    floored = cov_x + ridge * cov_x.diagonal().mean() * torch.eye(len(cov_x))
    effective = torch.trace(cov_x @ torch.linalg.inv(floored))
    rho = canonical_correlations(
        floored, cov_w + ridge * cov_w.diagonal().mean() * torch.eye(len(cov_w)), cov_xw
    )
    return lautum_from_correlations(
        (rho.square() * n / (n + effective)).clamp(max=1) * (1 - shrinkage) ** 2
    )


def covariances(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    joint = torch.cov(torch.cat([x, w], 1).double().T)
    return joint[x.shape[1] :, x.shape[1] :], joint[: x.shape[1], x.shape[1] :]


def test_one_batch_equals_the_dense_definition():
    x, w = correlated()
    lautum = Lautum((D,), K, weight=0.5).fit_inputs([x])
    penalty = lautum(x, w)
    expected = dense(x, *covariances(x, w), n=len(x))
    assert lautum.value.item() == pytest.approx(expected.item(), rel=1e-4)
    assert penalty.item() == pytest.approx(-0.5 * expected.item(), rel=1e-4)


def test_moving_averages_equal_a_loop():
    x, _ = correlated(400)
    lautum, decay = Lautum((D,), K, decay=0.8).fit_inputs([x]), 0.8
    totals, weights = [torch.zeros(K, K).double(), torch.zeros(D, K).double()], 0.0
    for step in range(4):
        batch = correlated(50, seed=step)
        lautum(*batch)
        totals = [
            decay * old + (1 - decay) * new
            for old, new in zip(totals, covariances(*batch), strict=True)
        ]
        weights = decay * weights + (1 - decay)
        share = [(1 - decay) * decay**k / weights for k in range(step + 1)]
        n = min(50 / sum(s**2 for s in share), 400)
        expected = dense(x, *(total / weights for total in totals), n=n)
        assert lautum.value.item() == pytest.approx(expected.item(), rel=1e-4), step


@pytest.mark.parametrize("decay", [0.5, 0.9, 0.999])
def test_the_averages_own_factor_on_the_gradient_is_divided_out(decay):
    """Through the average itself the gradient would be (1 − α)/(1 − αᵗ) of what it should be."""
    x, w = correlated()
    lautum = Lautum((D,), K, decay=decay, weight=1.0).fit_inputs([x])
    lautum(*correlated(seed=1))
    w.requires_grad_()
    through = Lautum((D,), K, decay=decay, weight=1.0)
    through.load_state_dict(lautum.state_dict())
    (gradient,) = torch.autograd.grad(lautum(x, w), w)
    new = _covariance(x - through.mean, w - w.mean(0))
    covariance = (decay * through.covariance + (1 - decay) * new) / (1 - decay**2)
    through.steps.fill_(2)
    n = through._effective_samples(len(x))
    value = -through._information(covariance, n)
    (damped,) = torch.autograd.grad(value, w)
    torch.testing.assert_close(
        gradient, damped * (1 - decay**2) / (1 - decay), rtol=1e-3, atol=1e-7
    )


@pytest.mark.parametrize("components", [2, 3, 5])
def test_projection_keeps_the_leading_principal_directions(components):
    x, w = correlated()
    lautum = Lautum((D,), K, components=components).fit_inputs([x])
    lautum(x, w)
    leading = torch.linalg.eigh(torch.cov(x.double().T, correction=0)).eigenvectors[:, -components:]
    projected = x.double() @ leading
    expected = dense(projected, *covariances(projected, w), n=len(x))
    assert lautum.value.item() == pytest.approx(expected.item(), rel=1e-3)


def test_jacobian_proxy_is_the_input_gradient_along_one_direction():
    x, _ = correlated()
    x.requires_grad_()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(D, 8), nn.Tanh(), nn.Linear(8, K))
    lautum = Lautum((D,), K, proxy="jacobian", components=2).fit_inputs([x.detach()])
    penalty = lautum(x, net(x), epoch=4)
    v = torch.randn(K, generator=torch.Generator().manual_seed(hash((0, 4)) % 2**63))
    gradients = torch.func.vmap(torch.func.grad(lambda row: net(row) @ v / v.norm()))(x.detach())
    leading = torch.linalg.eigh(torch.cov(x.detach().double().T, correction=0)).eigenvectors[:, -2:]
    projected, proxy = (t.detach().double() @ leading for t in (x, gradients))
    expected = dense(projected, *covariances(projected, proxy), n=len(x))
    assert lautum.value.item() == pytest.approx(expected.item(), rel=1e-3)
    penalty.backward()
    assert net[0].weight.grad.abs().sum() > 0
    lautum.steps.zero_()
    lautum(x, net(x), epoch=5)
    assert lautum.value.item() != pytest.approx(
        expected.item(), rel=1e-3
    )  # another epoch, another direction


@pytest.mark.parametrize("proxy", ["logits", "jacobian"])
def test_a_hundred_steps_raise_it(proxy):
    def train(weight: float) -> float:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(D, 16), nn.Tanh(), nn.Linear(16, K))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
        lautum = Lautum((D,), K, weight=weight, proxy=proxy, components=3, decay=0.9).fit_inputs(
            [correlated(500)[0]]
        )
        for step in range(100):
            x = correlated(64, seed=step)[0].requires_grad_()
            outputs = net(x)
            loss = nn.functional.cross_entropy(outputs, x[:, :K].argmax(1)) + lautum(x, outputs)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return lautum.value.item()

    assert train(weight=0.1) > train(weight=0.0) + 0.1


DEGENERATE = {
    "constant": lambda g: torch.full((50, D), 0.7),
    "zero": lambda g: torch.zeros(50, D),
    "duplicated": lambda g: torch.randn(1, D, generator=g).expand(50, D),
    "one column": lambda g: torch.randn(50, 1, generator=g) * torch.eye(D)[0],
    "huge": lambda g: 1e6 * torch.randn(50, D, generator=g),
    "tiny": lambda g: 1e-6 * torch.randn(50, D, generator=g),
    "two samples": lambda g: torch.randn(2, D, generator=g),
}


def climb(lautum: Lautum, batches, steps: int) -> None:
    """Maximise nothing but the Lautum information, as hard as possible."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Flatten(), nn.Linear(math.prod(lautum.input_shape), 16), nn.ReLU(), nn.Linear(16, K)
    )
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(steps):
        x = batches(step)
        penalty = lautum(x, net(x))
        assert penalty.isfinite(), step
        optimizer.zero_grad()
        penalty.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0, error_if_nonfinite=True)
        optimizer.step()


@pytest.mark.filterwarnings("ignore:.*directions of the inputs")
@pytest.mark.parametrize("steps", [100, pytest.param(5000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", DEGENERATE)
def test_degenerate_inputs_never_give_nan(kind, steps):
    g = torch.Generator().manual_seed(0)
    x = torch.cat([DEGENERATE[kind](g) for _ in range(4)])
    lautum = Lautum((D,), K, weight=1.0).fit_inputs([x])
    climb(lautum, lambda step: DEGENERATE[kind](g), steps)


@pytest.mark.slow
def test_five_thousand_steps_on_notmnist_never_give_nan():
    np = pytest.importorskip("numpy")
    path = Path(os.environ.get("TASKINFO_DATA_DIR", ".")) / "notmnist.npz"
    if not path.exists():
        pytest.skip("set TASKINFO_DATA_DIR to a folder with notmnist.npz")
    with np.load(path, allow_pickle=False) as data:
        images = torch.from_numpy(data["x_train"][:5000]).float().view(-1, 1, 28, 28) / 255
    lautum = Lautum((1, 28, 28), K, weight=1.0).fit_inputs(images.split(500))
    climb(lautum, lambda step: images[torch.arange(step * 50, step * 50 + 50) % len(images)], 5000)
    assert lautum.value <= K * lautum_from_correlations(torch.tensor([0.95**2])) + 1e-4


def test_the_value_stays_below_its_cap_when_outputs_copy_the_inputs():
    x, _ = correlated()
    lautum = Lautum((D,), K).fit_inputs([x])
    lautum(x, x[:, :K])
    cap = K * lautum_from_correlations(torch.tensor([0.95**2])).item()
    assert 0.5 * cap < lautum.value.item() <= cap


def test_covariances_that_do_not_belong_together_give_the_cap():
    """Estimated correlations of 5: without the cut the logarithm would be of a negative number."""
    lautum = Lautum((D,), K).fit_inputs([correlated()[0]])
    lautum.whitener.copy_(torch.eye(D))
    value = lautum._information(torch.cat([torch.eye(K), 5 * torch.eye(K, D)], 1).double(), 1e9)
    assert value.item() == pytest.approx(
        K * lautum_from_correlations(torch.tensor([0.95**2])).item(), rel=1e-5
    )


def test_outputs_that_overflow_once_do_not_stay_in_the_averages():
    x, w = correlated()
    lautum, clean = (Lautum((D,), K).fit_inputs([x]) for _ in range(2))
    lautum(x, w), clean(x, w)
    assert not lautum(x, torch.full_like(w, torch.inf)).isfinite()
    assert torch.equal(lautum(x, w), clean(x, w))


def test_eval_mode_measures_without_moving():
    x, w = correlated()
    lautum = Lautum((D,), K).fit_inputs([x])
    lautum(x, w)
    before = {name: buffer.clone() for name, buffer in lautum.named_buffers()}
    lautum.eval()(*correlated(seed=3))
    assert all(torch.equal(buffer, before[name]) for name, buffer in lautum.named_buffers())


@pytest.mark.parametrize("layout", ["tensor", "tuple", "dict"])
def test_fit_reads_any_layout_and_leaves_the_generators_alone(layout):
    x, w = correlated()
    datasets = {
        "tensor": DataLoader(x, batch_size=64, shuffle=True),
        "tuple": DataLoader(TensorDataset(x, w), batch_size=64, shuffle=True),
        "dict": [{"labeled": (x, w), "unlabeled": x}],
    }
    state = torch.get_rng_state()
    fitted = Lautum((D,), K).fit_inputs(datasets[layout])
    assert torch.equal(torch.get_rng_state(), state)
    torch.testing.assert_close(fitted.whitener, Lautum((D,), K).fit_inputs([x]).whitener)
    assert fitted.samples == 200


def test_autocast_does_not_reach_it():
    x, w = correlated()
    lautum, plain = (Lautum((D,), K).fit_inputs([x]) for _ in range(2))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = lautum(x, w)
    assert torch.equal(inside, plain(x, w))


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"proxy": "weights"}, "`proxy` must be one of logits, jacobian, got 'weights'"),
        ({"num_outputs": 0}, "`num_outputs` must be at least 1, got 0"),
        ({"components": 7}, "`components` must be between 1 and the number of inputs, 6, got 7"),
        ({"decay": 1.0}, r"`decay` must be in \[0, 1\), got 1\.0"),
        ({"shrinkage": 0.0}, r"`shrinkage` must be in \(0, 1\), got 0\.0"),
        ({"input_shape": (3, 64, 64)}, "`input_shape` must have at most 4096 numbers, got 12288"),
    ],
)
def test_refuses_arguments(arguments, match):
    with pytest.raises(ValueError, match=match):
        Lautum(**{"input_shape": (D,), "num_outputs": K, **arguments})


@pytest.mark.parametrize(
    ("batch", "match"),
    [
        (
            lambda x, w: (x[:1], w[:1]),
            "`inputs` must hold at least 2 samples, got 1: use a larger batch",
        ),
        (lambda x, w: (x[:0], w[:0]), "`inputs` must hold at least 2 samples, got 0"),
        (
            lambda x, w: (None, w),
            "`inputs` must be a tensor, got NoneType: does the batch hold unlabeled inputs",
        ),
        (lambda x, w: (x[:, 1:], w), r"`inputs` must have shape \[B, 6\], got \(200, 5\)"),
        (lambda x, w: (x, w[:, 1:]), r"`outputs` must have shape \[200, 3\], got \(200, 2\)"),
        (lambda x, w: (x, w[1:]), r"`outputs` must have shape \[200, 3\], got \(199, 3\)"),
        (
            lambda x, w: (x / torch.zeros(D), w),
            "`inputs` must be finite, got 1200 values that are not",
        ),
    ],
)
def test_refuses_batches(batch, match):
    x, w = correlated()
    lautum = Lautum((D,), K).fit_inputs([x])
    with pytest.raises(ValueError, match=match):
        lautum(*batch(x, w))


def test_refuses_to_begin_without_the_inputs():
    with pytest.raises(
        RuntimeError, match=r"Call `fit_inputs\(loader\)` with the unlabeled inputs"
    ):
        Lautum((D,), K)(*correlated())


def test_refuses_inputs_without_a_gradient_for_the_jacobian():
    x, w = correlated()
    lautum = Lautum((D,), K, proxy="jacobian").fit_inputs([x])
    with pytest.raises(
        ValueError, match="`inputs` must require a gradient before the forward pass"
    ):
        lautum(x, w)


@pytest.mark.parametrize(
    ("loader", "match"),
    [
        (
            [torch.zeros(3, D)],
            r"`loader` must hold more samples than there are outputs \(3\), got 3",
        ),
        (
            iter([torch.zeros(9, D)]),
            "`loader` must be readable more than once, got a list_iterator",
        ),
        ([], r"must hold more samples than there are outputs \(3\), got 0"),
        ([torch.zeros(9, 2)], r"`loader` must have shape \[B, 6\], got \(9, 2\)"),
        ([{"labeled": torch.zeros(9, D)}], "`loader` must be a tensor, got NoneType"),
        ([torch.full((9, D), torch.nan)], "`loader` must be finite, got 54 values"),
    ],
)
def test_refuses_loaders(loader, match):
    with pytest.raises(ValueError, match=match):
        Lautum((D,), K).fit_inputs(loader)


def test_warns_of_fewer_samples_than_twice_the_directions():
    with pytest.warns(UserWarning, match="10 samples for 6 directions of the inputs"):
        Lautum((D,), K).fit_inputs([correlated(10)[0]])
