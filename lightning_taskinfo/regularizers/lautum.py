"""Lautum information between unlabelled inputs and what the network makes of them, to be maximised."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Generator, Tensor
from torch.nn.functional import normalize, pad

from lightning_taskinfo import _ranges
from lightning_taskinfo._observe import observing
from lightning_taskinfo._random import seed_from
from lightning_taskinfo._warn import warn
from lightning_taskinfo.functional.gaussian import lautum_from_correlations
from lightning_taskinfo.regularizers import _base

_FEWEST = 8  # samples of a batch whose scale is looked at
_FAR = 100.0  # times the expected variance is too far, and so is its inverse
_LONGEST = 4096  # inputs whose covariance is formed and factored
_RIDGE = 1e-3  # on the diagonals of covariances, relative to their mean


class Lautum(_base.Regularizer):
    r"""Penalty :math:`-\lambda L(w; x)`: raise the Lautum information of the unlabelled target inputs.

    For jointly Gaussian :math:`x` and :math:`w` with canonical correlations :math:`\rho_j`

    .. math::
        L(w; x) = \tfrac12 \sum_j \Big[ \log(1 - \rho_j^2) + \frac{2\rho_j^2}{1 - \rho_j^2} \Big] \quad\text{nats},

    half of equation 9 of Jakubovitz et al. (2023), which is the form for complex variables. For :math:`w` stands the
    network's output (``proxy="logits"``), or the gradient :math:`\partial (v \cdot \text{logits}) / \partial x` along a
    random direction :math:`v`, drawn anew each epoch (``proxy="jacobian"``; on leading principal directions only).

    :math:`\Sigma_x` is factored once by :meth:`fit_inputs`; a step costs :math:`O(BDK + DKr)`. The covariances with
    :math:`w` are moving averages over batches and ranks. The gradient flows through the current batch, as if that were
    the whole average, so that the weight means the same at every ``decay``.

    **Positive definiteness.** The estimates do not come from the same samples, so an estimated :math:`\rho_j` could
    reach 1. Three steps rule it out: the covariances get a ridge of a thousandth of their mean diagonal,
    :math:`\rho_j^2` is multiplied by
    :math:`n/(n+r)` (what :math:`n` samples of :math:`r` independent directions overestimate it by), and
    :math:`\rho_j` is cut at 1 and multiplied by ``1 - shrinkage``. That is also the cap of this information, which
    has none of its own: :math:`L \le K \ell(1 - \text{shrinkage})`, 8.1 nats per output by default.

    Args:
        input_shape: Shape of one input, of at most 4,096 numbers; larger ones can be handed over smaller, pooled say.
        num_outputs: Number of logits :math:`K`.
        weight: The :math:`\lambda`, or a :class:`WeightSchedule`. With 0.01 the penalty's gradient was three
            times the loss's on 8×8 digits, and the labels were not learned (``benchmarks/gradient_ratio.py``).
        proxy: What stands for the weights: ``"logits"`` or ``"jacobian"``.
        components: Principal directions :math:`r` of the inputs to keep. By default all of them for ``"logits"``, and
            64 for ``"jacobian"``.
        decay: Decay of the moving averages.
        shrinkage: Distance of the largest possible correlation from 1.
        seed: Seed of the direction :math:`v`.

    Raises:
        ValueError: If an argument is out of range.

    Example:
        >>> lautum = Lautum(input_shape=(3,), num_outputs=2)
        >>> x = torch.randn(500, 3, generator=Generator().manual_seed(0))
        >>> _ = lautum.fit_inputs([x])
        >>> bool(lautum(x, x[:, :2]) < lautum(x, x[:, :2].flip(0)))  # outputs that follow the inputs are rewarded
        True

    References:
        Jakubovitz, Uliel, Rodrigues, Giryes, *An information-theoretic approach to semi-supervised transfer learning*.
    """

    mean: Tensor
    whitener: Tensor
    effective_dim: Tensor
    samples: Tensor
    covariance: Tensor
    steps: Tensor

    def __init__(
        self,
        input_shape: Sequence[int],
        num_outputs: int,
        *,
        weight: _base.Weight = 0.001,
        proxy: Literal["logits", "jacobian"] = "logits",
        components: int | None = None,
        decay: float = 0.999,
        shrinkage: float = 0.05,
        seed: int = 0,
    ) -> None:
        super().__init__(weight)
        self.input_shape = _base.checked_shape(input_shape)
        D = math.prod(self.input_shape)
        if D > _LONGEST:
            raise ValueError(
                f"`input_shape` must have at most {_LONGEST} numbers, got {D}: hand over smaller inputs, "
                "such as pooled images."
            )
        _ranges.check_choice(["logits", "jacobian"], proxy=proxy)
        if components is None:
            components = D if proxy == "logits" else min(D, 64)
        if not 1 <= components <= D:
            raise ValueError(
                f"`components` must be between 1 and the number of inputs, {D}, got {components}."
            )
        _ranges.check_counts(num_outputs=num_outputs)
        _ranges.check_values("in [0, 1)", decay=decay)
        _ranges.check_probability(shrinkage=shrinkage)
        self.num_outputs = num_outputs
        self.proxy = proxy
        self.components = components
        self.decay = decay
        self.shrinkage = shrinkage
        self.seed = seed
        K = components if proxy == "jacobian" else num_outputs
        buffers = {
            "mean": torch.zeros(D),
            "whitener": torch.zeros(components, D),
            "effective_dim": torch.zeros(()),
            "samples": torch.zeros((), dtype=torch.int64),  # 0: not fitted
            "covariance": torch.zeros(K, K + D, dtype=torch.float64),  # of w, with w and x
            "steps": torch.zeros((), dtype=torch.int64),
        }
        for name, zeros in buffers.items():
            self.register_buffer(name, zeros)

    def fit_inputs(self, loader: Iterable[Any]) -> "Lautum":
        """Factor the covariance of the unlabelled inputs; call it once, on every rank, before training.

        Args:
            loader: Batches of inputs, of tuples that begin with them, or of dicts that hold them as ``"unlabeled"``.
                It is read twice; each rank may bring its own part. Random generators are put back afterwards.

        Returns:
            The regularizer itself.

        Raises:
            ValueError: If the inputs have the wrong shape, are not finite, or are too few.
        """
        batches = partial(flat_inputs, loader, self.input_shape)
        outputs = len(self.covariance)
        with observing(self), torch.no_grad():
            D = len(self.mean)
            totals = _total(batches(), (D + 1,), lambda x: pad(x, (0, 1), value=1.0).sum(0))
            samples = totals[-1]
            if samples <= outputs:
                raise ValueError(
                    f"`loader` must hold more samples than there are outputs ({outputs}), got {int(samples)}: use a "
                    "larger unlabeled set."
                )
            mean = totals[:-1] / samples
            scatter = _total(batches(), (D, D), lambda x: (x - mean).T @ (x - mean))
            whitener, effective_dim = _whitening(scatter / samples, self.components)
        self.mean.copy_(mean)
        self.samples.copy_(samples)
        self.whitener.copy_(whitener)
        self.effective_dim.copy_(effective_dim)
        self._looked = False
        if samples < 2 * self.effective_dim:
            warn(
                f"{int(samples)} samples for {float(self.effective_dim):.0f} directions of the inputs: correlations "
                "will be overestimated. Use more unlabeled inputs, or fewer `components`.",
            )
        self.covariance.zero_()
        self.steps.zero_()
        return self

    def forward(
        self,
        inputs: Tensor,
        outputs: Tensor,
        *,
        epoch: int = 0,
    ) -> Tensor:
        """Return the penalty.

        Args:
            inputs: Unlabelled inputs, shape ``[B, *input_shape]``. For ``proxy="jacobian"`` they must require a
                gradient before the network sees them: ``inputs.requires_grad_()``.
            outputs: The network's logits for them, shape ``[B, K]``.
            epoch: Current epoch, for the weight and the direction.

        Returns:
            ``-weight * L``, a scalar; :attr:`value` is ``L``.

        Raises:
            ValueError: If shapes are wrong, inputs are not finite, or the batch holds fewer than two samples.
            RuntimeError: Before :meth:`fit_inputs`.
        """
        if self.samples == 0:
            raise RuntimeError(
                "Call `fit_inputs(loader)` with the unlabeled inputs before the first penalty."
            )
        _base.check_rows("inputs", inputs, self.input_shape)
        _base.check_rows("outputs", outputs, [self.num_outputs], rows=len(inputs))
        _ranges.check_finite("inputs", inputs)
        with torch.autocast(inputs.device.type, enabled=False):
            x = inputs.detach().flatten(1).float() - self.mean
            w = outputs.float()
            if self.proxy == "jacobian":
                w = self._gradients(inputs, outputs, epoch)
            w = w - w.mean(0)  # [B, K]
            if self.first_look(outputs):
                _warn_of_scale(x[:64] @ self.whitener.T, self.effective_dim)
            covariance = self._average(_covariance(x, w))
            if _is_finite(covariance):
                n = self._effective_samples(len(x) * _base.world_size())
                value = self._information(covariance, n)
            else:  # the loss shows it, and a gradient scaler skips the step
                value = torch.nan * w.sum()
        value = value.float()
        return self.penalty(-value, self.schedule(epoch), value=value)

    def _gradients(
        self,
        inputs: Tensor,
        outputs: Tensor,
        epoch: int,
    ) -> Tensor:
        if not inputs.requires_grad:
            raise ValueError(
                "`inputs` must require a gradient before the forward pass for proxy='jacobian': call "
                "`inputs.requires_grad_()` first."
            )
        generator = Generator().manual_seed(seed_from(self.seed, epoch))
        v = torch.randn(self.num_outputs, generator=generator, device="cpu")
        along = (outputs.float() @ (v / v.norm()).to(outputs.device)).sum()
        (gradients,) = torch.autograd.grad(along, inputs, create_graph=torch.is_grad_enabled())
        directions = normalize(self.whitener)  # of length 1 again, or 0 where inputs are constant
        return gradients.flatten(1).float() @ directions.T  # [B, r]

    def _average(self, local: Tensor) -> Tensor:
        """Moving average over batches and ranks, moved in train mode; of this batch alone before the first.

        It has the gradient that the current batch would have as all of it.
        """
        average = self.covariance
        if self.training or self.steps == 0:
            (new,) = _base.mean_over_ranks(local)
            if self.training and _is_finite(new):  # else a bad batch stays for ever
                average.lerp_(new, 1 - self.decay)
                self.steps += 1
            elif self.steps == 0:
                average = new
        start_up = 1 - self.decay ** int(self.steps) if self.steps else 1.0
        return average / start_up + (local - local.detach())  # a zero that carries a gradient

    def _effective_samples(self, batch_size: int) -> float:
        """How many samples weigh in the averages, at most as many as there are."""
        forgotten = self.decay ** max(1, int(self.steps))
        squares = (1 - self.decay) * (1 + forgotten)
        batches = (1 + self.decay) * (1 - forgotten) / squares
        return min(batch_size * batches, int(self.samples))

    def _information(self, covariance: Tensor, n: float) -> Tensor:
        """Information from the covariance of ``w`` with ``w`` and with the inputs, [K, K + D].

        The latter is whitened here, which is less work than whitening inputs.
        """
        K = len(covariance)
        cov_w = covariance[:, :K]
        floor = _RIDGE * cov_w.diagonal().mean().detach() + 1e-12
        identity = torch.eye(K, dtype=cov_w.dtype, device=cov_w.device)
        factor = torch.linalg.cholesky(cov_w + floor * identity)
        half = (covariance[:, K:].float() @ self.whitener.T).double()  # [K, r]
        whitened = torch.linalg.solve_triangular(factor, half, upper=False)
        fewer = n / (n + float(self.effective_dim))
        squared = torch.linalg.eigvalsh(whitened @ whitened.T) * fewer
        largest = (1 - self.shrinkage) ** 2
        return lautum_from_correlations(squared.clamp(max=1.0) * largest)


def _warn_of_scale(whitened: Tensor, effective_dim: Tensor) -> None:
    """Warn if the variance of a batch ``[B, r]`` is 100 times, or a hundredth of, what the fit expects."""
    if len(whitened) < _FEWEST:
        return
    # Around the batch's own mean: black images are not far from what images of bytes are like, as a
    # whole.
    ratio = float(whitened.var(0).sum() / effective_dim)  # NaN where the fit saw constants
    if ratio > _FAR or 1e-10 < ratio < 1 / _FAR:  # less is that of copies, but for rounding
        warn(
            f"`inputs` must be on the scale of what `fit_inputs` was given, got {ratio:.2g} times its variance: the "
            "penalty means nothing then. Fit what the network is trained on, transforms included."
        )


def _covariance(x: Tensor, w: Tensor) -> Tensor:
    """Covariance of the centred ``w`` with ``w`` and with the inputs, [K, K + D]."""
    both = torch.cat([w, x], 1)
    return (w.T @ both).double() / (len(x) - 1)


def _is_finite(tensor: Tensor) -> bool:
    """Whether all values are: a sum in float64 is cheaper than a look at each."""
    return bool(tensor.sum().isfinite())


def _total(
    batches: Iterable[Tensor],
    shape: tuple[int, ...],
    term: Callable[[Tensor], Tensor],
) -> Tensor:
    """Return the sum of a term over batches and ranks, in float64."""
    total = torch.zeros(shape, dtype=torch.float64, device="cpu")
    for x in batches:
        total += term(x.double().cpu())
    return _base.sum_over_ranks(total)[0]


def _whitening(covariance: Tensor, components: int) -> tuple[Tensor, Tensor]:
    r"""Return :math:`W = (\Sigma_x + \epsilon \bar\lambda I)^{-1/2}`, and :math:`\mathrm{tr}\, W \Sigma_x W^\top`.

    On the leading eigenvectors; the ridge :math:`\epsilon` is relative to the mean variance :math:`\bar\lambda` of
    their directions.
    """
    values, vectors = torch.linalg.eigh(covariance)
    values = values[-components:].flip(0).clamp_min(0)  # the largest first
    vectors = vectors[:, -components:].flip(1)
    shrunk = values + _RIDGE * values.mean()
    inverse = torch.where(shrunk > 0, shrunk, torch.inf).reciprocal()
    return inverse.sqrt()[:, None] * vectors.T, (values * inverse).sum()


def flat_inputs(loader: Iterable[Any], shape: tuple[int, ...]) -> Iterator[Tensor]:
    """Yield the inputs of each batch of ``loader``, checked and flat.

    A batch is a tensor, a tuple or list whose first element is the inputs, or a dict with
    ``"unlabeled"``.

    Raises:
        ValueError: If a batch has another layout or shape, or holds values that are not finite.
    """
    if isinstance(loader, Iterator):
        raise ValueError(
            f"`loader` must be readable more than once, got a {type(loader).__name__}: pass a list."
        )
    for batch in loader:
        if isinstance(batch, dict):
            batch = batch.get("unlabeled")
        if isinstance(batch, tuple | list):
            batch = batch[0]
        _base.check_rows("loader", batch, shape, minimum=0)
        _ranges.check_finite("loader", batch)
        yield batch.flatten(1)
