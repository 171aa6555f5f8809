"""Prefer flat minima: penalise how much one small gradient step changes the loss of a part of the batch."""

import math
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from lightning_taskinfo._observe import ParamDict, trainable_parameters
from lightning_taskinfo._ranges import check_counts, check_positive
from lightning_taskinfo.regularizers._base import Regularizer, WeightSchedule
from lightning_taskinfo.regularizers._network import frozen_batchnorm_statistics, swapped
from lightning_taskinfo.variational import repeatable_noise


class LocalMinimumRegularizer(Regularizer):
    r"""Penalty :math:`\beta_R R_\alpha(w)` of Jia and Su, algorithm 1.

    .. math::
        R_\alpha(w) = \frac1M \sum_{i=1}^M \big[ L(B_i, w) - L(B_i, w - \alpha g_i) \big],
        \qquad g_i = \nabla L(B_i, w)

    over :math:`M` equal parts :math:`B_i` of the batch, with :math:`g_i` held fixed. :math:`R_\alpha / \alpha` tends to
    the mean squared gradient norm of the parts, which estimates the trace of the (empirical) Fisher. The gradient

    .. math:: \nabla R_\alpha = \frac1M \sum_i \big[ \nabla L(B_i, w) - \nabla L(B_i, w - \alpha g_i) \big]

    is computed on the spot, part by part, so that no second-order graph is built and memory holds one part at a time;
    the returned penalty carries it to the weights. That costs two more forward and backward passes per batch.

    Both losses are computed in float32 with autocast off, under the same dropout masks and the same weight noise: the
    step is far below what bf16 resolves. Batch-norm statistics are not moved. Weight decay in the optimizer is no
    part of :math:`g_i`.

    Args:
        weight: The :math:`\beta_R`, 1 to 100 in the paper, or a :class:`WeightSchedule`.
        step_size: The :math:`\alpha`.
        parts: The :math:`M`. Samples beyond a multiple of it are left out of the penalty.
        start: First epoch with the penalty, or ``"learning_rate_drop"``: as soon as the learning rate has fallen to
            half of the highest one seen.

    Raises:
        ValueError: If an argument is out of range.

    Example:
        >>> net, loss = nn.Linear(2, 1, bias=False), nn.MSELoss()
        >>> regularizer = LocalMinimumRegularizer(weight=1.0, parts=2, start=0)
        >>> batch = torch.randn(4, 2), torch.randn(4, 1)
        >>> penalty = regularizer(net, lambda part: loss(net(part[0]), part[1]), batch)
        >>> bool(penalty > 0)
        True

    References:
        Jia, Su, *Information-Theoretic Local Minima Characterization and Regularization*, ICML 2020.
    """

    highest_lr: Tensor
    started: Tensor

    def __init__(
        self,
        *,
        weight: float | WeightSchedule = 10.0,
        step_size: float = 1e-4,
        parts: int = 8,
        start: int | Literal["learning_rate_drop"] = "learning_rate_drop",
    ) -> None:
        super().__init__(weight)
        check_positive(step_size=step_size)
        check_counts(parts=parts)
        if start != "learning_rate_drop" and (isinstance(start, str) or start < 0):
            raise ValueError(f"`start` must be an epoch or 'learning_rate_drop', got {start!r}.")
        self.step_size = step_size
        self.parts = parts
        self.start = start
        self.register_buffer("highest_lr", torch.tensor(-math.inf, dtype=torch.float64))
        self.register_buffer("started", torch.tensor(False))

    def forward(
        self,
        model: nn.Module,
        loss_fn: Callable[[Any], Tensor],
        batch: Any,
        *,
        epoch: int = 0,
        learning_rate: float | None = None,
    ) -> Tensor:
        """Return the penalty.

        Args:
            model: The module whose trainable parameters the penalty is about.
            loss_fn: Mean loss of a (part of the) batch; it must run ``model``.
            batch: Tensors, or tuples, lists and dicts of them, with the samples along the first axis.
            epoch: Current epoch, for the weight and the start.
            learning_rate: Current learning rate, for ``start="learning_rate_drop"``.

        Returns:
            ``weight * R``, a scalar; :attr:`value` is ``R``. Zero before the start, without any computation.

        Raises:
            TypeError: If ``model`` is no module, or ``loss_fn`` no function that returns a tensor.
            ValueError: If weights are in half precision, the batch has fewer samples than parts, the loss is no scalar,
                or ``learning_rate`` is missing.
        """
        _check_kinds(model, loss_fn, batch)
        parameters = trainable_parameters(model)
        _check_precision(parameters)
        some = next(iter(parameters.values()))
        weight = 0.0
        if self._due(epoch, learning_rate):
            weight = self.schedule(epoch)
        if not weight:
            self.value = None
            self.weight = 0.0
            return self.nothing(some)
        value, gradient = self._value_and_gradient(
            model, loss_fn, split_batch(batch, self.parts), parameters
        )
        # A number whose gradient is the one computed above.
        for name, p in parameters.items():
            zero = p - p.detach()
            value = value + (zero * gradient[name]).sum()
        return self.penalty(value, weight)

    def _due(self, epoch: int, learning_rate: float | None) -> bool:
        if self.start != "learning_rate_drop":
            return epoch >= self.start
        if learning_rate is None:
            raise ValueError(
                "`learning_rate` must be given for start='learning_rate_drop', or `start` be an epoch."
            )
        if self.training:
            self.highest_lr.clamp_(min=learning_rate)
            self.started.logical_or_(learning_rate <= 0.5 * self.highest_lr)
        return bool(self.started)

    def _value_and_gradient(
        self,
        model: nn.Module,
        loss_fn: Callable[[Any], Tensor],
        parts: list[Any],
        parameters: dict[str, nn.Parameter],
    ) -> tuple[Tensor, ParamDict]:
        some = next(iter(parameters.values()))
        w = {name: p.detach() for name, p in parameters.items()}
        value = torch.zeros((), device=some.device)
        gradient = {name: torch.zeros_like(p) for name, p in w.items()}
        with (
            torch.inference_mode(False),
            torch.enable_grad(),
            torch.autocast(some.device.type, enabled=False),
            frozen_batchnorm_statistics(model),
        ):
            for part in parts:
                loss, g = _loss_and_gradient(model, loss_fn, part, parameters, w)
                moved = {}
                for name, p in w.items():
                    moved[name] = p - self.step_size * g[name]
                loss_moved, g_moved = _loss_and_gradient(model, loss_fn, part, parameters, moved)
                value = value + (loss - loss_moved) / len(parts)
                for name in w:
                    change = g[name] - g_moved[name]
                    gradient[name] = gradient[name] + change / len(parts)
        return value, gradient


def _loss_and_gradient(
    model: nn.Module,
    loss_fn: Callable[[Any], Tensor],
    part: Any,
    parameters: dict[str, nn.Parameter],
    weights: ParamDict,
) -> tuple[Tensor, ParamDict]:
    leaves = {name: w.detach().requires_grad_() for name, w in weights.items()}
    devices = {w.device for w in weights.values()}
    devices = {device for device in devices if device.type not in ("cpu", "meta")}
    device_type = next((device.type for device in devices), "cuda")
    # Both losses see the same dropout masks and the same noise.
    with (
        torch.random.fork_rng(list(devices), device_type=device_type),
        repeatable_noise(model),
        swapped(model, parameters.values(), leaves.values()),
    ):
        loss = loss_fn(part)
    if not isinstance(loss, Tensor):
        raise TypeError(f"`loss_fn` must return a scalar tensor, got {type(loss).__name__}.")
    if loss.ndim:
        raise ValueError(
            f"`loss_fn` must return a scalar, got shape {tuple(loss.shape)}: take the mean."
        )
    found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    gradients = {}
    for (name, w), g in zip(leaves.items(), found, strict=True):
        gradients[name] = torch.zeros_like(w) if g is None else g
    return loss.detach(), gradients


def split_batch(batch: Any, parts: int) -> list[Any]:
    """Cut a nested batch into parts of equal size along the first axis; what is left over is dropped.

    Raises:
        ValueError: If the batch holds no tensors, tensors of different lengths, or fewer samples than parts.

    Example:
        >>> [part["x"].tolist() for part in split_batch({"x": torch.arange(5)}, 2)]
        [[0, 1], [2, 3]]
    """
    leaves, structure = tree_flatten(batch)
    lengths = {len(leaf) for leaf in leaves if isinstance(leaf, Tensor) and leaf.ndim}
    if len(lengths) != 1:
        raise ValueError(
            f"`batch` must hold tensors with one number of samples, got {sorted(lengths)}."
        )
    size = lengths.pop() // parts
    if size == 0:
        raise ValueError(
            f"`batch` must hold at least `parts` = {parts} samples, got {max(len(t) for t in leaves)}."
        )

    def cut(leaf: Any, i: int) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.ndim:
            return leaf
        return leaf[i * size : (i + 1) * size]

    batches = []
    for i in range(parts):
        some = [cut(leaf, i) for leaf in leaves]
        batches.append(tree_unflatten(some, structure))
    return batches


def _check_kinds(model: object, loss_fn: object, batch: object) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"`model` must be a Module, got {type(model).__name__}.")
    if not callable(loss_fn):
        hint = "pass `lambda part: loss(net(part[0]), part[1])`"
        if callable(batch):
            hint = "it comes before `batch`"
        raise TypeError(
            f"`loss_fn` must be a function of a part of the batch, got {type(loss_fn).__name__}: {hint}."
        )


def _check_precision(parameters: dict[str, nn.Parameter]) -> None:
    if not parameters:
        raise ValueError("`model` must have trainable parameters, got none.")
    for name, p in parameters.items():
        if p.dtype not in (torch.float32, torch.float64):
            raise ValueError(
                f"`model` must keep its weights in float32 or float64, got {p.dtype} for `{name}`: a step of this size "
                "is lost in half precision. Use mixed precision, e.g. precision='bf16-mixed'."
            )
