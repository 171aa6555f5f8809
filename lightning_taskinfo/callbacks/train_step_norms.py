"""Read each sample's loss and gradient norm off the training step, and find the samples that are learned by heart."""

import math
from collections.abc import Callable
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from lightning_taskinfo._batches import read_batch, read_by, sample_count
from lightning_taskinfo._lightning import LightningModule, Trainer
from lightning_taskinfo._ranges import check_counts
from lightning_taskinfo._warn import warn
from lightning_taskinfo.callbacks._indices import BatchIndices, as_index
from lightning_taskinfo.callbacks.probe import Probe
from lightning_taskinfo.callbacks.report import has_matplotlib, report
from lightning_taskinfo.callbacks.sample_scores import SampleScores, SampleSums, Score, StepSamples
from lightning_taskinfo.callbacks.source import Samples, on_every_process, summed
from lightning_taskinfo.fisher.accumulators import TraceSums
from lightning_taskinfo.fisher.train_step import SampleLosses, StepLosses, StepRecorder


class TrainStepNorms(Probe):
    r"""Find the samples that are learned by heart, from the training step as it is.

    Each sample's loss, and the squared norm of its gradient, are read off the training step's own
    forward and backward pass, with its dropout masks and precision. Both are averaged over the
    steps in which the sample was trained on. ``callback.samples`` ranks the samples, ``print``
    shows the first of them, and the loggers get table and figure at the end of training. Samples
    are numbered as in the training loader's dataset: ``loader.dataset[index]``. The module and its
    batches stay as they are: the callback notes the numbers that the loader's sampler draws.

    ``squared_gradient_norm``, the mean over the measured samples of a batch, is logged with its
    standard error and its layers. With the dataset's labels it is the trace of the empirical Fisher
    information, times what the training
    adds: penalties of the outputs are part of it, and so is a mean over tokens or pixels. A
    BatchNorm in train mode mixes the samples of a batch; norms are then those of each sample's
    contribution to the batch's gradient, times the batch size. Lightning's division by
    ``accumulate_grad_batches`` and the gradient scaler's scale are undone.

    Losses can be read for cross-entropy, binary cross-entropy and squared errors of torch, which
    Hugging Face models use, too. Norms can be read of every network in which it can be shown which
    sample each row belongs to, by a few more backward passes over the first step, and over every
    step of a network that moves rows by their values. They are read with gradient checkpointing,
    too, unless it is reentrant or selective; the inputs of layers are then computed once more, and
    kept in memory until they have been read. What cannot be read is said at the first step.

    Args:
        every_n_steps: Optimizer steps between two values that are logged; a shorter training logs
            those of its last step. Samples are followed in all steps.
        norms: Whether gradient norms are read at all. Without them, losses of any network can be
            followed.
        norms_every_n_steps: Norms are read in one of this many steps, other steps in the next epoch,
            beside the steps in which values are logged. By default they are read in those alone,
            and in all steps where they rank the samples. Losses are read in all steps.
        max_samples: Norms of at most this many samples of a batch are read in a step, on each
            process; other ones the next time.
        top_k: How many samples the table of the loggers has.
        rank_by: What ranks the samples: ``"loss"`` or ``"squared_norm"``.
        loss_reduction: Whether the loss of a training step is the ``"mean"`` or the ``"sum"`` over
            the samples of its batch.
        per_layer: Whether to log a value for each layer as well.
        group_fn: The layer that a parameter counts for, by its name in ``named_parameters()``; its
            module by default.
        name: Prefix of the logged names, and identity in checkpoints; give two callbacks different
            names.
        batch_fn: Picks ``(inputs, targets)`` out of a batch; needed where the batch does not say it
            plainly. Targets are what the loss sees, in its order.
        index_fn: Picks the numbers of the samples out of a batch; needed where the loader does not
            know them, as with an iterable dataset, or where ``collate_fn`` or a hook changes the
            order of samples.

    Raises:
        ValueError: If an argument is out of its range.

    Example::

        callback = TrainStepNorms()
        Trainer(callbacks=[callback]).fit(module, loader)
        print(callback.samples)  # the ten most suspicious samples
    """

    default_every_n_steps: ClassVar[int | None] = 200
    default_at_start: ClassVar[bool] = False  # there is no step to read yet
    runs_the_model: ClassVar[bool] = False
    ylabel: ClassVar[str] = "mean squared gradient norm"

    def __init__(
        self,
        *,
        every_n_steps: int | None = None,
        norms: bool = True,
        norms_every_n_steps: int | None = None,
        max_samples: int = 64,
        top_k: int = 100,
        rank_by: Score = "loss",
        loss_reduction: Literal["mean", "sum"] = "mean",
        per_layer: bool = True,
        group_fn: Callable[[str], str] | None = None,
        name: str | None = None,
        batch_fn: Callable[[Any], Any] | None = None,
        index_fn: Callable[[Any], Any] | None = None,
    ) -> None:
        super().__init__(
            every_n_steps=every_n_steps,
            max_samples=max_samples,
            per_layer=per_layer,
            group_fn=group_fn,
            name=name,
            batch_fn=batch_fn,
        )
        for argument, value, options in (
            ("rank_by", rank_by, ("loss", "squared_norm")),
            ("loss_reduction", loss_reduction, ("mean", "sum")),
        ):
            if value not in options:
                raise ValueError(
                    f"`{argument}` must be one of {', '.join(options)}, got {value!r}."
                )
        check_counts(top_k=top_k, norms_every_n_steps=norms_every_n_steps)
        if rank_by == "squared_norm" and not norms:
            raise ValueError(f"`rank_by` must be 'loss' with `norms=False`, got {rank_by!r}.")
        self.norms = norms
        if norms_every_n_steps is None and rank_by == "squared_norm":
            norms_every_n_steps = 1
        self.norms_every_n_steps = norms_every_n_steps
        self.top_k = top_k
        self.rank_by: Score = rank_by
        self.loss_reduction = loss_reduction
        self.headline = ("squared_gradient_norm",) if norms else ("sample_loss",)
        self._indices = BatchIndices(index_fn)
        self._sums = SampleSums()
        self._merged: SampleSums | None = None  # of all processes, after training
        self._trainer: Trainer | None = None  # while it trains
        self._recorder: StepRecorder | None = None
        self._follow = True  # whether samples are known by number
        self._first_step = True
        self._only_step: int | None = None  # that is logged, of a training in which no other is due
        self._reset()

    def _reset(self) -> None:
        """Forget the step before."""
        self._size = 0
        self._turn = 0  # of the steps and samples whose norms are read
        self._reads_norms = False
        self._scale = math.nan
        self._numbers: Any = None
        self._targets: Any = None
        self._losses: SampleLosses | None = None
        self._problem: str | None = "the training step had no backward pass"
        if self._recorder is not None and self._recorder.problem != self._problem:
            self._recorder.skip(self._problem)

    @property
    def samples(self) -> SampleScores:
        """What is known of the samples; while several processes train, what this process has seen of them."""
        return (self._merged or self._sums).scores(self.rank_by)

    # Before the first step

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_fit_start(trainer, pl_module)
        if not pl_module.automatic_optimization:
            raise ValueError(
                f"{self.state_key} needs automatic optimization, got a module that does its own."
            )
        if self.norms:
            self._recorder = StepRecorder(pl_module, self.max_samples)
        self._checked = True  # the module is not called by us,
        self._comparison = None  # and its own loss is read
        self._follow = True
        self._first_step = True
        self._trainer = trainer
        self._indices.attach(trainer)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        before = (self._merged or self._sums).table  # of a checkpoint or an earlier fit
        if trainer.global_rank:  # it counts once
            before = torch.zeros(5, 0, device="cpu")
        self._merged = None
        self._sums = SampleSums(before.to(pl_module.device))
        steps = trainer.estimated_stepping_batches  # negative where nobody knows
        is_short = self.every_n_steps is not None and 0 < steps < self.every_n_steps
        self._only_step = int(steps) if is_short else None
        reason = self._indices.unknown(trainer)
        if reason is not None:
            self._follow = False
            warn(
                f"{self.state_key} does not know which samples a batch holds, and ranks none: {reason}. Set `index_fn` "
                "to a function of the batch that returns their numbers."
            )
        elif name := self._indices.reordering(trainer):
            warn(
                f"{self.state_key} takes the samples of a batch in the order in which {name!r} gets them; where it "
                "changes the order, set `index_fn` to a function of the batch that returns their numbers."
            )

    # The training step

    def on_train_batch_start(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        batch: Any,
        batch_idx: int,
    ) -> None:
        self._reset()
        self._turn = trainer.current_epoch + batch_idx  # other samples in the next epoch
        batch_fn = self.reader.batch_fn
        try:
            inputs, self._targets = (
                read_batch(batch) if batch_fn is None else read_by(batch_fn, batch)
            )
            size = sample_count(inputs)
            if self._follow:
                self._numbers = self._indices.of(trainer, batch)
                if self._first_step:
                    as_index(self._numbers, size)  # or say so
            self._size = size
        except Exception as error:
            self._failed_step(error)

    def on_before_backward(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        loss: Tensor,
    ) -> None:
        if not self._size:
            return
        self._problem = None
        try:
            self._read(trainer, loss)
        except Exception as error:
            self._failed_step(error)
        self._first_step = False

    def _failed_step(self, error: Exception) -> None:
        """Leave a gap, or end a training whose first step cannot be read."""
        if self._first_step:
            raise error
        self._problem = str(error)

    def _read(self, trainer: Trainer, loss: Tensor) -> None:
        """Read the losses, and the gradients when they come."""
        losses = StepLosses(loss, self._size, self._targets)
        if losses.found is None:
            self._losses = None
        else:
            self._losses = losses.found.kept()
        recorder = self._recorder
        self._reads_norms = recorder is not None and self._norms_are_due()
        if recorder is not None and (self._reads_norms or self._first_step):
            self._scale = self._per_sample(trainer)
            parts = math.ceil(self._size / self.max_samples)
            part = self._turn // (self.norms_every_n_steps or 1) % parts
            first = self.max_samples * part
            recorder.listen(recorder.graph(loss), losses.root, self._size, first)
        if self._first_step:
            self._refuse(losses)

    def _norms_are_due(self) -> bool:
        """Whether norms are read in this step: it is their turn, or the values after it are logged."""
        logged = self.every_n_steps
        every = self.norms_every_n_steps
        if every is not None and self._turn % every == 0:
            return True
        step = self._last_step + 1  # after this one
        if logged is None or self._only_step is not None:
            return step == self._only_step
        return step // logged != self._last_step // logged

    def _per_sample(self, trainer: Trainer) -> float:
        """Return what a sample's part of the backward pass has to be multiplied by to be its own gradient."""
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        scale = 1.0 if scaler is None else scaler.get_scale()
        samples = self._size if self.loss_reduction == "mean" else 1
        return samples * trainer.accumulate_grad_batches / scale

    def _refuse(self, losses: StepLosses) -> None:
        """Raise a ``ValueError`` if what was asked for cannot be read."""
        if losses.problem and (self.rank_by == "loss" or losses.root is None):
            raise ValueError(
                f"{self.state_key} cannot read the losses of samples: {losses.problem}. Set `batch_fn` to a function "
                "of the batch that returns inputs and the targets of the loss, or rank_by='squared_norm'."
            )
        if self._recorder is not None and self._recorder.problem:
            raise ValueError(
                f"{self.state_key} cannot read gradients off this training step: {self._recorder.problem}. It "
                "follows losses alone with `norms=False`."
            )

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        self._add_samples()
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    def _add_samples(self) -> None:
        """Add what this step has shown of its samples."""
        if self._problem is not None:
            return
        norms, first = None, 0
        if self._recorder is not None and self._reads_norms and self._recorder.norms:
            by_weight = torch.stack([*self._recorder.norms.values()])
            norms = self._scale**2 * by_weight.sum(0)
            first = self._recorder.first
        if self._follow and (norms is not None or self._losses is not None):
            step = StepSamples(self._numbers, self._size, self._losses, norms, first)
            self._sums.add(step)

    # What is logged

    def _values(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, float] | None:
        """Read this process's part, and agree that all succeeded before anybody waits for another."""
        observed = self._tried(self._read_off)
        together = trainer.strategy.reduce_boolean_decision(observed is not None)
        if observed is None or not together:
            return None
        names, sums = observed
        return self._summary(names, summed(trainer, sums).tolist())

    def _read_off(self) -> tuple[list[str], list[float]]:
        """Return the names of parameters, and sums over samples: of norms, if this step's were read, and of losses."""
        if self._problem is not None:
            raise RuntimeError(self._problem)
        losses = torch.zeros(0, device="cpu")
        if self._losses is not None:
            losses = self._losses.values
            losses = losses[losses.isfinite()]
        of_losses = [losses.double().sum().item(), float(len(losses))]
        if self._recorder is None or not self._reads_norms:
            return [], of_losses
        if not self._recorder.norms:
            raise RuntimeError(
                self._recorder.problem or "the backward pass did not come by all weights"
            )
        names, of_norms = TraceSums.of(self._recorder.norms, self._scale**2)
        if not all(map(math.isfinite, of_norms)):
            raise RuntimeError("the gradients of the training step are not finite")
        return names, [*of_norms, *of_losses]

    def observe(self, model: nn.Module, samples: Samples) -> Any:
        raise NotImplementedError("nothing is run: the training step is read")

    def summarise(self, observed: Any, samples: Samples) -> dict[str, float]:
        raise NotImplementedError("nothing is run: the training step is read")

    def _summary(self, names: list[str], sums: list[float]) -> dict[str, float]:
        *of_norms, loss, count = sums
        values = {"sample_loss": loss / count if count else math.nan}
        if not of_norms:
            return values
        mean, error, layers = TraceSums(names, of_norms).compute(self.group_fn)
        values |= {"squared_gradient_norm": mean, "squared_gradient_norm_standard_error": error}
        if self.per_layer:
            values |= {
                f"squared_gradient_norm/{layer or 'module'}": part for layer, part in layers.items()
            }
        return values

    # The end, checkpoints and processes

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._merged = SampleSums(self._table_of_all())
        if not self.history and self._problem is None:  # shorter than `every_n_steps`
            self._extra = self._measure(trainer, pl_module)
        super().on_train_end(trainer, pl_module)
        self.teardown(trainer, pl_module, "fit")

    def _report(self, trainer: Trainer) -> None:
        super()._report(trainer)
        samples = self.samples
        if not samples.seen.any():
            return
        try:
            figure = None
            if has_matplotlib():
                figure, _ = samples.plot(k=self.top_k)
            rows = samples.top(self.top_k)
            report(
                trainer.loggers,
                self._key("suspicious_samples"),
                figure,
                rows,
                trainer.global_step,
            )
        except Exception as error:
            self._failed(trainer, error)

    def on_exception(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        exception: BaseException,
    ) -> None:
        self.teardown(trainer, pl_module, "fit")

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._recorder = None
        self._trainer = None
        self._indices.detach()
        self._reset()

    def _forget(self) -> None:
        self._sums = SampleSums()
        self._merged = None

    def _table_of_all(self) -> Tensor:
        """Return the sums over all processes, which all have to ask for them, or those of this one after training."""
        table = (self._merged or self._sums).table
        if self._trainer is None or self._trainer.world_size == 1:
            return table
        size = table.shape[1]
        sizes = on_every_process(self._trainer, size)
        padded = torch.nn.functional.pad(table, (0, max(sizes) - size))
        return summed(self._trainer, padded).to(table)

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        state["samples"] = self._table_of_all().cpu()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._sums = SampleSums(state_dict["samples"].clone())
        self._merged = None
