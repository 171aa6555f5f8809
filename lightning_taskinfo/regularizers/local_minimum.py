"""Prefer flat minima: penalise how much one small gradient step changes the loss of a part of the batch."""

from collections.abc import Callable
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from lightning_taskinfo._nested import sample_count, split
from lightning_taskinfo._observe import ParamDict, holding, trainable_parameters
from lightning_taskinfo._random import keep_random_states
from lightning_taskinfo._ranges import check_counts, check_positive
from lightning_taskinfo.regularizers._base import (
    Regularizer,
    Weight,
    check_scalar,
    frozen_batchnorm_statistics,
)
from lightning_taskinfo.variational import repeatable_noise

Loss = Callable[[Any], Tensor]
Parameters = dict[str, nn.Parameter]


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
        weight: The :math:`\beta_R`, 1 to 100 in the paper, or a :class:`WeightSchedule`: the paper starts after the
            first drop of the learning rate.
        step_size: The :math:`\alpha`.
        parts: The :math:`M`. Samples beyond a multiple of it are left out of the penalty.

    Raises:
        ValueError: If an argument is out of range.

    Example:
        >>> net, loss = nn.Linear(2, 1, bias=False), nn.MSELoss()
        >>> regularizer = LocalMinimumRegularizer(weight=1.0, parts=2)
        >>> batch = torch.randn(4, 2), torch.randn(4, 1)
        >>> penalty = regularizer(net, lambda part: loss(net(part[0]), part[1]), batch)
        >>> bool(penalty > 0)
        True

    References:
        Jia, Su, *Information-Theoretic Local Minima Characterization and Regularization*, ICML 2020.
    """

    def __init__(
        self,
        *,
        weight: Weight = 10.0,
        step_size: float = 1e-4,
        parts: int = 8,
    ) -> None:
        super().__init__(weight)
        check_positive(step_size=step_size)
        check_counts(parts=parts)
        self.step_size = step_size
        self.parts = parts

    def forward(
        self,
        model: nn.Module,
        loss_fn: Loss,
        batch: Any,
        *,
        epoch: int = 0,
    ) -> Tensor:
        """Return the penalty.

        Args:
            model: The module whose trainable parameters the penalty is about.
            loss_fn: Mean loss of a (part of the) batch; it must run ``model``.
            batch: Tensors, or tuples, lists and dicts of them, with the samples along the first axis.
            epoch: Current epoch, for the weight.

        Returns:
            ``weight * R``, a scalar; :attr:`value` is ``R``. Zero where the weight is, without any computation.

        Raises:
            ValueError: If weights are in half precision, the batch has fewer samples than parts, or the loss is no
                scalar.
            TypeError: If ``loss_fn`` is no function.
        """
        if not callable(loss_fn):
            raise TypeError(
                f"`loss_fn` must be a function of a batch, got {type(loss_fn).__name__}."
            )
        parameters = trainable_parameters(model)
        if not parameters:
            raise ValueError("`model` must have trainable parameters, got none.")
        for name, p in parameters.items():
            if p.dtype not in (torch.float32, torch.float64):
                raise ValueError(
                    f"`model` must keep its weights in float32 or float64, got {p.dtype} for `{name}`: a step of this "
                    "size is lost in half precision. Use mixed precision, e.g. precision='bf16-mixed'."
                )
        parts = split_batch(batch, self.parts)  # also before the start: no late surprise
        weight = self.schedule(epoch)
        if not weight:
            self.value = None
            self.weight = 0.0
            return p.new_zeros(())
        with (
            torch.inference_mode(False),
            torch.enable_grad(),
            torch.autocast(p.device.type, enabled=False),
            frozen_batchnorm_statistics(model),
        ):
            value, gradient = self._value_and_gradient(model, loss_fn, parts, parameters)
        # A number whose gradient is the one computed above.
        for name, p in parameters.items():
            zero = p - p.detach()
            value = value + (zero * gradient[name]).sum()
        return self.penalty(value, weight)

    def _value_and_gradient(
        self,
        model: nn.Module,
        loss_fn: Loss,
        parts: list[Any],
        parameters: Parameters,
    ) -> tuple[Tensor, ParamDict]:
        def look(part: Any) -> tuple[Tensor, ParamDict]:
            """Return loss and gradient, each time under the same dropout masks and the same noise."""
            restore = keep_random_states({p.device for p in parameters.values()})
            try:
                with repeatable_noise(model):
                    loss = loss_fn(part)
            finally:
                restore()
            check_scalar("loss_fn(part)", loss)
            found = torch.autograd.grad(
                loss, [*parameters.values()], allow_unused=True, materialize_grads=True
            )
            return loss.detach(), dict(zip(parameters, found, strict=True))

        losses = []
        gradient = {name: torch.zeros_like(p) for name, p in parameters.items()}
        for part in parts:
            loss, g = look(part)
            moved = {name: p.detach() - self.step_size * g[name] for name, p in parameters.items()}
            with holding(parameters, moved):
                loss_moved, g_moved = look(part)
            losses.append((loss - loss_moved) / len(parts))
            for name, total in gradient.items():
                total += (g[name] - g_moved[name]) / len(parts)
        return sum(losses, torch.zeros_like(loss)), gradient


def split_batch(batch: Any, parts: int) -> list[Any]:
    """Cut a nested batch into parts of equal size along the first axis; what is left over is dropped.

    Raises:
        ValueError: If the batch holds no tensors, tensors of different lengths, or fewer samples than parts.

    Example:
        >>> [part["x"].tolist() for part in split_batch({"x": torch.arange(5)}, 2)]
        [[0, 1], [2, 3]]
    """
    count = sample_count(batch, "batch")
    if count < parts:
        raise ValueError(
            f"`batch` must hold at least `parts` = {parts} samples, got {count}; leave out the last, incomplete batch "
            "of an epoch (`drop_last=True`), or set `parts`."
        )
    return [*islice(split(batch, count // parts), parts)]
