"""Kronecker factors of the Fisher information of all samples that batches and processes have seen."""

from typing import Any

import torch
from torch import Generator, Tensor, nn
from torchmetrics import Metric

from lightning_taskinfo._batches import sample_count, tensors
from lightning_taskinfo._observe import ParamDict, trainable_parameters
from lightning_taskinfo.fisher.fallback import Forward
from lightning_taskinfo.fisher.kron import (
    KroneckerEngine,
    KroneckerFactors,
    as_factors,
    kronecker_sums,
)
from lightning_taskinfo.fisher.kron_sums import MAX_SIDE, KroneckerSums
from lightning_taskinfo.fisher.measure import Request
from lightning_taskinfo.functional.likelihood import Labels, Likelihood


class KroneckerFisher(Metric):
    r"""Kronecker factors of the Fisher information over batches and processes, and their eigenvalues.

    .. math:: F_W \approx B \otimes A, \qquad \lambda_{ij}(F_W) = \lambda_i(B)\,\lambda_j(A)

    Each factor is a mean over all samples, whichever process had them, as
    :func:`~lightning_taskinfo.fisher.kronecker_factors` of one batch would give it. A process without samples has to
    call :meth:`update` with an empty batch.

    Args:
        labels: Whose labels: ``"sampled"``, ``"exact"`` or ``"empirical"``.
        likelihood: What the outputs mean.
        mc_samples: Number of labels drawn for each sample, for ``labels="sampled"``.
        seed: Seed of those draws; give processes different ones.
        engine: Who computes the factors: ``"auto"``, ``"backpack"`` or ``"own"``.
        max_side: Of a factor with a longer side than this, only the diagonal is kept.
        forward_fn: How to get the outputs, ``forward_fn(model, inputs)``; ``model(inputs)`` by default.
        **kwargs: Arguments of every ``torchmetrics.Metric``.

    Example:
        >>> metric, net = KroneckerFisher(labels="exact", likelihood="gaussian"), nn.Linear(1, 2)
        >>> metric.update(net, torch.tensor([[1.0], [3.0]]))  # the mean of x² is 5
        >>> metric.compute()["bias"], metric.compute()["weight"].flatten()
        (tensor([1., 1.], dtype=torch.float64), tensor([5., 5.], dtype=torch.float64))
    """

    is_differentiable = False
    full_state_update = False

    total: Tensor
    count: Tensor

    def __init__(
        self,
        *,
        labels: Labels = "sampled",
        likelihood: str | Likelihood = "categorical",
        mc_samples: int = 1,
        seed: int = 0,
        engine: KroneckerEngine = "auto",
        max_side: int = MAX_SIDE,
        forward_fn: Forward | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.labels = labels
        self.likelihood = likelihood
        self.mc_samples = mc_samples
        self.seed = seed
        self.engine = engine
        self.max_side = max_side
        self.forward_fn = forward_fn
        self.generator: Generator | None = None
        self.shapes: dict[str, torch.Size] = {}
        self.sums: KroneckerSums | None = (
            None  # where the sums of all processes are taken apart again
        )
        zero = torch.zeros(
            (), dtype=torch.float64, device="cpu"
        )  # becomes a vector with the first update
        self.add_state("total", zero, dist_reduce_fx="sum")  # all sums, one after the other
        self.add_state("count", zero.clone(), dist_reduce_fx="sum")

    def update(self, model: nn.Module, inputs: Any, targets: Tensor | None = None) -> None:
        """Add the samples of a batch.

        Args:
            model: The model to measure.
            inputs: A batch of inputs, ``[N, ...]``; ``N = 0`` adds nothing.
            targets: The dataset's labels, where they are asked for or say what to ignore.
        """
        parameters = trainable_parameters(model)
        self.shapes = {name: p.shape for name, p in parameters.items()}
        n = 0
        if all(len(x) == 0 for x in tensors(inputs)):
            self.sums = KroneckerSums.zeros(model, self.max_side)
        else:
            if self.generator is None:
                device = next(iter(parameters.values())).device
                self.generator = Generator(device).manual_seed(self.seed)
            request = Request(
                labels=self.labels,
                likelihood=self.likelihood,
                mc_samples=self.mc_samples,
                generator=self.generator,
                forward_fn=self.forward_fn,
            )
            self.sums = kronecker_sums(
                model, inputs, targets, request, engine=self.engine, max_side=self.max_side
            )
            n = sample_count(inputs)
        self.total = self.total + self.sums.flat().to(self.device)
        self.count = self.count.to(self.device) + n

    def factors(self) -> dict[str, KroneckerFactors]:
        """Return the factors by parameter name, of this process alone before :meth:`compute` and of all inside it."""
        if self.sums is None:
            raise ValueError("`update` must be called before `factors`.")
        self.sums.load_flat(self.total)
        return as_factors(self.sums, self.count.item())

    def compute(self) -> ParamDict:
        """Return the eigenvalues by parameter name, each shaped like the parameter."""
        return {
            name: block.eigenvalues().view(self.shapes[name])
            for name, block in self.factors().items()
        }

    def eigen(self) -> dict[str, tuple[Tensor, Tensor | None, Tensor | None]]:
        """Return eigenvalues and eigenvectors of each parameter's factors, of all processes together."""
        with self.sync_context():
            return {name: block.eigen() for name, block in self.factors().items()}
