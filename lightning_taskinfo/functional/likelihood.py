r"""What a network's outputs say about labels: log-likelihood, its score, label sampling, the output Fisher.

The Fisher information of the weights needs only the network's Jacobian :math:`J` and *output
scores* :math:`s`: whosever labels are meant, it is a sum over scores of
:math:`(J^\top s)(J^\top s)^\top`.

- ``"sampled"``: :math:`s = \nabla_f \log p(\tilde y|f)` with :math:`\tilde y` drawn from the model;
  unbiased.
- ``"exact"``: the columns of a root of the output Fisher; no randomness.
- ``"empirical"``: :math:`s = \nabla_f \log p(y|f)` with the dataset's labels; this is *not* the
  Fisher.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, Literal, Protocol

import torch
from torch import Generator, Tensor
from torch.nn.functional import cross_entropy, logsigmoid

from lightning_taskinfo._ranges import check_positive, check_values
from lightning_taskinfo._warn import warn

MOVE = "move the classes to the last axis, in `forward_fn`: `model(inputs).movedim(1, -1)`."
Labels = Literal["sampled", "exact", "empirical"]


class Likelihood(Protocol):
    """How outputs ``[N, ..., C]`` become a distribution over labels; a sample is one ``[..., C]``."""

    def log_prob(
        self,
        outputs: Tensor,
        targets: Tensor,
    ) -> Tensor:
        """Return the log-likelihood of each sample in nats, shape ``[N]``."""
        ...

    def score(
        self,
        outputs: Tensor,
        targets: Tensor,
    ) -> Tensor:
        """Return the gradient of the labels' log-likelihood by the outputs, shaped like them; ignored ones count."""
        ...

    def sample(
        self,
        outputs: Tensor,
        generator: Generator | None = None,
    ) -> Tensor:
        """Return targets drawn from the model."""
        ...

    def roots(self, outputs: Tensor) -> Iterator[Tensor]:
        """Yield scores ``s`` shaped like the outputs; per sample, ``Σ s sᵀ`` is the Fisher of the outputs."""
        ...

    def counted(
        self,
        outputs: Tensor,
        targets: Tensor,
    ) -> Tensor:
        """Return 1 where an output has a label and 0 where its target says to ignore it, broadcastable."""
        return torch.ones_like(outputs)

    def check(
        self,
        outputs: Tensor,
        targets: Tensor | None,
    ) -> None:
        """Raise a ``ValueError`` if outputs or targets do not fit this likelihood."""
        if targets is not None and targets.shape != outputs.shape:
            raise ValueError(
                f"`targets` must have the outputs' shape {list(outputs.shape)}, got {list(targets.shape)}; "
                "an extra or missing axis would silently broadcast. A callback's `forward_fn` or `batch_fn` fixes it, "
                "such as `lambda module, x: module(x).squeeze(-1)`, or whatever picks the prediction."
            )


@dataclass(frozen=True)
class Categorical(Likelihood):
    r"""Softmax over the last axis, :math:`p(c|f) = e^{f_c} / \sum_j e^{f_j}`; targets are class indices.

    With outputs ``[N, T, C]`` a sample is a sequence, and its log-likelihood the sum over its
    tokens; with ``[N, H, W, C]`` an image, and the sum over its pixels. The classes are on the last
    axis.

    Args:
        ignore_index: Targets of this value (padding) count for nothing, whosever labels are used.

    Example:
        >>> Categorical().score(torch.zeros(1, 2), torch.tensor([1]))
        tensor([[-0.5000,  0.5000]])
    """

    ignore_index: int = -100

    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:  # noqa: D102
        losses = cross_entropy(
            outputs.flatten(0, -2),
            targets.flatten(),
            ignore_index=self.ignore_index,
            reduction="none",
        )
        return -_per_sample(losses.view(targets.shape))

    def score(self, outputs: Tensor, targets: Tensor) -> Tensor:  # noqa: D102
        index = targets.clamp(0, outputs.shape[-1] - 1)  # what is ignored may be any class
        one_hot = torch.zeros_like(outputs).scatter_(-1, index.unsqueeze(-1), 1.0)
        return one_hot.sub_(outputs.softmax(-1))

    def sample(self, outputs: Tensor, generator: Generator | None = None) -> Tensor:  # noqa: D102
        below = outputs.softmax(-1).cumsum(-1)
        total = below[..., -1:]  # 1 but for rounding
        u = torch.rand(total.shape, generator=generator, device=total.device, dtype=total.dtype)
        drawn = torch.searchsorted(below, u.mul_(total), right=True)
        last = outputs.shape[-1] - 1
        return drawn.squeeze(-1).clamp_(max=last)

    def roots(self, outputs: Tensor) -> Iterator[Tensor]:
        r"""Yield ``C - 1`` scores a token whose outer products add up to :math:`\mathrm{diag}(p) - pp^\top`.

        With :math:`u = \sqrt p`, a unit vector, the output Fisher is
        :math:`\mathrm{diag}(u)(I - uu^\top)
        \mathrm{diag}(u)`. The Householder reflection that takes :math:`u` to :math:`-e_0` has an orthonormal
        basis of the complement of :math:`u` as its other columns: one score fewer than there are
        classes.
        """
        u = outputs.softmax(-1).sqrt()  # [N, ..., C]
        first = torch.zeros_like(u)
        first[..., 0] = 1.0
        mirror = (u + first) / (1 + u[..., :1])
        for c in range(1, u.shape[-1]):
            root = -u * u[..., c : c + 1] * mirror
            root[..., c] += u[..., c]
            yield from _one_at_a_time(root, (*root.shape[1:-1], 1))

    def counted(self, outputs: Tensor, targets: Tensor) -> Tensor:  # noqa: D102
        counted = targets != self.ignore_index
        return counted.unsqueeze(-1).to(outputs.dtype)

    def check(self, outputs: Tensor, targets: Tensor | None) -> None:  # noqa: D102
        if outputs.dim() < 2 or outputs.shape[-1] < 2:
            raise ValueError(
                "`likelihood='categorical'` needs outputs of shape [N, ..., C] with at least 2 classes, "
                f"got {list(outputs.shape)}; set `likelihood` to 'bernoulli' or 'gaussian'."
            )
        if targets is None:
            return
        if targets.is_floating_point() or targets.shape != outputs.shape[:-1]:
            raise ValueError(
                f"`targets` must be class indices (integers) of shape {list(outputs.shape[:-1])} for outputs "
                f"{list(outputs.shape)}, got {targets.dtype} of shape {list(targets.shape)}; set `likelihood` to "
                f"'gaussian', or to 'bernoulli' for yes and no; pick others by `batch_fn`; or {MOVE}"
            )
        if outputs.dim() > 2 and outputs.shape[1:-1] == outputs.shape[2:]:
            warn(
                f"Outputs {list(outputs.shape)} are read with the classes last; if they are on axis 1, {MOVE}"
            )
        classes = outputs.shape[-1]
        known = (targets >= 0) & (targets < classes) | (targets == self.ignore_index)
        if not known.all():
            raise ValueError(
                f"`targets` must lie in [0, {classes}) or be `ignore_index` ({self.ignore_index}), got "
                f"{targets[~known][0].item()}."
            )


@dataclass(frozen=True)
class Bernoulli(Likelihood):
    r"""A sigmoid for each output, :math:`p(y_k=1|f) = 1/(1+e^{-f_k})`; targets lie in [0, 1], shaped like outputs.

    Example:
        >>> Bernoulli().log_prob(torch.zeros(1, 2), torch.tensor([[1.0, 0.0]]))  # 2 log(1/2)
        tensor([-1.3863])
    """

    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:  # noqa: D102
        targets = targets.to(outputs.dtype)  # from yes and no
        yes = targets * logsigmoid(outputs)
        no = (1 - targets) * logsigmoid(-outputs)
        return _per_sample(yes + no)

    def score(self, outputs: Tensor, targets: Tensor) -> Tensor:  # noqa: D102
        return targets.to(outputs.dtype) - outputs.sigmoid()

    def sample(self, outputs: Tensor, generator: Generator | None = None) -> Tensor:  # noqa: D102
        return torch.bernoulli(outputs.sigmoid(), generator=generator)

    def roots(self, outputs: Tensor) -> Iterator[Tensor]:
        r"""Yield :math:`\sqrt{p_k(1-p_k)}\,e_k`, one score an output."""
        p = outputs.sigmoid()
        yield from _one_at_a_time((p * (1 - p)).sqrt(), outputs.shape[1:])

    def check(self, outputs: Tensor, targets: Tensor | None) -> None:  # noqa: D102
        super().check(outputs, targets)
        if targets is not None:
            check_values("in [0, 1]", targets=targets)


@dataclass(frozen=True)
class Gaussian(Likelihood):
    r"""Regression with a fixed noise, :math:`p(y|f) = \mathcal N(y; f, \sigma^2 I)`; its Fisher is ``JᵀJ/σ²``.

    Args:
        std: The noise's standard deviation :math:`\sigma`.

    Raises:
        ValueError: If ``std`` is not positive.

    Example:
        >>> Gaussian(std=2.0).score(torch.zeros(1, 2), torch.tensor([[1.0, 0.0]]))
        tensor([[0.2500, 0.0000]])
    """

    std: float = 1.0

    def __post_init__(self) -> None:
        check_positive(std=self.std)

    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:  # noqa: D102
        constant = math.log(2 * math.pi * self.std**2)
        squares = (targets - outputs).square() / self.std**2
        return _per_sample(-0.5 * (squares + constant))

    def score(self, outputs: Tensor, targets: Tensor) -> Tensor:  # noqa: D102
        return (targets - outputs) / self.std**2

    def sample(self, outputs: Tensor, generator: Generator | None = None) -> Tensor:  # noqa: D102
        noise = torch.randn(
            outputs.shape,
            generator=generator,
            device=outputs.device,
            dtype=outputs.dtype,
        )
        return outputs + self.std * noise

    def roots(self, outputs: Tensor) -> Iterator[Tensor]:
        r"""Yield :math:`e_k/\sigma`, one score an output."""
        yield from _one_at_a_time(torch.full_like(outputs, 1 / self.std), outputs.shape[1:])


METHODS = ("log_prob", "score", "sample", "roots", "counted", "check")
LIKELIHOODS: dict[str, Likelihood] = {
    "categorical": Categorical(),
    "bernoulli": Bernoulli(),
    "gaussian": Gaussian(),
}


def as_likelihood(likelihood: str | Likelihood) -> Likelihood:
    """Return the likelihood of a name, or the given one.

    Args:
        likelihood: ``"categorical"``, ``"bernoulli"`` or ``"gaussian"``, or a likelihood.

    Raises:
        ValueError: If the name is unknown, or the object no likelihood, such as a loss.

    Example:
        >>> as_likelihood("gaussian")
        Gaussian(std=1.0)
    """
    found: Any = likelihood
    if isinstance(likelihood, str):
        found = LIKELIHOODS.get(likelihood)
    if not all(hasattr(found, method) for method in METHODS):
        raise ValueError(
            f"`likelihood` must be one of {', '.join(LIKELIHOODS)}, got {likelihood!r}; an object must have "
            f"{', '.join(METHODS)}."
        )
    return found


class NumberedDraws:
    r"""A likelihood whose labels for sample ``first + n`` of ``total`` do not depend on who measures it.

    All random numbers of a measurement come from ``seed``, one row for each of the ``total``
    samples, and a process uses the rows of its own samples: a categorical label is the inverse of
    the cumulative distribution at a uniform number, a Gaussian one that of the normal distribution.
    One instance serves one measurement, whose samples come in their order, ``mc_samples`` draws a
    chunk. A likelihood of another kind draws by itself, from a generator seeded with the chunk's
    first sample: as good, but other labels for another number of processes.

    Args:
        likelihood: What the outputs mean.
        seed: Seed of all draws of the measurement.
        first: Number of the first sample of this process.
        total: Samples of all processes together.
        mc_samples: Number of labels drawn for each sample.

    Example:
        >>> outputs = torch.zeros(4, 3)
        >>> whole = NumberedDraws(Categorical(), seed=0, total=4).sample(outputs)
        >>> second_half = NumberedDraws(Categorical(), seed=0, first=2, total=4).sample(outputs[2:])
        >>> torch.equal(whole[2:], second_half)
        True
    """

    def __init__(
        self,
        likelihood: Likelihood,
        *,
        seed: int,
        total: int,
        first: int = 0,
        mc_samples: int = 1,
    ) -> None:
        self.likelihood = likelihood
        self.log_prob = likelihood.log_prob
        self.score = likelihood.score
        self.roots = likelihood.roots
        self.counted = likelihood.counted
        self.seed = seed
        self.total = total
        self.mc_samples = mc_samples
        self.position = first
        self.draw = 0
        self._uniform: Tensor | None = None  # [mc_samples, total, ...]

    def sample(self, outputs: Tensor, generator: Generator | None = None) -> Tensor:  # noqa: D102
        u = self._next(outputs)
        if isinstance(self.likelihood, Categorical):
            below = outputs.double().softmax(-1).cumsum(-1) < u[..., :1]
            return below.sum(-1).clamp(max=outputs.shape[-1] - 1)
        if isinstance(self.likelihood, Bernoulli):
            return (u < outputs.sigmoid()).to(outputs.dtype)
        if isinstance(self.likelihood, Gaussian):
            noise = math.sqrt(2) * self.likelihood.std * torch.erfinv(2 * u - 1)
            return outputs + noise.to(outputs.dtype)
        first = u.flatten()[0].item()
        seeded = Generator(outputs.device).manual_seed(int(first * 2**53))
        return self.likelihood.sample(outputs, seeded)

    def _next(self, outputs: Tensor) -> Tensor:
        """Return the uniform numbers of the next draw, ``[N, ..., C]`` in float64, strictly between 0 and 1."""
        if self._uniform is None:
            shape = [self.mc_samples, self.total, *outputs.shape[1:]]
            if isinstance(self.likelihood, Categorical):
                shape[-1] = 1
            generator = Generator().manual_seed(self.seed)
            drawn = torch.rand(shape, generator=generator, dtype=torch.float64, device="cpu")
            self._uniform = drawn.clamp(min=2.0**-54)
        stop = self.position + len(outputs)
        rows = torch.arange(self.position, stop, device="cpu")
        rows = rows % self.total  # what fills a batch up draws something, too
        u = self._uniform[self.draw, rows]
        self.draw += 1
        if self.draw == self.mc_samples:
            self.draw = 0
            self.position = stop
        return u.to(outputs.device)

    def check(self, outputs: Tensor, targets: Tensor | None) -> None:  # noqa: D102
        self.likelihood.check(outputs, targets)


def output_scores(
    outputs: Tensor,
    targets: Tensor | None,
    *,
    labels: Labels,
    likelihood: Likelihood,
    mc_samples: int = 1,
    generator: Generator | None = None,
) -> Iterator[Tensor]:
    r"""Yield scores whose squares, pulled back to the weights and added, give the Fisher of each sample.

    Args:
        outputs: The network's outputs, shape ``[N, ..., C]``.
        targets: The dataset's labels; needed for ``labels="empirical"``, otherwise only to know
            what to ignore.
        labels: ``"sampled"``, ``"exact"`` or ``"empirical"``.
        likelihood: What the outputs mean.
        mc_samples: Draws of ``"sampled"`` labels; each score carries the factor :math:`1/\sqrt m`.
        generator: Source of the draws.

    Example:
        >>> scores = output_scores(torch.zeros(1, 2), None, labels="exact", likelihood=Categorical())
        >>> sum(s[0].outer(s[0]) for s in scores)  # diag(p) - ppᵀ
        tensor([[ 0.2500, -0.2500],
                [-0.2500,  0.2500]])
    """
    outputs = outputs.detach()
    scores: Iterable[Tensor]
    weights: list[float | Tensor] = []
    if labels == "exact":
        scores = likelihood.roots(outputs)
    elif labels == "sampled":
        draws = (likelihood.sample(outputs, generator) for _ in range(mc_samples))
        scores = (likelihood.score(outputs, drawn) for drawn in draws)
        if mc_samples > 1:
            weights.append(1 / math.sqrt(mc_samples))
    elif targets is None:
        raise ValueError("`targets` must be given for `labels='empirical'`, got None.")
    else:
        scores = [likelihood.score(outputs, targets)]
    if targets is not None:
        weights.append(likelihood.counted(outputs, targets))
    for score in scores:
        yield reduce(torch.mul, weights, score)


def _per_sample(values: Tensor) -> Tensor:
    return values.reshape(values.shape[0], -1).sum(1)


def _one_at_a_time(
    root: Tensor,
    shape: Sequence[int],
) -> Iterator[Tensor]:
    """Labels of different outputs or tokens are independent, so the Fisher of a sample has a root for each."""
    for keep in torch.eye(math.prod(shape), device=root.device, dtype=root.dtype):
        yield root * keep.view(shape)


def look_like_probabilities(outputs: Tensor) -> bool:
    """Whether outputs are not negative and add up to 1 over more than one class.

    Half precision rounds sums to about a hundredth. Logits of any use do not do this for every
    sample.

    Args:
        outputs: The network's outputs, shape ``[N, ..., C]``.

    Example:
        >>> look_like_probabilities(torch.tensor([[0.25, 0.75]])), look_like_probabilities(torch.tensor([[0.5, 0.75]]))
        (True, False)
    """
    rows = outputs.detach().float()
    if rows.shape[-1] < 2 or (rows < 0).any():
        return False
    off = (rows.sum(-1) - 1).abs()
    return bool((off < 0.01).all())
