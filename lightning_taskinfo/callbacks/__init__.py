"""Callbacks that watch a training run and leave it as it is, bit for bit."""

from lightning_taskinfo.callbacks.fisher_trace import FisherTrace
from lightning_taskinfo.callbacks.pac_bayes_certificate import PACBayesCertificate

__all__ = ["FisherTrace", "PACBayesCertificate"]
