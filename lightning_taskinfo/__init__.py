"""Information in the weights, transfer and certificates for PyTorch Lightning."""

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:  # what type checkers see; `tests/test_import.py` keeps it equal to `_EXPORTS`
    from lightning_taskinfo._observe import observing as observing
    from lightning_taskinfo._warn import TaskInfoWarning as TaskInfoWarning
    from lightning_taskinfo.callbacks.fisher_trace import FisherTrace as FisherTrace
    from lightning_taskinfo.callbacks.information_in_weights import (
        InformationInWeights as InformationInWeights,
    )
    from lightning_taskinfo.callbacks.local_minimum import LocalMinimum as LocalMinimum
    from lightning_taskinfo.callbacks.pac_bayes_certificate import (
        PACBayesCertificate as PACBayesCertificate,
    )
    from lightning_taskinfo.callbacks.train_step_norms import SampleScores as SampleScores
    from lightning_taskinfo.callbacks.train_step_norms import TrainStepNorms as TrainStepNorms
    from lightning_taskinfo.certificates import Prior as Prior
    from lightning_taskinfo.certificates import certify as certify
    from lightning_taskinfo.fisher.metric import FisherInformation as FisherInformation
    from lightning_taskinfo.mixins import InformationMixin as InformationMixin
    from lightning_taskinfo.mixins import LautumMixin as LautumMixin
    from lightning_taskinfo.mixins import LocalMinimumMixin as LocalMinimumMixin
    from lightning_taskinfo.mixins import MultiKernelMMDMixin as MultiKernelMMDMixin
    from lightning_taskinfo.mixins import MutualInformationMixin as MutualInformationMixin
    from lightning_taskinfo.mixins import TemporalEnsemblingMixin as TemporalEnsemblingMixin
    from lightning_taskinfo.regularizers import Lautum as Lautum
    from lightning_taskinfo.regularizers import LocalMinimumRegularizer as LocalMinimumRegularizer
    from lightning_taskinfo.regularizers import MultiKernelMMD as MultiKernelMMD
    from lightning_taskinfo.regularizers import MutualInformation as MutualInformation
    from lightning_taskinfo.regularizers import TemporalEnsembling as TemporalEnsembling
    from lightning_taskinfo.regularizers import WeightInformation as WeightInformation
    from lightning_taskinfo.regularizers import WeightSchedule as WeightSchedule
    from lightning_taskinfo.tasks.complexity import structure_function as structure_function
    from lightning_taskinfo.tasks.distance import task_distance as task_distance
    from lightning_taskinfo.tasks.task2vec import Task2Vec as Task2Vec
    from lightning_taskinfo.tasks.training import Training as Training
    from lightning_taskinfo.transfer.overlap import feature_overlap as feature_overlap
    from lightning_taskinfo.transfer.rank import FineTuning as FineTuning
    from lightning_taskinfo.transfer.rank import rank_starts as rank_starts
    from lightning_taskinfo.transfer.ready.data import TransferDataModule as TransferDataModule
    from lightning_taskinfo.transfer.ready.module import TransferClassifier as TransferClassifier
    from lightning_taskinfo.transfer.ready.stages import Stages as Stages
    from lightning_taskinfo.transfer.report import TransferReport as TransferReport
    from lightning_taskinfo.variational import add_weight_noise as add_weight_noise
    from lightning_taskinfo.variational import remove_weight_noise as remove_weight_noise
    from lightning_taskinfo.variational import weight_kl as weight_kl

_EXPORTS = {  # public name -> the module that defines it, imported when the name is first used
    # watch a training
    "FisherTrace": "callbacks.fisher_trace",
    "InformationInWeights": "callbacks.information_in_weights",
    "LocalMinimum": "callbacks.local_minimum",
    "PACBayesCertificate": "callbacks.pac_bayes_certificate",
    "SampleScores": "callbacks.train_step_norms",
    "TrainStepNorms": "callbacks.train_step_norms",
    "observing": "_observe",
    "TaskInfoWarning": "_warn",
    # regularise it
    "InformationMixin": "mixins",
    "Lautum": "regularizers",
    "LautumMixin": "mixins",
    "LocalMinimumMixin": "mixins",
    "LocalMinimumRegularizer": "regularizers",
    "MultiKernelMMD": "regularizers",
    "MultiKernelMMDMixin": "mixins",
    "MutualInformation": "regularizers",
    "MutualInformationMixin": "mixins",
    "TemporalEnsembling": "regularizers",
    "TemporalEnsemblingMixin": "mixins",
    "WeightInformation": "regularizers",
    "WeightSchedule": "regularizers",
    "add_weight_noise": "variational",
    "remove_weight_noise": "variational",
    "weight_kl": "variational",
    # transfer
    "FineTuning": "transfer.rank",
    "Stages": "transfer.ready.stages",
    "TransferClassifier": "transfer.ready.module",
    "TransferDataModule": "transfer.ready.data",
    "TransferReport": "transfer.report",
    "feature_overlap": "transfer.overlap",
    "rank_starts": "transfer.rank",
    # ask about tasks and networks
    "FisherInformation": "fisher.metric",
    "Prior": "certificates",
    "Task2Vec": "tasks.task2vec",
    "Training": "tasks.training",
    "certify": "certificates",
    "structure_function": "tasks.complexity",
    "task_distance": "tasks.distance",
}
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
    value = getattr(import_module(f"{__name__}.{_EXPORTS[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, *_MODULES])
