"""Follow the Fisher information of a network while it trains."""

from torch import nn

from lightning_taskinfo.callbacks.probe import Probe
from lightning_taskinfo.callbacks.source import Samples
from lightning_taskinfo.fisher.accumulators import TraceSums
from lightning_taskinfo.fisher.measure import squared_norms_by_name


class FisherTrace(Probe):
    r"""Log ``fisher_trace``, the trace of the Fisher information of the trainable weights.

    .. math:: \operatorname{tr} F(w) = \mathbb{E}_{x,\, y \sim p_w(\cdot|x)} \|\nabla_w \log p_w(y|x)\|^2

    Beside it go ``fisher_trace_standard_error`` over samples, and ``fisher_trace/<layer>``. Every 100
    steps unless told otherwise.

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

    def observe(self, model: nn.Module, samples: Samples) -> TraceSums:
        request = samples.request()
        norms = squared_norms_by_name(model, samples.inputs, samples.targets, request)
        return TraceSums.of({name: part[: samples.counted] for name, part in norms.items()})

    def summarise(self, observed: TraceSums, samples: Samples) -> dict[str, float]:
        sums = samples.summed(observed.sums).tolist()
        return by_layer(self, "fisher_trace", observed._replace(sums=sums))


def by_layer(probe: Probe, name: str, sums: TraceSums) -> dict[str, float]:
    """Return a trace, its standard error, and that of each layer if the probe is asked for it."""
    trace, error, layers = sums.compute(probe.group_fn)
    values = {name: trace, f"{name}_standard_error": error}
    if probe.per_layer:
        for layer, part in layers.items():
            values[f"{name}/{layer or 'module'}"] = part
    return values
