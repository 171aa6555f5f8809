"""The Fisher information of all samples that batches and processes have seen."""

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Generator, Tensor, nn
from torchmetrics import Metric

from lightning_taskinfo._batches import sample_count, tensors
from lightning_taskinfo._layers import layer_of
from lightning_taskinfo._observe import ParamDict, observing, trainable_parameters
from lightning_taskinfo.fisher.accumulators import Diagonal, Norms
from lightning_taskinfo.fisher.fallback import Forward
from lightning_taskinfo.fisher.measure import Engine, Request, measure
from lightning_taskinfo.functional.likelihood import Labels, Likelihood


class FisherEstimate(NamedTuple):
    """What :class:`FisherInformation` computes.

    Attributes:
        trace: Trace of the Fisher information, a mean over samples; a float64 scalar.
        standard_error: Standard error of the trace over samples, NaN where it is not estimable: for one sample, or
            when only the diagonal was accumulated.
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

    Every sample counts once, however unevenly they are spread over batches and processes. The model is measured in
    eval mode and comes back as it was; the metric does not keep it. A process without samples has to call
    :meth:`update` with an empty batch, so that all hold states of one shape.

    Args:
        quantity: ``"trace"`` with its standard error, or ``"diagonal"``.
        labels: Whose labels: ``"sampled"`` from the model, ``"exact"`` expectation over them, or ``"empirical"``.
        likelihood: What the outputs mean, see :func:`~lightning_taskinfo.fisher.fisher_trace`.
        mc_samples: Number of labels drawn for each sample, for ``labels="sampled"``.
        seed: Seed of those draws, which differ from update to update and from process to process.
        engine: See :func:`~lightning_taskinfo.fisher.fisher_trace`.
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
    squares: Tensor
    count: Tensor

    def __init__(
        self,
        *,
        quantity: Literal["trace", "diagonal"] = "trace",
        labels: Labels = "sampled",
        likelihood: str | Likelihood = "categorical",
        mc_samples: int = 1,
        seed: int = 0,
        engine: Engine = "auto",
        chunk_size: int | None = None,
        forward_fn: Forward | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if quantity not in ("trace", "diagonal"):
            raise ValueError(f"`quantity` must be one of trace, diagonal, got {quantity!r}.")
        self.quantity, self.seed, self.drawn = quantity, seed, 0
        self.request = Request(labels, likelihood, mc_samples, None, engine, chunk_size, forward_fn)
        self.shapes: dict[str, torch.Size] = {}
        zero = torch.zeros(
            (), dtype=torch.float64, device="cpu"
        )  # becomes a vector with the first update
        self.add_state(
            "total", zero, dist_reduce_fx="sum"
        )  # [parameters], or [weights] for the diagonal
        self.add_state("squares", zero.clone(), dist_reduce_fx="sum")
        self.add_state("count", zero.clone(), dist_reduce_fx="sum")

    def update(
        self,
        model: nn.Module,
        inputs: Any,
        targets: Tensor | None = None,
        *,
        counted: int | None = None,
    ) -> None:
        """Add the samples of a batch.

        Args:
            model: The model to measure; its trainable parameters must keep their names and shapes between updates.
            inputs: A batch of inputs, ``[N, ...]``, or one of Hugging Face with its labels; ``N = 0`` adds nothing.
            targets: The dataset's labels ``[N, ...]``; needed for ``labels="empirical"``.
            counted: Only this many of the samples count, the first ones, for a trace; all by default. The others let
                processes with sharded weights run passes of one size.

        Raises:
            ValueError: If the parameters are not those of the first update, and as for ``fisher_trace``.
        """
        self._remember({name: p.shape for name, p in trainable_parameters(model).items()})
        if all(len(x) == 0 for x in tensors(inputs)):
            self._add(torch.zeros(self._size, dtype=torch.float64, device=self.device))
            return
        with observing(model):
            if self.quantity == "diagonal":
                self._add_diagonal(model, inputs, targets)
            else:
                self._add_norms(model, inputs, targets, counted)
        self.count = self.count + (sample_count(inputs) if counted is None else counted)

    @property
    def _size(self) -> int:
        return (
            sum(shape.numel() for shape in self.shapes.values())
            if self.quantity == "diagonal"
            else len(self.shapes)
        )

    def _add(self, sums: Tensor) -> None:
        self.total = self.total + sums.to(self.total)

    def _add_norms(
        self, model: nn.Module, inputs: Any, targets: Tensor | None, counted: int | None
    ) -> None:
        sink = Norms(sample_count(inputs))
        measure(model, inputs, targets, self._seeded(model), sink)
        some = next(iter(sink.values.values()))
        by_name = (sink.values.get(name, torch.zeros_like(some)) for name in self.shapes)
        norms = torch.stack([values[:counted].double() for values in by_name])
        self._add(norms.sum(1))
        self.squares = self.squares + norms.sum(0).square().sum().to(self.squares)

    def _add_diagonal(self, model: nn.Module, inputs: Any, targets: Tensor | None) -> None:
        parameters = trainable_parameters(model)
        sink = Diagonal(parameters)
        measure(model, inputs, targets, self._seeded(model), sink)
        self._add(
            torch.cat(
                [sink.total(name, p).detach().flatten().double() for name, p in parameters.items()]
            )
        )

    def _seeded(self, model: nn.Module) -> Request:
        """Return the request with a generator for this update on this process."""
        rank = torch.distributed.get_rank() if self.distributed_available_fn() else 0
        self.drawn += 1  # torchmetrics' own count starts again inside `forward`
        generator = Generator(next(model.parameters()).device).manual_seed(
            hash((self.seed, rank, self.drawn))
        )
        return replace(self.request, generator=generator)

    def compute(self) -> FisherEstimate:
        """Return the estimate from the samples of all processes."""
        if self.count == 0:
            nan = torch.full_like(self.count, math.nan)
            return FisherEstimate(nan, nan, self.count.long(), {}, {})
        mean, n = self.total / self.count, self.count
        diagonal = self._by_name(mean) if self.quantity == "diagonal" else {}
        parts = {k: v.sum() for k, v in diagonal.items()} or dict(
            zip(self.shapes, mean, strict=True)
        )
        layers: dict[str, Tensor] = {}
        for name, part in parts.items():
            owner = layer_of(name)
            layers[owner] = layers.get(owner, torch.zeros_like(part)) + part
        trace = mean.sum()
        variance = (self.squares - n * trace.square()).clamp(min=0) / (
            n - 1
        )  # 0/0 = NaN for one sample
        error = torch.full_like(trace, math.nan) if diagonal else (variance / n).sqrt()
        return FisherEstimate(trace, error, n.long(), layers, diagonal)

    def merge_state(self, incoming_state: "dict[str, Any] | Metric") -> None:
        """Add the samples of another metric, which may be the first ones.

        Args:
            incoming_state: A ``FisherInformation`` of the same quantity and model, or its ``metric_state``.
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
            diagonal = {
                name: part.view(self.shapes[name]) for name, part in estimate.diagonal.items()
            }
            return estimate._replace(diagonal=diagonal)

        return shaped

    def _remember(self, shapes: dict[str, torch.Size]) -> None:
        if self.shapes and shapes != self.shapes:
            changed = sorted({name for name, _ in shapes.items() ^ self.shapes.items()})
            raise ValueError(
                f"`model` must have the trainable parameters of the first update, got others: {changed}."
            )
        self.shapes = shapes

    def _by_name(self, flat: Tensor) -> ParamDict:
        parts = flat.split([shape.numel() for shape in self.shapes.values()])
        return {
            name: part.view(shape)
            for (name, shape), part in zip(self.shapes.items(), parts, strict=True)
        }
