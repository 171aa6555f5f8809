"""Follow the Fisher information of a network while it trains."""

import math
from contextlib import suppress
from typing import Any

from torch import nn

from lightning_taskinfo._lightning import LightningModule, Trainer
from lightning_taskinfo._nested import sample_count
from lightning_taskinfo.callbacks.probe import Probe
from lightning_taskinfo.callbacks.source import Samples
from lightning_taskinfo.fisher.accumulators import TraceSums
from lightning_taskinfo.fisher.measure import squared_norms_by_name


class FisherTrace(Probe):
    r"""Log ``fisher_trace``, the trace of the Fisher information of the trainable weights.

    .. math:: \operatorname{tr} F(w) = \mathbb{E}_{x,\, y \sim p_w(\cdot|x)} \|\nabla_w \log p_w(y|x)\|^2

    Beside it go ``fisher_trace_standard_error`` over samples, ``fisher_trace/<layer>`` and
    ``sgd_temperature``, the learning rate divided by the number of samples of an optimizer step.
    Every 100 steps unless told otherwise.

    Weights that FSDP2 (``fully_shard``) spreads over processes are followed where the forward pass
    gathers them; what only whole weights could show is refused before training starts. Processes
    then run every pass together: one that fails within a pass keeps the others waiting, as in the
    training itself.

    Args:
        **probe: When and at what to look, see :class:`~lightning_taskinfo.callbacks.Probe`.

    Raises:
        ValueError: If an argument is out of its range.

    Example::

        trainer = Trainer(callbacks=[FisherTrace(every_n_steps=100)])

    References:
        Achille, Rovere, Soatto, *Critical Learning Periods in Deep Networks*, ICLR 2019.
    """

    default_every_n_steps = 100
    ylabel = "trace of the Fisher information"
    headline = ("fisher_trace",)

    def __init__(self, **probe: Any) -> None:
        super().__init__(**probe)
        self._rate = math.nan

    def on_before_optimizer_step(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        optimizer: Any,
    ) -> None:  # the rate that the step uses: a scheduler may change it before the measurement
        self._rate = optimizer.param_groups[0].get("lr", math.nan)

    def observe(self, model: nn.Module, samples: Samples) -> TraceSums:
        request = samples.request()
        norms = squared_norms_by_name(model, samples.inputs, samples.targets, request)
        return TraceSums.of({name: part[: samples.counted] for name, part in norms.items()})

    def summarise(self, observed: TraceSums, samples: Samples) -> dict[str, float]:
        sums = samples.summed(observed.sums).tolist()
        values = by_layer(self, "fisher_trace", observed._replace(sums=sums))
        values["sgd_temperature"] = self._temperature()
        return values

    def _temperature(self) -> float:
        """Return the learning rate over the samples of a step; NaN if one of them is not known."""
        trainer = self._trainer
        with suppress(Exception):  # a batch that cannot be read is reported where it is measured
            if trainer.global_step == 0:  # no step was made
                self._rate = trainer.optimizers[0].param_groups[0]["lr"]
            inputs, _ = self.reader.read(None, self._batch)  # without a call of the model
            batches = trainer.world_size * trainer.accumulate_grad_batches
            return float(self._rate) / (sample_count(inputs) * batches)
        return math.nan


def by_layer(probe: Probe, name: str, sums: TraceSums) -> dict[str, float]:
    """Return a trace, its standard error, and that of each layer if the probe is asked for it."""
    trace, error, layers = sums.compute(probe.group_fn)
    values = {name: trace, f"{name}_standard_error": error}
    if probe.per_layer:
        for layer, part in layers.items():
            values[f"{name}/{layer or 'module'}"] = part
    return values
