"""Information in the weights, transfer and certificates for PyTorch Lightning."""

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0.dev0"

if TYPE_CHECKING:  # what type checkers see; `tests/test_import.py` keeps it equal to `_EXPORTS`
    from lightning_taskinfo._observe import observing as observing
    from lightning_taskinfo._observe import trainable_parameters as trainable_parameters
    from lightning_taskinfo._warn import TaskInfoWarning as TaskInfoWarning
    from lightning_taskinfo.callbacks.fisher_trace import FisherTrace as FisherTrace
    from lightning_taskinfo.callbacks.information_in_weights import (
        InformationInWeights as InformationInWeights,
    )
    from lightning_taskinfo.callbacks.local_minimum import LocalMinimum as LocalMinimum
    from lightning_taskinfo.callbacks.pac_bayes_certificate import (
        PACBayesCertificate as PACBayesCertificate,
    )
    from lightning_taskinfo.callbacks.sample_scores import SampleScores as SampleScores
    from lightning_taskinfo.callbacks.train_step_norms import TrainStepNorms as TrainStepNorms
    from lightning_taskinfo.certificates import Certificate as Certificate
    from lightning_taskinfo.certificates import Prior as Prior
    from lightning_taskinfo.certificates import certify as certify
    from lightning_taskinfo.distributions import post_distribution as post_distribution
    from lightning_taskinfo.distributions import pre_distribution as pre_distribution
    from lightning_taskinfo.fisher.metric import FisherInformation as FisherInformation
    from lightning_taskinfo.mixins import InformationMixin as InformationMixin
    from lightning_taskinfo.mixins import LautumMixin as LautumMixin
    from lightning_taskinfo.mixins import LocalMinimumMixin as LocalMinimumMixin
    from lightning_taskinfo.mixins import MultiKernelMMDMixin as MultiKernelMMDMixin
    from lightning_taskinfo.mixins import MutualInformationMixin as MutualInformationMixin
    from lightning_taskinfo.mixins import PenaltyMixin as PenaltyMixin
    from lightning_taskinfo.mixins import TemporalEnsemblingMixin as TemporalEnsemblingMixin
    from lightning_taskinfo.regularizers import Lautum as Lautum
    from lightning_taskinfo.regularizers import LocalMinimumRegularizer as LocalMinimumRegularizer
    from lightning_taskinfo.regularizers import MultiKernelMMD as MultiKernelMMD
    from lightning_taskinfo.regularizers import MutualInformation as MutualInformation
    from lightning_taskinfo.regularizers import TemporalEnsembling as TemporalEnsembling
    from lightning_taskinfo.regularizers import WeightInformation as WeightInformation
    from lightning_taskinfo.regularizers import WeightSchedule as WeightSchedule
    from lightning_taskinfo.regularizers import (
        estimate_mutual_information as estimate_mutual_information,
    )
    from lightning_taskinfo.regularizers import (
        frozen_batchnorm_statistics as frozen_batchnorm_statistics,
    )
    from lightning_taskinfo.tasks.complexity import structure_function as structure_function
    from lightning_taskinfo.tasks.distance import task_distance as task_distance
    from lightning_taskinfo.tasks.embedding import TaskEmbedding as TaskEmbedding
    from lightning_taskinfo.tasks.embedding import embedding_distances as embedding_distances
    from lightning_taskinfo.tasks.embedding import nearest_source as nearest_source
    from lightning_taskinfo.tasks.matrix import DistanceMatrix as DistanceMatrix
    from lightning_taskinfo.tasks.structure import StructureFunction as StructureFunction
    from lightning_taskinfo.tasks.task2vec import Task2Vec as Task2Vec
    from lightning_taskinfo.tasks.training import Training as Training
    from lightning_taskinfo.transfer.logs import log_to_wandb as log_to_wandb
    from lightning_taskinfo.transfer.overlap import FeatureOverlap as FeatureOverlap
    from lightning_taskinfo.transfer.overlap import feature_overlap as feature_overlap
    from lightning_taskinfo.transfer.rank import FineTuning as FineTuning
    from lightning_taskinfo.transfer.rank import rank_starts as rank_starts
    from lightning_taskinfo.transfer.ranking import StartRanking as StartRanking
    from lightning_taskinfo.transfer.ready.data import TransferDataModule as TransferDataModule
    from lightning_taskinfo.transfer.ready.module import TransferClassifier as TransferClassifier
    from lightning_taskinfo.transfer.ready.stages import Stages as Stages
    from lightning_taskinfo.transfer.report import TransferReport as TransferReport
    from lightning_taskinfo.variational import add_weight_noise as add_weight_noise
    from lightning_taskinfo.variational import plain_state_dict as plain_state_dict
    from lightning_taskinfo.variational import remove_weight_noise as remove_weight_noise
    from lightning_taskinfo.variational import sampling as sampling
    from lightning_taskinfo.variational import weight_kl as weight_kl

_EXPORTS = {  # public name -> the module that defines it, imported when the name is first used
    "Certificate": "certificates",
    "DistanceMatrix": "tasks.matrix",
    "FeatureOverlap": "transfer.overlap",
    "FineTuning": "transfer.rank",
    "FisherInformation": "fisher.metric",
    "FisherTrace": "callbacks.fisher_trace",
    "InformationInWeights": "callbacks.information_in_weights",
    "InformationMixin": "mixins",
    "Lautum": "regularizers",
    "LautumMixin": "mixins",
    "LocalMinimum": "callbacks.local_minimum",
    "LocalMinimumMixin": "mixins",
    "LocalMinimumRegularizer": "regularizers",
    "MultiKernelMMD": "regularizers",
    "MultiKernelMMDMixin": "mixins",
    "MutualInformation": "regularizers",
    "MutualInformationMixin": "mixins",
    "PACBayesCertificate": "callbacks.pac_bayes_certificate",
    "PenaltyMixin": "mixins",
    "Prior": "certificates",
    "SampleScores": "callbacks.sample_scores",
    "Stages": "transfer.ready.stages",
    "StartRanking": "transfer.ranking",
    "StructureFunction": "tasks.structure",
    "Task2Vec": "tasks.task2vec",
    "TaskEmbedding": "tasks.embedding",
    "TaskInfoWarning": "_warn",
    "TemporalEnsembling": "regularizers",
    "TemporalEnsemblingMixin": "mixins",
    "TrainStepNorms": "callbacks.train_step_norms",
    "Training": "tasks.training",
    "TransferClassifier": "transfer.ready.module",
    "TransferDataModule": "transfer.ready.data",
    "TransferReport": "transfer.report",
    "WeightInformation": "regularizers",
    "WeightSchedule": "regularizers",
    "add_weight_noise": "variational",
    "certify": "certificates",
    "embedding_distances": "tasks.embedding",
    "estimate_mutual_information": "regularizers",
    "feature_overlap": "transfer.overlap",
    "frozen_batchnorm_statistics": "regularizers",
    "log_to_wandb": "transfer.logs",
    "nearest_source": "tasks.embedding",
    "observing": "_observe",
    "plain_state_dict": "variational",
    "post_distribution": "distributions",
    "pre_distribution": "distributions",
    "rank_starts": "transfer.rank",
    "remove_weight_noise": "variational",
    "sampling": "variational",
    "structure_function": "tasks.complexity",
    "task_distance": "tasks.distance",
    "trainable_parameters": "_observe",
    "weight_kl": "variational",
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
