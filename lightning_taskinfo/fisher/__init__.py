"""Fisher information of any network: trace, diagonal, layer traces, Gram matrix of per-sample gradients."""

from typing import TYPE_CHECKING

from lightning_taskinfo.fisher.kron import kronecker_factors
from lightning_taskinfo.fisher.quantities import (
    engines_used,
    fisher_diagonal,
    fisher_trace,
    gradient_gram,
    layer_traces,
    per_sample_squared_norms,
)

if TYPE_CHECKING:
    from lightning_taskinfo.fisher.metric import FisherEstimate, FisherInformation

__all__ = [
    "FisherEstimate",
    "FisherInformation",
    "engines_used",
    "fisher_diagonal",
    "fisher_trace",
    "gradient_gram",
    "kronecker_factors",
    "layer_traces",
    "per_sample_squared_norms",
]


def __getattr__(name: str) -> object:
    if name not in ("FisherEstimate", "FisherInformation"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # Late: torchmetrics takes a second to import, and cannot be imported beside a torchvision that does not load.
    from lightning_taskinfo.fisher import metric

    return getattr(metric, name)
