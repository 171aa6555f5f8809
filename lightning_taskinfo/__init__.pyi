"""The public names, for type checkers and for ``__init__.py``, which imports one when it is first used."""

from lightning_taskinfo._observe import observing as observing
from lightning_taskinfo._warn import TaskInfoWarning as TaskInfoWarning
from lightning_taskinfo.callbacks import (
    FisherTrace as FisherTrace,
    InformationInWeights as InformationInWeights,
    LocalMinimum as LocalMinimum,
    PACBayesCertificate as PACBayesCertificate,
    SampleScores as SampleScores,
    HardSamples as HardSamples,
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

__version__: str
