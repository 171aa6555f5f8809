"""Lautum information between unlabelled inputs and what the network makes of them, to be maximised."""

import math
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import torch
from torch import Generator, Tensor

from lightning_taskinfo._observe import observing
from lightning_taskinfo._random import seed_from
from lightning_taskinfo._ranges import check_finite
from lightning_taskinfo.functional.gaussian import lautum_from_correlations
from lightning_taskinfo.regularizers._base import (
    Regularizer,
    WeightSchedule,
    check_rows,
    checked_shape,
)
from lightning_taskinfo.regularizers._ranks import mean_over_ranks, world_size
from lightning_taskinfo.regularizers._whitening import (
    fit_whitening,
    flat_inputs,
    warn_of_scale,
)


class Lautum(Regularizer):
    r"""Penalty :math:`-\lambda L(w; x)`: raise the Lautum information of the unlabelled target inputs.

    For jointly Gaussian :math:`x` and :math:`w` with canonical correlations :math:`\rho_j`

    .. math::
        L(w; x) = \tfrac12 \sum_j \Big[ \log(1 - \rho_j^2) + \frac{2\rho_j^2}{1 - \rho_j^2} \Big] \quad\text{nats},

    half of equation 9 of Jakubovitz et al. (2023), which is the form for complex variables. For :math:`w` stands the
    network's output (``proxy="logits"``), or the gradient :math:`\partial (v \cdot \text{logits}) / \partial x` along a
    random direction :math:`v`, drawn anew each epoch (``proxy="jacobian"``; on leading principal directions only).

    :math:`\Sigma_x` is factored once by :meth:`fit_inputs`; a step costs :math:`O(BDK)`, and :math:`O(D^2 K)` beside
    it with all :math:`r = D` directions. The covariances with :math:`w` are moving averages over batches and ranks. The
    gradient flows through the current batch, as if that were the whole average, so that the weight means the same at
    every ``decay``.

    **Positive definiteness.** The estimates do not come from the same samples, so an estimated :math:`\rho_j` could
    reach 1. Three steps rule it out: :math:`\Sigma_x` gets a ridge, :math:`\rho_j^2` is multiplied by
    :math:`n/(n+r)` (what :math:`n` samples of :math:`r` independent directions overestimate it by), and
    :math:`\rho_j` is cut at 1 and multiplied by ``1 - shrinkage``. That is also the cap of this information, which
    has none of its own: :math:`L \le K \ell(1 - \text{shrinkage})`, 8.1 nats per output by default.

    Args:
        input_shape: Shape of one input.
        num_outputs: Number of logits :math:`K`.
        weight: The :math:`\lambda`, or a :class:`WeightSchedule`. With 0.01 the penalty's gradient was three
            times the loss's on 8×8 digits, and the labels were not learned (``benchmarks/gradient_ratio.py``).
        proxy: What stands for the weights: ``"logits"`` or ``"jacobian"``.
        components: Principal directions :math:`r` of the inputs to keep. By default all of them for ``"logits"`` up to
            ``max_dim`` inputs and 256 beyond; 64 for ``"jacobian"``.
        max_dim: Number of inputs above which they are projected by default.
        decay: Decay of the moving averages.
        shrinkage: Distance of the largest possible correlation from 1.
        ridge: Added to the covariances' diagonals, relative to their mean.
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
    scales: Tensor
    effective_dim: Tensor
    samples: Tensor
    cov_w: Tensor
    cov_wx: Tensor
    steps: Tensor

    def __init__(
        self,
        input_shape: Sequence[int],
        num_outputs: int,
        *,
        weight: float | WeightSchedule = 0.001,
        proxy: Literal["logits", "jacobian"] = "logits",
        components: int | None = None,
        max_dim: int = 4096,
        decay: float = 0.999,
        shrinkage: float = 0.05,
        ridge: float = 1e-3,
        seed: int = 0,
    ) -> None:
        super().__init__(weight)
        self.input_shape = checked_shape(input_shape)
        D = math.prod(self.input_shape)
        if proxy not in ("logits", "jacobian"):
            raise ValueError(f"`proxy` must be 'logits' or 'jacobian', got {proxy!r}.")
        if components is None:
            components = _default_components(D, proxy, max_dim)
        _check_ranges(D, num_outputs, components, decay, shrinkage, ridge)
        self.num_outputs = num_outputs
        self.proxy = proxy
        self.components = components
        self.decay = decay
        self.shrinkage = shrinkage
        self.ridge = ridge
        self.seed = seed
        # Then covariances are whitened, which is less work than inputs.
        self.whole = components == D
        K = components if proxy == "jacobian" else num_outputs
        self.register_buffer("mean", torch.zeros(D))
        self.register_buffer("whitener", torch.zeros(components, D))
        self.register_buffer("scales", torch.zeros(components))
        self.register_buffer("effective_dim", torch.zeros(()))
        self.register_buffer("samples", torch.zeros((), dtype=torch.int64))  # 0: not fitted
        self.register_buffer("cov_w", torch.zeros(K, K, dtype=torch.float64))
        self.register_buffer("cov_wx", torch.zeros(K, components, dtype=torch.float64))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def fit_inputs(self, loader: Iterable[Any]) -> "Lautum":
        """Factor the covariance of the unlabelled inputs; call it once, on every rank, before training.

        Args:
            loader: Batches of inputs, of tuples that begin with them, or of dicts that hold them as ``"unlabeled"``.
                It is read twice (four times above 4,096 inputs); each rank may bring its own part. Random
                generators are put back afterwards.

        Returns:
            The regularizer itself.

        Raises:
            ValueError: If the inputs have the wrong shape, are not finite, or are too few.
        """
        with observing(self), torch.no_grad():
            batches = lambda: flat_inputs(loader, self.input_shape)  # noqa: E731
            D = math.prod(self.input_shape)
            K = len(self.cov_w)
            whitening = fit_whitening(batches, D, self.components, self.ridge, outputs=K)
        self.mean.copy_(whitening.mean)
        self.whitener.copy_(whitening.matrix)
        self.scales.copy_(whitening.scales)
        self.effective_dim.copy_(whitening.effective_dim)
        self.samples.copy_(whitening.samples)
        for average in (self.cov_w, self.cov_wx, self.steps):
            average.zero_()
        self._looked = False
        return self

    def forward(self, inputs: Tensor, outputs: Tensor, *, epoch: int = 0) -> Tensor:
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
        check_rows("inputs", inputs, self.input_shape)
        check_rows("outputs", outputs, (self.num_outputs,), rows=len(inputs))
        check_finite("inputs", inputs)
        with torch.autocast(inputs.device.type, enabled=False):
            x = inputs.detach().flatten(1).float() - self.mean
            if not self.whole:
                x = x @ self.whitener.T  # [B, r]
            w = outputs.float()
            if self.proxy == "jacobian":
                w = self._gradients(inputs, outputs, epoch)
            w = w - w.mean(0)  # [B, K]
            if self._first_look(outputs):
                some = x[:64]
                whitened = some @ self.whitener.T if self.whole else some
                warn_of_scale(whitened, self.effective_dim)
            local = _covariances(x, w.detach())
            averages = self._averages(local)
            if _finite(*local) and averages is not None:
                n = self._effective_samples(len(x) * world_size())
                value = self._with_gradient(x, w, *averages, n)
            else:  # the loss shows it, and a gradient scaler skips the step
                value = torch.nan * w.sum().double()
        value = value.float()
        return self.penalty(-value, self.schedule(epoch), value=value)

    def _gradients(self, inputs: Tensor, outputs: Tensor, epoch: int) -> Tensor:
        if not inputs.requires_grad:
            raise ValueError(
                "`inputs` must require a gradient before the forward pass for proxy='jacobian': call "
                "`inputs.requires_grad_()` first."
            )
        generator = Generator().manual_seed(seed_from(self.seed, epoch))
        v = torch.randn(self.num_outputs, generator=generator, device="cpu")
        direction = (v / v.norm()).to(outputs.device)
        along = (outputs.float() @ direction).sum()
        create_graph = torch.is_grad_enabled()
        (gradients,) = torch.autograd.grad(along, inputs, create_graph=create_graph)
        rows = gradients.flatten(1).float()
        return rows @ self.whitener.T * self.scales  # [B, r]

    @torch.no_grad()
    def _averages(self, local: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor] | None:
        """Moving averages over batches and ranks, moved in train mode; of this batch alone before the first."""
        if self.training or self.steps == 0:
            cov_w, cov_wx = mean_over_ranks(*local)
            usable = _finite(cov_w, cov_wx)  # else a bad batch stays for ever
            if self.training and usable:
                new = 1 - self.decay
                self.cov_w.mul_(self.decay).add_(cov_w, alpha=new)
                self.cov_wx.mul_(self.decay).add_(cov_wx, alpha=new)
                self.steps += 1
            elif self.steps == 0:
                return (cov_w, cov_wx) if usable else None
        start_up = 1 - self.decay ** int(self.steps)
        return self.cov_w / start_up, self.cov_wx / start_up

    def _effective_samples(self, batch_size: int) -> float:
        """How many samples weigh in the averages, at most as many as there are."""
        forgotten = self.decay ** max(1, int(self.steps))
        squares = (1 - self.decay) * (1 + forgotten)
        batches = (1 + self.decay) * (1 - forgotten) / squares
        return min(batch_size * batches, int(self.samples))

    def _with_gradient(
        self,
        x: Tensor,
        w: Tensor,
        cov_w: Tensor,
        cov_wx: Tensor,
        n: float,
    ) -> Tensor:
        """Information of the averages, with the gradient that the current batch would have as all of them.

        Only products over the batch carry a gradient: it never sees a [K, D] matrix, let alone D×D.
        """
        if self.whole:
            whitened = cov_wx.float() @ self.whitener.T  # [K, r]
            pulled = whitened @ self.whitener  # [K, D]
        else:
            whitened = pulled = cov_wx.float()
        degrees = len(x) - 1
        change_w = (w.T @ w).double() / degrees
        along = x @ pulled.T  # [B, K]
        cross = (w.T @ along).double() / degrees  # [K, K]
        change_w = change_w - change_w.detach()  # zeros that carry a gradient
        cross = cross - cross.detach()
        whitened = whitened.double()
        squares = whitened @ whitened.T + cross + cross.T
        return self._information(cov_w + change_w, squares, n)

    def _information(self, cov_w: Tensor, squares: Tensor, n: float) -> Tensor:
        """Information from the covariance of ``w``, and the squares of that with whitened inputs, [K, K]."""
        mean = cov_w.diagonal().mean().detach()
        floor = self.ridge * mean + 1e-12
        identity = torch.eye(len(cov_w), dtype=cov_w.dtype, device=cov_w.device)
        factor = torch.linalg.cholesky(cov_w + floor * identity)
        half = torch.linalg.solve_triangular(factor, squares, upper=False)
        # [K, K], on both sides
        whitened = torch.linalg.solve_triangular(factor, half.T, upper=False)
        symmetric = (whitened + whitened.T) / 2
        fewer = n / (n + float(self.effective_dim))
        squared = torch.linalg.eigvalsh(symmetric) * fewer
        largest = (1 - self.shrinkage) ** 2
        return lautum_from_correlations(squared.clamp(max=1.0) * largest)


def _default_components(D: int, proxy: str, max_dim: int) -> int:
    """Number of principal directions where the user says nothing."""
    if proxy == "jacobian":
        return min(D, 64)
    return D if max_dim >= D else 256


def _covariances(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """Covariance of the centred ``w``, [K, K], and of ``w`` with the inputs, [K, r]."""
    n = len(x) - 1
    of_w = (w.T @ w).double()
    of_both = (w.T @ x).double()
    return of_w / n, of_both / n


def _finite(*parts: Tensor) -> bool:
    """Whether all values are: a sum in float64 is cheaper than a look at each."""
    return all(bool(part.sum().isfinite()) for part in parts)


def _check_ranges(
    D: int,
    K: int,
    components: int,
    decay: float,
    shrinkage: float,
    ridge: float,
) -> None:
    rules = {
        "num_outputs": (K, K >= 1, "at least 1"),
        "components": (
            components,
            1 <= components <= D,
            f"between 1 and the number of inputs, {D}",
        ),
        "decay": (decay, 0 <= decay < 1, "in [0, 1)"),
        "shrinkage": (shrinkage, 0 < shrinkage < 1, "in (0, 1)"),
        "ridge": (ridge, ridge > 0, "positive"),
    }
    for argument, (value, valid, rule) in rules.items():
        if not valid:
            raise ValueError(f"`{argument}` must be {rule}, got {value}.")
