"""Fisher information of any network: trace, diagonal, layer traces, Gram matrix of per-sample gradients."""

from importlib import import_module
from typing import TYPE_CHECKING

from lightning_taskinfo.fisher.api import (
    fisher_diagonal,
    fisher_trace,
    gradient_gram,
    layer_traces,
    per_sample_squared_norms,
)
from lightning_taskinfo.fisher.kron import KroneckerFactors, kronecker_factors

if TYPE_CHECKING:
    from lightning_taskinfo.fisher.metric import FisherEstimate, FisherInformation

__all__ = [
    "FisherEstimate",
    "FisherInformation",
    "KroneckerFactors",
    "fisher_diagonal",
    "fisher_trace",
    "gradient_gram",
    "kronecker_factors",
    "layer_traces",
    "per_sample_squared_norms",
]


def __getattr__(name: str) -> object:
    if name in ("FisherEstimate", "FisherInformation"):  # only these need torchmetrics
        return getattr(import_module(f"{__name__}.metric"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
