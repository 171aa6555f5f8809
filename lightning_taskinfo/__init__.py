"""Information in the weights, transfer and certificates for PyTorch Lightning."""

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0.dev0"

if TYPE_CHECKING:  # what type checkers see; `tests/test_import.py` keeps it equal to `_EXPORTS`
    from lightning_taskinfo._observe import observing as observing
    from lightning_taskinfo._observe import trainable_parameters as trainable_parameters
    from lightning_taskinfo.callbacks.fisher_trace import FisherTrace as FisherTrace
    from lightning_taskinfo.callbacks.information_in_weights import InformationInWeights as InformationInWeights
    from lightning_taskinfo.callbacks.local_minimum import LocalMinimum as LocalMinimum
    from lightning_taskinfo.callbacks.pac_bayes_certificate import PACBayesCertificate as PACBayesCertificate
    from lightning_taskinfo.certificates import Certificate as Certificate
    from lightning_taskinfo.certificates import Prior as Prior
    from lightning_taskinfo.certificates import certify as certify
    from lightning_taskinfo.distributions import post_distribution as post_distribution
    from lightning_taskinfo.distributions import pre_distribution as pre_distribution
    from lightning_taskinfo.fisher.metric import FisherInformation as FisherInformation
    from lightning_taskinfo.transfer.overlap import FeatureOverlap as FeatureOverlap
    from lightning_taskinfo.transfer.overlap import feature_overlap as feature_overlap

_EXPORTS = {  # public name -> the module that defines it, imported when the name is first used
    "Certificate": "certificates",
    "FeatureOverlap": "transfer.overlap",
    "FisherInformation": "fisher.metric",
    "FisherTrace": "callbacks.fisher_trace",
    "InformationInWeights": "callbacks.information_in_weights",
    "LocalMinimum": "callbacks.local_minimum",
    "PACBayesCertificate": "callbacks.pac_bayes_certificate",
    "Prior": "certificates",
    "certify": "certificates",
    "feature_overlap": "transfer.overlap",
    "observing": "_observe",
    "post_distribution": "distributions",
    "pre_distribution": "distributions",
    "trainable_parameters": "_observe",
}
__all__ = ["__version__", *_EXPORTS]


def __getattr__(name: str) -> object:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_EXPORTS[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
