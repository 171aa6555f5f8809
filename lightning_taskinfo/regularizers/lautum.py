"""Lautum information between unlabelled inputs and what the network makes of them, to be maximised."""

import math
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import torch
from torch import Generator, Tensor, nn

from lightning_taskinfo._observe import observing
from lightning_taskinfo.functional._tensors import check_finite
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
    times_whitener,
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

    :math:`\Sigma_x` is factored once by :meth:`fit_inputs`; a step costs :math:`O(BDK)`. The covariances with :math:`w`
    are moving averages over batches and ranks. With all :math:`r = D` directions, whitening a batch's covariance costs
    :math:`O(D^2 K)`, as much as a small network's step: batches wait for it until they make up a share ``lag`` of the
    average (every step at first, every 21st in the long run at the defaults), and value and gradient are those of
    the average without them. The gradient flows through the current batch, as if that were the whole average, so that
    the weight means the same at every ``decay``.

    **Positive definiteness.** The estimates do not come from the same samples, so an estimated :math:`\rho_j` could
    reach 1. Three steps rule it out: :math:`\Sigma_x` gets a ridge, :math:`\rho_j^2` is multiplied by
    :math:`n/(n+r)` (what :math:`n` samples of :math:`r` independent directions overestimate it by), and
    :math:`\rho_j` is cut at 1 and multiplied by ``1 - shrinkage``. That is also the cap of this information, which
    has none of its own: :math:`L \le K \ell(1 - \text{shrinkage})`, 8.1 nats per output by default.

    Args:
        input_shape: Shape of one input.
        num_outputs: Number of logits :math:`K`.
        weight: The :math:`\lambda`, or a :class:`WeightSchedule`. With 0.01 the penalty's gradient can be ten times the
            loss's on small images, and the labels are hardly learned; ``gradient_ratio`` of ``penalised`` tells.
        proxy: What stands for the weights: ``"logits"`` or ``"jacobian"``.
        components: Principal directions :math:`r` of the inputs to keep. By default all of them for ``"logits"`` up to
            ``max_dim`` inputs and 256 beyond; 64 for ``"jacobian"``.
        max_dim: Number of inputs above which they are projected by default.
        decay: Decay of the moving averages.
        lag: Share of the moving averages that may wait to be whitened; 0 whitens every batch.
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
    pulled: Tensor
    steps: Tensor
    waiting_w: Tensor
    waiting_wx: Tensor
    waiting_steps: Tensor

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
        lag: float = 0.02,
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
            components = min(D, 64) if proxy == "jacobian" else D if max_dim >= D else 256
        _check_ranges(D, num_outputs, components, decay, lag, shrinkage, ridge)
        self.num_outputs, self.proxy, self.components = num_outputs, proxy, components
        self.decay, self.shrinkage, self.ridge, self.seed = decay, shrinkage, ridge, seed
        self.whole = components == D  # then inputs are not projected, and whitening is what costs
        self.lag = lag if self.whole else 0.0
        K = components if proxy == "jacobian" else num_outputs
        for name, shape in {
            "mean": (D,),
            "whitener": (components, D),
            "scales": (components,),
        }.items():
            self.register_buffer(name, torch.zeros(shape))
        small, wide = (K, K), (K, components)
        averages = {
            "cov_w": small,
            "cov_wx": wide,
            "pulled": wide,
            "waiting_w": small,
            "waiting_wx": wide,
        }
        for name, shape in averages.items():
            self.register_buffer(name, torch.zeros(shape, dtype=torch.float64))
        self.register_buffer("effective_dim", torch.zeros(()))
        for name in ("samples", "steps", "waiting_steps"):  # 0 samples: not fitted
            self.register_buffer(name, torch.zeros((), dtype=torch.int64))
        self.register_load_state_dict_pre_hook(_accept_without_lag)

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
            D, K = math.prod(self.input_shape), len(self.cov_w)
            whitening = fit_whitening(batches, D, self.components, self.ridge, outputs=K)
        for buffer, value in zip(
            (self.mean, self.whitener, self.scales, self.effective_dim, self.samples),
            whitening,
            strict=True,
        ):
            buffer.copy_(value)
        for average in (
            self.cov_w,
            self.cov_wx,
            self.steps,
            self.waiting_w,
            self.waiting_wx,
            self.waiting_steps,
        ):
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
            w = (
                self._gradients(inputs, outputs, epoch)
                if self.proxy == "jacobian"
                else outputs.float()
            )
            x, w = x if self.whole else x @ self.whitener.T, w - w.mean(0)
            if self._first_look(outputs):
                warn_of_scale(self._whitened(x[:64]), self.effective_dim)
            local = self._of_batch(x, w.detach())
            averages = self._averages(local)
            if _finite(*local) and averages is not None:
                value = self._with_gradient(
                    x, w, *averages, self._effective_samples(len(x) * world_size())
                )
            else:  # the loss shows it, and a gradient scaler skips the step
                value = torch.nan * w.sum().double()
        return self.penalty(-value.float(), self.schedule(epoch), value=value.float())

    def _gradients(self, inputs: Tensor, outputs: Tensor, epoch: int) -> Tensor:
        if not inputs.requires_grad:
            raise ValueError(
                "`inputs` must require a gradient before the forward pass for proxy='jacobian': call "
                "`inputs.requires_grad_()` first."
            )
        generator = Generator().manual_seed(hash((self.seed, epoch)) % 2**63)
        v = torch.randn(self.num_outputs, generator=generator, device="cpu")
        along = (outputs.float() @ (v / v.norm()).to(outputs.device)).sum()
        (gradients,) = torch.autograd.grad(along, inputs, create_graph=torch.is_grad_enabled())
        return gradients.flatten(1).float() @ self.whitener.T * self.scales  # [B, r]

    def _of_batch(self, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        """Covariance of the centred ``w``, and of ``w`` with the inputs."""
        return (w.T @ w).double() / (len(x) - 1), (w.T @ x).double() / (
            len(x) - 1
        )  # [K, K], [K, r]

    def _whitened(self, cov_wx: Tensor) -> Tensor:
        # Rows are outputs: a product of [K, D] with the transposed whitener is four times as fast as its transpose.
        return (
            times_whitener(cov_wx.float(), self.whitener, transposed=True).double()
            if self.whole
            else cov_wx
        )

    def _pulled(self, cov_wx: Tensor) -> Tensor:
        """The transposed map of :meth:`_whitened`, which carries gradients back."""
        return times_whitener(cov_wx.float(), self.whitener).double() if self.whole else cov_wx

    def _covariances(self, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        """Covariance of ``w``, and of ``w`` with the whitened inputs, of one batch."""
        cov_w, cov_wx = self._of_batch(x if self.whole else x @ self.whitener.T, w - w.mean(0))
        return cov_w, self._whitened(cov_wx)

    @torch.no_grad()
    def _averages(self, local: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor] | None:
        """Moving averages over batches and ranks, moved in train mode; of this batch alone before the first."""
        if self.training or self.steps == 0:
            batch = mean_over_ranks(*local)
            usable = _finite(*batch)  # else a bad batch stays for ever
            if self.training and usable:
                self._move(*batch)
            elif self.steps == 0:
                cov_wx = self._whitened(batch[1])
                return (batch[0], cov_wx, self._pulled(cov_wx)) if usable else None
        start_up = 1 - self.decay ** int(self.steps)
        return self.cov_w / start_up, self.cov_wx / start_up, self.pulled / start_up

    def _move(self, cov_w: Tensor, cov_wx: Tensor) -> None:
        """Add a batch to those that wait, and these to the averages once their share is above the lag."""
        for total, new in ((self.waiting_w, cov_w), (self.waiting_wx, cov_wx)):
            total.mul_(self.decay).add_(new, alpha=1 - self.decay)
        self.waiting_steps += 1
        waiting, steps = int(self.waiting_steps), int(self.steps + self.waiting_steps)
        if 1 - self.decay**waiting <= self.lag * (1 - self.decay**steps):
            return
        self.cov_w.mul_(self.decay**waiting).add_(self.waiting_w)
        self.cov_wx.mul_(self.decay**waiting).add_(self._whitened(self.waiting_wx))
        self.pulled.copy_(self._pulled(self.cov_wx))
        self.steps.fill_(steps)
        for buffer in (self.waiting_w, self.waiting_wx, self.waiting_steps):
            buffer.zero_()

    def _effective_samples(self, batch_size: int) -> float:
        """How many samples weigh in the averages, at most as many as there are."""
        forgotten = self.decay ** max(1, int(self.steps))
        batches = (1 + self.decay) * (1 - forgotten) / ((1 - self.decay) * (1 + forgotten))
        return min(batch_size * batches, int(self.samples))

    def _with_gradient(
        self, x: Tensor, w: Tensor, cov_w: Tensor, cov_wx: Tensor, pulled: Tensor, n: float
    ) -> Tensor:
        """Information of the averages, with the gradient that the current batch would have as all of them."""
        # Of products over the batch: the gradient never sees a [K, D] matrix, let alone D×D.
        products = (w.T @ w).double(), (w.T @ (x @ pulled.float().T)).double()
        change_w, cross = (
            (part - part.detach()) / (len(x) - 1) for part in products
        )  # zeros that carry a gradient
        return self._from_squares(cov_w + change_w, cov_wx @ cov_wx.T + cross + cross.T, n)

    def _information(self, cov_w: Tensor, cov_wx: Tensor, n: float) -> Tensor:
        return self._from_squares(cov_w, cov_wx @ cov_wx.T, n)

    def _from_squares(self, cov_w: Tensor, squares: Tensor, n: float) -> Tensor:
        floor = self.ridge * cov_w.diagonal().mean().detach() + 1e-12
        factor = torch.linalg.cholesky(
            cov_w + floor * torch.eye(len(cov_w), dtype=cov_w.dtype, device=cov_w.device)
        )
        half = torch.linalg.solve_triangular(factor, squares, upper=False)
        whitened = torch.linalg.solve_triangular(
            factor, half.T, upper=False
        )  # [K, K], on both sides
        squared = torch.linalg.eigvalsh((whitened + whitened.T) / 2) * (
            n / (n + float(self.effective_dim))
        )
        return lautum_from_correlations(squared.clamp(max=1.0) * (1 - self.shrinkage) ** 2)


def _finite(*parts: Tensor) -> bool:
    """Whether all values are: a sum in float64 is cheaper than a look at each."""
    return all(bool(part.sum().isfinite()) for part in parts)


def _accept_without_lag(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any
) -> None:
    """Read a checkpoint from before batches could wait: none of them does."""
    if prefix + "cov_wx" in state_dict and prefix + "pulled" not in state_dict:
        cov_wx, whitener = state_dict[prefix + "cov_wx"], state_dict[prefix + "whitener"]
        whole = whitener.shape[0] == whitener.shape[1]
        state_dict[prefix + "pulled"] = (
            (cov_wx.float() @ whitener).double() if whole else cov_wx.clone()
        )
        for name in ("waiting_w", "waiting_wx", "waiting_steps"):
            state_dict[prefix + name] = torch.zeros_like(getattr(module, name))


def _check_ranges(
    D: int, K: int, components: int, decay: float, lag: float, shrinkage: float, ridge: float
) -> None:
    rules = {
        "num_outputs": (K, K >= 1, "at least 1"),
        "components": (
            components,
            1 <= components <= D,
            f"between 1 and the number of inputs, {D}",
        ),
        "decay": (decay, 0 <= decay < 1, "in [0, 1)"),
        "lag": (lag, 0 <= lag < 1, "in [0, 1)"),
        "shrinkage": (shrinkage, 0 < shrinkage < 1, "in (0, 1)"),
        "ridge": (ridge, ridge > 0, "positive"),
    }
    for argument, (value, valid, rule) in rules.items():
        if not valid:
            raise ValueError(f"`{argument}` must be {rule}, got {value}.")
