"""Fisher information of any network: trace, diagonal, layer traces, Gram matrix of per-sample gradients."""

from lightning_taskinfo.fisher.kron import kronecker_factors
from lightning_taskinfo.fisher.metric import FisherEstimate, FisherInformation
from lightning_taskinfo.fisher.quantities import (
    engines_used,
    fisher_diagonal,
    fisher_trace,
    gradient_gram,
    layer_traces,
    per_sample_squared_norms,
)

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
