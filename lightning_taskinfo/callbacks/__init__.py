"""Callbacks that watch a training run and leave it as it is, bit for bit."""

from lightning_taskinfo.callbacks.fisher_trace import FisherTrace

__all__ = ["FisherTrace"]
