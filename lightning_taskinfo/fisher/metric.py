"""The Fisher information of all samples that batches and processes have seen."""

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Generator, Tensor, nn
from torchmetrics import Metric

from lightning_taskinfo._observe import ParamDict, observing, trainable_parameters
from lightning_taskinfo.fisher.accumulators import TraceSums
from lightning_taskinfo.fisher.measure import (
    Forward,
    Request,
    number_of_samples,
    squared_gradients_by_name,
    squared_norms_by_name,
)
from lightning_taskinfo.functional.likelihood import Labels, Likelihood


class FisherEstimate(NamedTuple):
    """What :class:`FisherInformation` computes.

    Attributes:
        trace: Trace of the Fisher information, a mean over samples; a float64 scalar.
        standard_error: Standard error of the trace over samples, NaN where it is not estimable: for
            one sample, or when only the diagonal was accumulated.
        samples: Number of samples.
        layers: Trace by the module that owns the parameters; they add up to ``trace``.
        diagonal: Diagonal by parameter name, shaped like the parameters; empty unless asked for.
    """

    trace: Tensor
    standard_error: Tensor
    samples: Tensor
    layers: dict[str, Tensor]
    diagonal: ParamDict


class FisherInformation(Metric):
    r"""Trace or diagonal of the Fisher information over batches and processes.

    .. math:: \operatorname{tr} F(w) = \frac1N \sum_n \mathbb{E}_{y \sim p_w(\cdot|x_n)} \|\nabla_w \log p_w(y|x_n)\|^2

    Every sample counts once, however unevenly they are spread over batches and processes. The model
    is measured in eval mode and comes back as it was; the metric does not keep it. A process
    without samples has to call :meth:`update` with an empty batch, so that all hold states of one
    shape.

    Args:
        quantity: ``"trace"`` with its standard error, or ``"diagonal"``.
        labels: Whose labels: ``"sampled"`` from the model, ``"exact"`` expectation over them, or
            ``"empirical"``.
        likelihood: What the outputs mean, see :func:`~lightning_taskinfo.fisher.fisher_trace`.
        mc_samples: Number of labels drawn for each sample, for ``labels="sampled"``.
        seed: Seed of those draws, which differ from update to update and from process to process.
        chunk_size: Samples of one forward pass.
        forward_fn: How to get the outputs, ``forward_fn(model, inputs)``; found out by default.
        **kwargs: Arguments of every ``torchmetrics.Metric``.

    Example:
        >>> metric = FisherInformation(labels="exact", likelihood="gaussian")
        >>> net = nn.Linear(1, 1, bias=False)
        >>> for x in ([[1.0], [2.0]], [[3.0]]):  # tr F = mean of x²
        ...     metric.update(net, torch.tensor(x))
        >>> metric.compute().trace
        tensor(4.6667, dtype=torch.float64)
    """

    is_differentiable = False
    full_state_update = False

    total: Tensor
    count: Tensor

    def __init__(
        self,
        *,
        quantity: Literal["trace", "diagonal"] = "trace",
        labels: Labels = "sampled",
        likelihood: str | Likelihood = "categorical",
        mc_samples: int = 1,
        seed: int = 0,
        chunk_size: int | None = None,
        forward_fn: Forward | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if quantity not in ("trace", "diagonal"):
            raise ValueError(f"`quantity` must be one of trace, diagonal, got {quantity!r}.")
        self.quantity = quantity
        self.seed = seed
        self.drawn = 0
        self.request = Request(labels, likelihood, mc_samples, None, chunk_size, forward_fn)
        self.shapes: dict[str, torch.Size] = {}
        zero = torch.zeros((), dtype=torch.float64, device="cpu")
        # A vector from the first update on: `TraceSums.sums`, or the squares of all weights'
        # gradients.
        self.add_state("total", zero, dist_reduce_fx="sum")
        self.add_state("count", zero.clone(), dist_reduce_fx="sum")

    def update(
        self,
        model: nn.Module,
        inputs: Any,
        targets: Tensor | None = None,
    ) -> None:
        """Add the samples of a batch.

        Args:
            model: The model to measure; its trainable parameters must keep their names and shapes
                between updates.
            inputs: A batch of inputs, ``[N, ...]``, or one of Hugging Face with its labels;
                ``N = 0`` adds nothing.
            targets: The dataset's labels ``[N, ...]``; needed for ``labels="empirical"``.

        Raises:
            ValueError: If the parameters are not those of the first update, and as for
                ``fisher_trace``.
        """
        shapes = {name: p.shape for name, p in trainable_parameters(model).items()}
        self._remember(shapes)
        request = self._seeded(next(model.parameters()).device)
        with observing(model):
            if self.quantity == "trace":
                norms = squared_norms_by_name(model, inputs, targets, request)
                sums = self.total.new_tensor(TraceSums.of(norms).sums)
            else:
                squares = squared_gradients_by_name(model, inputs, targets, request)
                parts = [part.flatten() for part in squares.values()]
                sums = torch.cat(parts).to(self.total)
        self.total = self.total + sums
        self.count = self.count + number_of_samples(inputs)

    def _seeded(self, device: torch.device) -> Request:
        """Return the request with a generator for this update on this process."""
        rank = torch.distributed.get_rank() if self.distributed_available_fn() else 0
        self.drawn += 1  # torchmetrics' own count starts again inside `forward`
        seed = hash((self.seed, rank, self.drawn))
        return replace(self.request, generator=Generator(device).manual_seed(seed))

    def compute(self) -> FisherEstimate:
        """Return the estimate from the samples of all processes."""
        scalar = self.total.new_tensor
        samples = self.count.long()
        if not samples:
            unknown = scalar(math.nan)
            return FisherEstimate(unknown, unknown.clone(), samples, {}, {})
        sums = self.total.tolist()
        diagonal: ParamDict = {}
        if self.quantity == "diagonal":
            sizes = [shape.numel() for shape in self.shapes.values()]
            parts = self.total.split(sizes)
            for name, part in zip(self.shapes, parts, strict=True):
                diagonal[name] = part.view(self.shapes[name]) / self.count
            of_parameters = [part.sum().item() for part in parts]
            sums = [*of_parameters, math.nan, self.count.item()]  # without an error
        trace, error, layers = TraceSums([*self.shapes], sums).compute()
        by_layer = {layer: scalar(part) for layer, part in layers.items()}
        return FisherEstimate(scalar(trace), scalar(error), samples, by_layer, diagonal)

    def merge_state(self, incoming_state: "dict[str, Any] | Metric") -> None:
        """Add the samples of another metric, which may be the first ones.

        Args:
            incoming_state: A ``FisherInformation`` of the same quantity and model, or its
                ``metric_state``.
        """
        if isinstance(incoming_state, FisherInformation):
            self._remember(incoming_state.shapes or self.shapes)
        super().merge_state(incoming_state)
        self._computed = None

    def _wrap_compute(self, compute: Callable[[], FisherEstimate]) -> Callable[[], FisherEstimate]:
        squeezing = super()._wrap_compute(compute)  # makes scalars of all tensors with one element

        @functools.wraps(compute)
        def shaped() -> FisherEstimate:
            estimate = squeezing()
            diagonal: ParamDict = {}
            for name, part in estimate.diagonal.items():
                diagonal[name] = part.view(self.shapes[name])
            return estimate._replace(diagonal=diagonal)

        return shaped

    def _remember(self, shapes: dict[str, torch.Size]) -> None:
        if self.shapes and shapes != self.shapes:
            changed = sorted({name for name, _ in shapes.items() ^ self.shapes.items()})
            raise ValueError(
                f"`model` must have the trainable parameters of the first update, got others: {changed}."
            )
        self.shapes = shapes
