"""Information in the weights, transfer and certificates for PyTorch Lightning."""

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:  # what type checkers see; `tests/test_import.py` keeps it equal to `_EXPORTS`
    from lightning_taskinfo._observe import observing as observing
    from lightning_taskinfo._warn import TaskInfoWarning as TaskInfoWarning
    from lightning_taskinfo.callbacks import (
        FisherTrace as FisherTrace,
        InformationInWeights as InformationInWeights,
        LocalMinimum as LocalMinimum,
        PACBayesCertificate as PACBayesCertificate,
        SampleScores as SampleScores,
        TrainStepNorms as TrainStepNorms,
    )
    from lightning_taskinfo.certificates import Prior as Prior, certify as certify
    from lightning_taskinfo.fisher import FisherInformation as FisherInformation
    from lightning_taskinfo.mixins import (
        InformationMixin as InformationMixin,
        LautumMixin as LautumMixin,
        LocalMinimumMixin as LocalMinimumMixin,
        MultiKernelMMDMixin as MultiKernelMMDMixin,
        MutualInformationMixin as MutualInformationMixin,
        TemporalEnsemblingMixin as TemporalEnsemblingMixin,
    )
    from lightning_taskinfo.regularizers import (
        Lautum as Lautum,
        LocalMinimumRegularizer as LocalMinimumRegularizer,
        MultiKernelMMD as MultiKernelMMD,
        MutualInformation as MutualInformation,
        TemporalEnsembling as TemporalEnsembling,
        WeightInformation as WeightInformation,
        WeightSchedule as WeightSchedule,
    )
    from lightning_taskinfo.tasks import (
        Task2Vec as Task2Vec,
        Training as Training,
        structure_function as structure_function,
        task_distance as task_distance,
    )
    from lightning_taskinfo.transfer import (
        FineTuning as FineTuning,
        Stages as Stages,
        TransferClassifier as TransferClassifier,
        TransferDataModule as TransferDataModule,
        TransferReport as TransferReport,
        feature_overlap as feature_overlap,
        rank_starts as rank_starts,
    )
    from lightning_taskinfo.variational import (
        add_weight_noise as add_weight_noise,
        remove_weight_noise as remove_weight_noise,
        weight_kl as weight_kl,
    )

_NAMES = {  # module -> its names that are public here, imported when one is first used
    # watch a training
    "_observe": ["observing"],
    "_warn": ["TaskInfoWarning"],
    "callbacks": [
        "FisherTrace",
        "InformationInWeights",
        "LocalMinimum",
        "PACBayesCertificate",
        "SampleScores",
        "TrainStepNorms",
    ],
    # regularise it
    "mixins": [
        "InformationMixin",
        "LautumMixin",
        "LocalMinimumMixin",
        "MultiKernelMMDMixin",
        "MutualInformationMixin",
        "TemporalEnsemblingMixin",
    ],
    "regularizers": [
        "Lautum",
        "LocalMinimumRegularizer",
        "MultiKernelMMD",
        "MutualInformation",
        "TemporalEnsembling",
        "WeightInformation",
        "WeightSchedule",
    ],
    "variational": ["add_weight_noise", "remove_weight_noise", "weight_kl"],
    # transfer
    "transfer": [
        "FineTuning",
        "Stages",
        "TransferClassifier",
        "TransferDataModule",
        "TransferReport",
        "feature_overlap",
        "rank_starts",
    ],
    # ask about tasks and networks
    "certificates": ["Prior", "certify"],
    "fisher": ["FisherInformation"],
    "tasks": ["Task2Vec", "Training", "structure_function", "task_distance"],
}
_EXPORTS = {name: module for module, names in _NAMES.items() for name in names}
_MODULES = (
    "callbacks", "certificates", "data", "distributions", "fisher", "functional", "mixins", "plotting", "regularizers",
    "tasks", "transfer", "variational",
)  # fmt: skip
__all__ = ["__version__", *_EXPORTS]


def __getattr__(name: str) -> object:
    if name in _MODULES:  # so that `lightning_taskinfo.transfer(…)` needs no import of its own
        return import_module(f"{__name__}.{name}")
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_EXPORTS[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*__all__, *_MODULES])
