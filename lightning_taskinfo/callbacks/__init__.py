"""Callbacks that watch a training run and leave it as it is, bit for bit."""

from lightning_taskinfo.callbacks.fisher_trace import FisherTrace
from lightning_taskinfo.callbacks.hard_samples import HardSamples, SampleScores
from lightning_taskinfo.callbacks.information_in_weights import InformationInWeights
from lightning_taskinfo.callbacks.local_minimum import LocalMinimum
from lightning_taskinfo.callbacks.pac_bayes_certificate import PACBayesCertificate
from lightning_taskinfo.callbacks.probe import Probe

__all__ = [
    "FisherTrace",
    "HardSamples",
    "InformationInWeights",
    "LocalMinimum",
    "PACBayesCertificate",
    "Probe",
    "SampleScores",
]
