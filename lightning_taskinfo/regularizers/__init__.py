"""Penalties from information theory, each a module for any training loop."""

from lightning_taskinfo.regularizers._base import (
    Regularizer,
    WeightSchedule,
    frozen_batchnorm_statistics,
)
from lightning_taskinfo.regularizers.critics import (
    MutualInformationEstimate,
    estimate_mutual_information,
)
from lightning_taskinfo.regularizers.information import WeightInformation
from lightning_taskinfo.regularizers.lautum import Lautum
from lightning_taskinfo.regularizers.local_minimum import LocalMinimumRegularizer
from lightning_taskinfo.regularizers.mk_mmd import MultiKernelMMD
from lightning_taskinfo.regularizers.mutual_information import MutualInformation
from lightning_taskinfo.regularizers.temporal_ensembling import TemporalEnsembling

__all__ = [
    "Lautum",
    "LocalMinimumRegularizer",
    "MultiKernelMMD",
    "MutualInformation",
    "MutualInformationEstimate",
    "Regularizer",
    "TemporalEnsembling",
    "WeightInformation",
    "WeightSchedule",
    "estimate_mutual_information",
    "frozen_batchnorm_statistics",
]
