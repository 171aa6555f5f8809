"""Eigenvalues of the Kronecker-factored Fisher information of all samples that batches and processes have seen."""

from typing import Any, Literal

import torch
from torch import Generator, Tensor, nn
from torchmetrics import Metric

from lightning_taskinfo._batches import sample_count, tensors
from lightning_taskinfo._observe import ParamDict, trainable_parameters
from lightning_taskinfo.fisher.kron import kronecker_factors
from lightning_taskinfo.fisher.per_sample import Forward
from lightning_taskinfo.functional.likelihood import Likelihood


class KroneckerFisher(Metric):
    r"""Kronecker factors of the Fisher information over batches and processes, and their eigenvalues.

    .. math:: F_W \approx B \otimes A, \qquad \lambda_{ij}(F_W) = \lambda_i(B)\,\lambda_j(A)

    Each factor is a mean over all samples, whichever process had them. A process without samples has to call
    :meth:`update` with an empty batch.

    Args:
        labels: ``"sampled"`` from the model (KFAC) or ``"exact"`` (KFLR).
        likelihood: ``"categorical"`` or ``"gaussian"``.
        mc_samples: Number of labels drawn for each sample, for ``labels="sampled"``.
        seed: Seed of those draws; give processes different ones.
        forward_fn: How to get the outputs, ``forward_fn(model, inputs)``; ``model(inputs)`` by default.
        **kwargs: Arguments of every ``torchmetrics.Metric``.

    Example:
        >>> metric, net = KroneckerFisher(labels="exact", likelihood="gaussian"), nn.Linear(1, 2)
        >>> metric.update(net, torch.tensor([[1.0], [3.0]]))  # the mean of x² is 5
        >>> metric.compute()["bias"], metric.compute()["weight"].flatten()
        (tensor([1.0000, 1.0000], dtype=torch.float64), tensor([5.0000, 5.0000], dtype=torch.float64))
    """

    is_differentiable = False
    full_state_update = False

    total: Tensor
    count: Tensor

    def __init__(
        self,
        *,
        labels: Literal["sampled", "exact"] = "sampled",
        likelihood: str | Likelihood = "categorical",
        mc_samples: int = 1,
        seed: int = 0,
        forward_fn: Forward | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.labels, self.likelihood, self.mc_samples = labels, likelihood, mc_samples
        self.forward_fn, self.generator = forward_fn, Generator().manual_seed(seed)
        self.shapes: dict[str, torch.Size] = {}
        zero = torch.zeros((), dtype=torch.float64)  # becomes a vector with the first update
        self.add_state("total", zero, dist_reduce_fx="sum")  # all factors, one after the other
        self.add_state("count", zero.clone(), dist_reduce_fx="sum")

    def update(self, model: nn.Module, inputs: Any) -> None:
        """Add the samples of a batch.

        Args:
            model: The model to measure, see :func:`~lightning_taskinfo.fisher.kronecker_factors`.
            inputs: A batch of inputs, ``[N, ...]``; ``N = 0`` adds nothing.
        """
        self.shapes = {name: p.shape for name, p in trainable_parameters(model).items()}
        if all(len(x) == 0 for x in tensors(inputs)):
            size = sum(side**2 for shape in self.shapes.values() for side in _sides(shape))
            self.total = self.total + torch.zeros(size).to(self.total)
            return
        factors = kronecker_factors(
            model,
            inputs,
            labels=self.labels,
            likelihood=self.likelihood,
            mc_samples=self.mc_samples,
            generator=self.generator,
            forward_fn=self.forward_fn,
        )
        n = sample_count(inputs)
        flat = torch.cat([part.flatten().double() for parts in factors.values() for part in parts])
        self.total, self.count = self.total + n * flat.to(self.total), self.count + n

    def compute(self) -> ParamDict:
        """Return the eigenvalues by parameter name, each shaped like the parameter (a single one: a scalar)."""
        sides = [(name, side) for name, shape in self.shapes.items() for side in _sides(shape)]
        parts = (self.total / self.count).split([side**2 for _, side in sides])
        values: ParamDict = {}
        for (name, side), part in zip(sides, parts, strict=True):
            eigenvalues = torch.linalg.eigvalsh(part.view(side, side)).clamp_min(0)  # rounding makes some negative
            values[name] = values[name].outer(eigenvalues) if name in values else eigenvalues
        return {name: value.view(self.shapes[name]) for name, value in values.items()}


def _sides(shape: torch.Size) -> list[int]:
    """Return the sizes of the factors: of outputs and inputs for a weight, of outputs for a bias."""
    return [shape[0]] if len(shape) == 1 else [shape[0], shape[1:].numel()]
