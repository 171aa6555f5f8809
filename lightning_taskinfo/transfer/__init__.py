"""Starts × ways to adapt × numbers of labels × seeds, compared with scratch and reported.

:func:`transfer` in ``run.py`` reads the call, plans the trainings and collects their results. A
recipe knows what is trained: the user's own module from their starts (``own.py``), or the ready
parts (``ready/``). ``training.py`` trains it so that a killed training goes on.
``report.py`` compares the results.
"""

import sys
from inspect import signature
from types import ModuleType

from lightning_taskinfo.transfer.overlap import FeatureOverlap, feature_overlap
from lightning_taskinfo.transfer.rank import FineTuning, rank_starts
from lightning_taskinfo.transfer.ranking import LayerReadout, RankedStart, StartRanking
from lightning_taskinfo.transfer.ready import Stages
from lightning_taskinfo.transfer.ready.data import TransferDataModule
from lightning_taskinfo.transfer.ready.module import (
    BACKBONES,
    CLASSES,
    PENALTIES,
    WEIGHTS,
    TransferClassifier,
    mlp,
    small_cnn,
)
from lightning_taskinfo.transfer.report import Result, TransferReport, log_to_wandb
from lightning_taskinfo.transfer.run import group_name, transfer

__doc__ = transfer.__doc__ or ""  # so that `help` tells how to call it
__signature__ = signature(transfer)


class _Transfer(ModuleType):
    """This package; called, it is its function, for those who write ``from lightning_taskinfo import transfer``."""

    __call__ = staticmethod(transfer)


sys.modules[__name__].__class__ = _Transfer

__all__ = [
    "BACKBONES",
    "CLASSES",
    "PENALTIES",
    "WEIGHTS",
    "FeatureOverlap",
    "FineTuning",
    "LayerReadout",
    "RankedStart",
    "Result",
    "Stages",
    "StartRanking",
    "TransferClassifier",
    "TransferDataModule",
    "TransferReport",
    "feature_overlap",
    "group_name",
    "log_to_wandb",
    "mlp",
    "rank_starts",
    "small_cnn",
    "transfer",
]
