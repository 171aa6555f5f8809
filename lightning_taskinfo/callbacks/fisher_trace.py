"""Follow the Fisher information of a network while it trains."""

import math
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from lightning_taskinfo._batches import size
from lightning_taskinfo._lightning import LightningModule, Trainer
from lightning_taskinfo._observe import trainable_parameters
from lightning_taskinfo.callbacks._pool import Source, share
from lightning_taskinfo.callbacks._probe import Probe
from lightning_taskinfo.callbacks._processes import summed
from lightning_taskinfo.callbacks._samples import Samples
from lightning_taskinfo.fisher.engine import Request, measure
from lightning_taskinfo.fisher.sinks import Norms
from lightning_taskinfo.fisher.trace_sums import TraceSums
from lightning_taskinfo.fisher.train_step import StepRecorder


class FisherTrace(Probe):
    r"""Log ``fisher_trace``, the trace of the Fisher information of the trainable weights.

    .. math:: \operatorname{tr} F(w) = \mathbb{E}_{x,\, y \sim p_w(\cdot|x)} \|\nabla_w \log p_w(y|x)\|^2

    Beside it go ``fisher_trace_standard_error`` over samples, ``fisher_trace/<layer>`` and ``sgd_temperature``, the
    learning rate divided by the number of samples of an optimizer step. Every 100 steps unless told otherwise.

    With ``data="train_step"`` and ``labels="empirical"`` nothing is run for it: each sample's squared gradient norm is
    read off the training step's own backward pass, and logged as ``fisher_trace_train_step``, since penalties of the
    outputs are part of it, and so is a mean over tokens or pixels; a penalty of the weights is refused. A BatchNorm in
    train mode mixes the samples of a batch; these are then each sample's contribution to the batch's gradient, times
    the batch size. Lightning's division by ``accumulate_grad_batches`` and the gradient scaler's scale are undone; the
    last batch of an optimizer step is the one that is read. ``trainer.callback_metrics`` has these values every
    ``log_every_n_steps`` steps and after the last batch of an epoch only: at every step that alone would cost more than
    the measurement.

    Weights that FSDP2 (``fully_shard``) spreads over processes are followed where the forward pass gathers them; what
    only whole weights could show is refused before training starts. Processes then run every pass together: one that
    fails within a pass keeps the others waiting, as in the training itself.

    Args:
        data: As for every probe, or ``"train_step"``.
        max_samples: At most this many samples are measured, over all processes together; 128, or the first 16 of a
            batch for ``data="train_step"``, unless given.
        loss_reduction: Whether the loss of a training step is the ``"mean"`` or the ``"sum"`` over the samples of its
            batch; for ``data="train_step"``.
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
    data_options: ClassVar[tuple[str, ...]] = ("train_batch", "train", "val", "train_step")

    def __init__(
        self,
        *,
        data: Literal["train_batch", "train", "val", "train_step"] = "train_batch",
        max_samples: int | None = None,
        loss_reduction: Literal["mean", "sum"] = "mean",
        **probe: Any,
    ) -> None:
        if max_samples is None:
            max_samples = 16 if data == "train_step" else 128
        super().__init__(data=data, max_samples=max_samples, **probe)  # type: ignore[arg-type]
        if loss_reduction not in ("mean", "sum"):
            raise ValueError(f"`loss_reduction` must be one of mean, sum, got {loss_reduction!r}.")
        if data == "train_step" and self.labels != "empirical":
            raise ValueError(f"`labels` must be 'empirical' with `data='train_step'`, got {self.labels!r}.")
        for argument, default in {"mc_samples": 1, "likelihood": "categorical", "forward_fn": None}.items():
            if data == "train_step" and getattr(self, argument) != default:
                raise ValueError(
                    f"`{argument}` must be left out with `data='train_step'`, which takes the training step as it is, "
                    f"got {getattr(self, argument)!r}."
                )
        self.loss_reduction = loss_reduction
        self.headline = ("fisher_trace_train_step" if data == "train_step" else "fisher_trace",)
        self._temperature = math.nan
        self._recorder: StepRecorder | None = None
        self._scale, self._unread = 1.0, False
        self._reduce: Callable[[list[float]], Tensor] | None = None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_fit_start(trainer, pl_module)
        self._reduce = partial(summed, trainer) if trainer.world_size > 1 else None
        if self.data == "train_step":
            if not pl_module.automatic_optimization:
                raise ValueError("`data='train_step'` needs automatic optimization, got a module that does its own.")
            mine = share(self.max_samples, trainer.global_rank, trainer.world_size)
            self._recorder = StepRecorder(pl_module, len(mine))
            self._checked = self._unread = True  # the module is not called by us

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._note_temperature(trainer, getattr(trainer.train_dataloader, "batch_size", None))
        super().on_train_epoch_start(trainer, pl_module)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
        if self._unread:  # before the first step, whenever the first measurement is due
            self.reader.count(pl_module, batch)
            self._unread = False
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
        except Exception as error:  # a batch that cannot be read is reported where it is measured
            if self._recorder is not None:
                self._recorder.skip(str(error))
            return
        self._note_temperature(trainer, samples)
        if self._recorder is not None:
            self._recorder.start(samples)

    def _note_temperature(self, trainer: Trainer, samples: int | None) -> None:
        self._temperature = math.nan
        with suppress(LookupError, TypeError):  # optimizers without a rate of their own, loaders without a batch size
            together = samples * trainer.world_size * trainer.accumulate_grad_batches  # type: ignore[operator]
            self._temperature = float(trainer.optimizers[0].param_groups[0]["lr"]) / together

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        if self._recorder is not None and self._recorder.listening:
            first = not self._recorder.graph_checked
            self._recorder.before_backward(loss)
            if first and self._recorder.problem:
                raise ValueError(f"`data='train_step'` cannot measure this model: {self._recorder.problem}.")
            scaler = getattr(trainer.precision_plugin, "scaler", None)
            self._scale = trainer.accumulate_grad_batches / (1.0 if scaler is None else scaler.get_scale())
            if self.loss_reduction == "mean":
                self._scale *= self._recorder.batch_size

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._recorder is not None:
            self._recorder.listening = False  # where the step had no backward pass
            if self.every_n_steps != 1 or trainer.is_last_batch:
                self._recorder.stop()
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_end(trainer, pl_module)
        self.teardown(trainer, pl_module, "fit")

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.teardown(trainer, pl_module, "fit")

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self._recorder is not None:
            self._recorder.stop()
        self._recorder = None

    def _observed(
        self, trainer: Trainer, pl_module: LightningModule, source: Source, batch: Any
    ) -> dict[str, float] | None:
        if self._recorder is None or trainer.world_size > 1:
            return super()._observed(trainer, pl_module, source, batch)
        try:  # nothing to read, nobody to agree with: this may happen at every step
            return self.summarise(self._read_off(self._recorder))
        except Exception as error:
            self._failed(trainer, error)
            return None

    def _read_off(self, recorder: StepRecorder) -> TraceSums:
        norms = recorder.norms
        if recorder.problem or not norms:
            raise RuntimeError(recorder.problem or "the training step had no backward pass")
        information = TraceSums.of(norms, self._scale**2)
        if not all(map(math.isfinite, information.sums)):
            raise RuntimeError("the gradients of the training step are not finite")
        return information

    def observe(self, model: nn.Module, samples: Samples) -> TraceSums:
        if self._recorder is not None:
            return self._read_off(self._recorder)
        sink = Norms(size(samples.inputs))
        if sink.n:
            request = Request(
                labels=self.labels,
                likelihood=samples.draws(self.likelihood, self.mc_samples),
                mc_samples=self.mc_samples,
                forward_fn=self.forward_fn,
            )
            measure(model, samples.inputs, samples.targets, request, sink)
        unused = torch.zeros_like(next(iter(sink.values.values()), torch.zeros(0)))
        norms = {name: sink.values.get(name, unused)[: samples.counted] for name in trainable_parameters(model)}
        return TraceSums.of(norms)

    def summarise(self, observed: TraceSums) -> dict[str, float]:
        if self._reduce is not None:
            observed = observed._replace(sums=self._reduce(observed.sums).tolist())
        trace, error, layers = observed.compute(self.group_fn)
        (name,) = self.headline
        values = {name: trace, f"{name}_standard_error": error}
        if self.per_layer:
            values |= {f"{name}/{layer or 'module'}": part for layer, part in layers.items()}
        return {**values, "sgd_temperature": self._temperature}
