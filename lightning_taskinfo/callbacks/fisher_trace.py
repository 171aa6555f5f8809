"""Follow the Fisher information of a network while it trains."""

import math
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lightning_taskinfo._batches import size
from lightning_taskinfo._lightning import LightningModule, Trainer
from lightning_taskinfo._observe import trainable_parameters
from lightning_taskinfo.callbacks._probe import Probe
from lightning_taskinfo.callbacks._processes import summed
from lightning_taskinfo.callbacks._samples import Samples
from lightning_taskinfo.fisher.accumulators import Norms, TraceSums
from lightning_taskinfo.fisher.measure import Request, measure


class FisherTrace(Probe):
    r"""Log ``fisher_trace``, the trace of the Fisher information of the trainable weights.

    .. math:: \operatorname{tr} F(w) = \mathbb{E}_{x,\, y \sim p_w(\cdot|x)} \|\nabla_w \log p_w(y|x)\|^2

    Beside it go ``fisher_trace_standard_error`` over samples, ``fisher_trace/<layer>`` and ``sgd_temperature``, the
    learning rate divided by the number of samples of an optimizer step. Every 100 steps unless told otherwise.

    Weights that FSDP2 (``fully_shard``) spreads over processes are followed where the forward pass gathers them; what
    only whole weights could show is refused before training starts. Processes then run every pass together: one that
    fails within a pass keeps the others waiting, as in the training itself.

    Args:
        **probe: When and at what to look, see :class:`~lightning_taskinfo.callbacks.Probe`.

    Raises:
        ValueError: If an argument is out of its range.

    Example::

        trainer = Trainer(callbacks=[FisherTrace(every_n_steps=100)])

    References:
        Achille, Rovere, Soatto, *Critical Learning Periods in Deep Networks*, ICLR 2019.
    """

    default_every_n_steps: ClassVar[int | None] = 100
    ylabel: ClassVar[str] = "trace of the Fisher information"
    headline = ("fisher_trace",)

    def __init__(self, **probe: Any) -> None:
        super().__init__(**probe)
        self._temperature = math.nan
        self._reduce: Callable[[list[float]], Tensor] | None = None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_fit_start(trainer, pl_module)
        self._reduce = partial(summed, trainer) if trainer.world_size > 1 else None

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._note_temperature(trainer, getattr(trainer.train_dataloader, "batch_size", None))
        super().on_train_epoch_start(trainer, pl_module)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
        self._temperature = math.nan
        if self._unforeseen(pl_module) or self._due_next(trainer):
            self._begin(trainer, batch)

    def _unforeseen(self, pl_module: LightningModule) -> bool:
        """Whether any batch may be measured: training may end with it, or take several optimizer steps in it."""
        return self.data in ("train", "val") or not pl_module.automatic_optimization

    def _begin(self, trainer: Trainer, batch: Any) -> None:
        """Note what the start of a batch shows: its size, and the rate, which a scheduler may change before its end."""
        try:
            samples = self.reader.count(trainer.lightning_module, batch)
        except Exception:  # a batch that cannot be read is reported where it is measured
            return
        self._note_temperature(trainer, samples)

    def _note_temperature(self, trainer: Trainer, samples: int | None) -> None:
        self._temperature = math.nan
        with suppress(
            LookupError, TypeError
        ):  # optimizers without a rate of their own, loaders without a batch size
            together = samples * trainer.world_size * trainer.accumulate_grad_batches  # type: ignore[operator]
            self._temperature = float(trainer.optimizers[0].param_groups[0]["lr"]) / together

    def observe(self, model: nn.Module, samples: Samples) -> TraceSums:
        sink = Norms(size(samples.inputs))
        if sink.n:
            request = Request(
                labels=self.labels,
                likelihood=samples.draws(self.likelihood, self.mc_samples),
                mc_samples=self.mc_samples,
                forward_fn=self.forward_fn,
            )
            measure(model, samples.inputs, samples.targets, request, sink)
        unused = torch.zeros_like(next(iter(sink.values.values()), torch.zeros(0, device="cpu")))
        norms = {
            name: sink.values.get(name, unused)[: samples.counted]
            for name in trainable_parameters(model)
        }
        return TraceSums.of(norms)

    def summarise(self, observed: TraceSums) -> dict[str, float]:
        if self._reduce is not None:
            observed = observed._replace(sums=self._reduce(observed.sums).tolist())
        trace, error, layers = observed.compute(self.group_fn)
        values = {"fisher_trace": trace, "fisher_trace_standard_error": error}
        if self.per_layer:
            values |= {f"fisher_trace/{layer or 'module'}": part for layer, part in layers.items()}
        return {**values, "sgd_temperature": self._temperature}
