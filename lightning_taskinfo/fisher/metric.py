"""The Fisher information of all samples that batches and processes have seen."""

import math
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor, nn
from torchmetrics import Metric

from lightning_taskinfo._observe import observing
from lightning_taskinfo.fisher.accumulators import TraceSums
from lightning_taskinfo.fisher.measure import Forward, Request, squared_norms_by_name
from lightning_taskinfo.functional.likelihood import Labels, Likelihood


class FisherEstimate(NamedTuple):
    """What :class:`FisherInformation` computes.

    Attributes:
        trace: Trace of the Fisher information, a mean over samples; a float64 scalar.
        standard_error: Standard error of the trace over samples, NaN where it is not estimable: for
            one sample.
        samples: Number of samples.
        layers: Trace by the module that owns the parameters; they add up to ``trace``.
    """

    trace: Tensor
    standard_error: Tensor
    samples: Tensor
    layers: dict[str, Tensor]


class FisherInformation(Metric):
    r"""Trace of the Fisher information over batches and processes, with its standard error.

    .. math:: \operatorname{tr} F(w) = \frac1N \sum_n \mathbb{E}_{y \sim p_w(\cdot|x_n)} \|\nabla_w \log p_w(y|x_n)\|^2

    Every sample counts once, however unevenly they are spread over batches and processes. The model
    is measured in eval mode and comes back as it was; the metric does not keep it. A process
    without samples has to call :meth:`update` with an empty batch, so that all hold states of one
    shape.

    Args:
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

    def __init__(
        self,
        *,
        labels: Labels = "sampled",
        likelihood: str | Likelihood = "categorical",
        mc_samples: int = 1,
        seed: int = 0,
        chunk_size: int | None = None,
        forward_fn: Forward | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.seed = seed
        self.drawn = 0
        self.request = Request(labels, likelihood, mc_samples, None, chunk_size, forward_fn)
        self.names: list[str] = []
        zero = torch.zeros((), dtype=torch.float64, device="cpu")
        self.add_state(
            "total", zero, dist_reduce_fx="sum"
        )  # from the first update on `TraceSums.sums`

    def update(
        self,
        model: nn.Module,
        inputs: Any,
        targets: Tensor | None = None,
    ) -> None:
        """Add the samples of a batch.

        Args:
            model: The model to measure; its trainable parameters must keep their names between
                updates.
            inputs: A batch of inputs, ``[N, ...]``, or one of Hugging Face with its labels;
                ``N = 0`` adds nothing.
            targets: The dataset's labels ``[N, ...]``; needed for ``labels="empirical"``.

        Raises:
            ValueError: If the parameters are not those of the first update, and as for
                ``fisher_trace``.
        """
        rank = torch.distributed.get_rank() if self.distributed_available_fn() else 0
        self.drawn += 1  # torchmetrics' own count starts again inside `forward`
        generator = Generator(next(model.parameters()).device)
        generator.manual_seed(hash((self.seed, rank, self.drawn)))
        request = replace(self.request, generator=generator)
        with observing(model):
            norms = squared_norms_by_name(model, inputs, targets, request)
        found = TraceSums.of(norms)
        self._remember(found.names)
        self.total = self.total + self.total.new_tensor(found.sums)

    def compute(self) -> FisherEstimate:
        """Return the estimate from the samples of all processes."""
        scalar = self.total.new_tensor
        samples = self.total.flatten()[-1].long()
        if not samples:
            return FisherEstimate(scalar(math.nan), scalar(math.nan), samples, {})
        trace, error, layers = TraceSums(self.names, self.total.tolist()).compute()
        by_layer = {layer: scalar(part) for layer, part in layers.items()}
        return FisherEstimate(scalar(trace), scalar(error), samples, by_layer)

    def merge_state(self, incoming_state: "dict[str, Any] | Metric") -> None:
        """Add the samples of another metric, which may be the first ones.

        Args:
            incoming_state: A ``FisherInformation`` of the same model, or its ``metric_state``.
        """
        if isinstance(incoming_state, FisherInformation):
            self._remember(incoming_state.names or self.names)
        super().merge_state(incoming_state)
        self._computed = None

    def _remember(self, names: list[str]) -> None:
        if self.names and names != self.names:
            changed = sorted({*names} ^ {*self.names})
            raise ValueError(
                f"`model` must have the trainable parameters of the first update, got others: {changed}."
            )
        self.names = names
