"""What every measuring callback shares: when it looks, on which processes, and to which loggers it speaks.

The way of one measurement::

    Lightning calls on_train_batch_end ─ due? ─ _measure, which enters `observing`
        Source.read       inputs and targets of this process            source.py
        observe           numbers of this process                       the quantity's own file, the Fisher engine
        (all processes say whether they succeeded, before any of them waits for another)
        summarise         numbers of all processes, with their names    the quantity's own file
    history, loggers, callback_metrics
"""

import copy
import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any, Literal
from weakref import ref

import torch
from torch import Tensor, nn

from lightning_taskinfo._batches import Reader
from lightning_taskinfo._lightning import Callback, LightningModule, Trainer
from lightning_taskinfo._nested import Pair, filled_up, size
from lightning_taskinfo._observe import layer_of, observing, trainable_parameters
from lightning_taskinfo._ranges import (
    check_choice,
    check_counts,
    check_finite_tensors,
    check_not_negative,
    check_seed,
)
from lightning_taskinfo._sharded import resharding
from lightning_taskinfo._wandb import PREFIX
from lightning_taskinfo._warn import warn
from lightning_taskinfo.callbacks import checks, report
from lightning_taskinfo.callbacks.source import Samples, Source, on_every_process
from lightning_taskinfo.fisher.measure import Request
from lightning_taskinfo.functional.likelihood import (
    Categorical,
    Labels,
    Likelihood,
    as_likelihood,
    look_like_probabilities,
)
from lightning_taskinfo.plotting import Drawn, Given, plot_curves

KEPT_ROWS = 256  # of the history, in a checkpoint


class Probe(Callback, ABC):
    """Measure scalars while a network trains, and change nothing.

    A probe runs the model in eval mode, draws from its own generators and touches neither ``.grad``
    nor the data loader, so that a run ends with the same bits with and without it.

    Each measurement goes to every logger at once, whatever ``log_every_n_steps`` is, and without
    its layers into ``trainer.callback_metrics``, where checkpointing and early stopping find it.
    Names begin with ``taskinfo/`` in both places; in the attribute ``history`` they do not. The
    run's configuration gets the settings of the callback. At the end of training the loggers get a
    figure, a table and a summary. A measurement that fails leaves a gap, and one warning.

    The same object in a second ``fit`` of the same module goes on with its history, and with the
    weights it has taken for the start; a training of its own has a callback of its own. A
    checkpoint keeps a long history thinned, with its extremes.

    Args:
        every_n_steps: Optimizer steps between two measurements.
        every_n_epochs: Epochs between two measurements, each after the last batch of an epoch. With
            neither of the two, the class decides.
        at_start: Whether to measure before the first step of a training, too. Where it is not given
            the class decides; what is measured at the end of training alone has no start.
        max_samples: At most this many samples are measured, over all processes together.
        data: ``"train_batch"`` looks at the batch just trained on; ``"train"`` and ``"val"`` at a
            fixed subset, chosen by ``seed``, that is read once at the start, from a copy of a
            dataset of your own, and kept in memory. Where the training set cannot be copied or indexed, or a
            sampler of your own leaves parts of it out, the subset is collected from the first
            training batches, and measurements begin when it is full.
        labels: Whose labels: ``"sampled"`` from the model, ``"exact"`` expectation over them, or
            the dataset's (``"empirical"``, which is not the Fisher).
        likelihood: What the outputs mean: ``"categorical"``, ``"bernoulli"`` or ``"gaussian"``, or
            an object.
        mc_samples: Number of labels drawn for each sample, for ``labels="sampled"``.
        per_layer: Whether to measure a value for each layer as well; the table at the end has all
            of them.
        max_layers: At most this many layers are logged as series, spread evenly from the first to
            the last.
        name: Prefix of the logged names, and identity in checkpoints; give two probes of one class
            different names.
        seed: Seed of the probe's own draws and of its subset.
        batch_fn: Picks ``(inputs, targets)`` out of a batch, targets where the outputs predict
            them; needed where the batch does not say it plainly. Batches of Hugging Face do.
        forward_fn: How to get the outputs, ``forward_fn(module, inputs)``; found out by default.
        group_fn: The layer that a parameter counts for, by its name in ``named_parameters()``. By
            default that is the module that owns it; all parts of an adapter (LoRA's A and B) count
            for the layer that it adapts.

    Raises:
        ValueError: If an argument is out of its range.

    Example::

        class Confidence(Probe):  # a quantity of your own, on any number of processes
            default_every_n_steps = 50
            headline = ("confidence",)

            def observe(self, model, samples):  # a process may have no samples
                chances = (outputs.softmax(-1).amax(-1) for outputs in samples.outputs(model))
                return sum(part.sum().item() for part in chances)

            def summarise(self, observed, samples):
                total = samples.summed([observed]).item()
                return {"confidence": total / samples.total}
    """

    default_every_n_steps: int | None = None
    default_every_n_epochs: int | None = None
    default_at_start = True
    ylabel = ""
    split_over_ranks = True  # otherwise every process measures all samples
    needs_plain_weights = False  # without noise of their own
    needs_whole_weights = ""  # what for, if it cannot work with sharded ones

    headline: tuple[str, ...]  # what the figure shows and the summary holds

    def __init__(
        self,
        *,
        every_n_steps: int | None = None,
        every_n_epochs: int | None = None,
        at_start: bool | None = None,
        max_samples: int = 128,
        data: Literal["train_batch", "train", "val"] = "train_batch",
        labels: Labels = "sampled",
        likelihood: str | Likelihood = "categorical",
        mc_samples: int = 1,
        per_layer: bool = True,
        max_layers: int = 8,
        name: str | None = None,
        seed: int = 0,
        batch_fn: Callable[[Any], Any] | None = None,
        forward_fn: Callable[[Any, Any], Any] | None = None,
        group_fn: Callable[[str], str] | None = None,
    ) -> None:
        check_counts(
            every_n_steps=every_n_steps, every_n_epochs=every_n_epochs, max_samples=max_samples
        )
        if every_n_steps and every_n_epochs:
            raise ValueError(
                f"`every_n_epochs` must be left out beside `every_n_steps`, got {every_n_epochs}."
            )
        check_not_negative(max_layers=max_layers)
        check_seed(seed)
        check_choice(["train_batch", "train", "val"], data=data)
        self._asked = Request(labels, likelihood, mc_samples, forward_fn=forward_fn)
        if not (every_n_steps or every_n_epochs):
            every_n_steps, every_n_epochs = self.default_every_n_steps, self.default_every_n_epochs
        self.every_n_steps = every_n_steps
        self.every_n_epochs = every_n_epochs
        if at_start is None:
            at_start = self.default_at_start and bool(every_n_steps or every_n_epochs)
        self.at_start = at_start
        self.max_samples = max_samples
        self.data = data
        self.labels = labels
        self.likelihood = likelihood
        self.mc_samples = mc_samples
        self.per_layer = per_layer
        self.max_layers = max_layers
        self.name = name
        self.seed = seed
        self.forward_fn = forward_fn
        self.reader = Reader(batch_fn, forward_fn)
        self.group_fn = group_fn or layer_of
        self.history: list[dict[str, float]] = []
        self._trainer: Any = None  # while it trains
        self._extra = False  # whether the last measurement was made because a fit ended,
        self._resumed_extra = False  # in the run that is resumed
        self._module: ref[LightningModule] | None = None  # of the last fit
        self._forget()

    @abstractmethod
    def observe(self, model: nn.Module, samples: Samples) -> Any:
        """Measure this process's samples; called in eval mode with autograd on. No process may wait for another."""

    @abstractmethod
    def summarise(self, observed: Any, samples: Samples) -> Mapping[str, float]:
        """Return the scalars to log from what was observed, the same on every process; may sum over processes."""

    def plot(self, *, ax: Given = None) -> Drawn:
        """Draw the history; needs matplotlib.

        Args:
            ax: Draw here instead of in a new figure.
        """
        names = [name for name in self.headline if report.is_known(self.history, name)]
        return plot_curves(self.history, names, ylabel=self.ylabel, ax=ax)

    # When

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._trainer = trainer
        self._batch: Any = None  # the last one
        self._first_losses: list[float] = []  # until the first batch was trained on
        self._warned = False  # of a measurement that failed
        self._sharded = checks.check_module(self, trainer, pl_module)
        if self._module is not None and self._module() is not pl_module:
            warn(
                f"{self.state_key} was used for another module before: its history goes on with this one. "
                "Give each training a callback of its own.",
            )
            self._forget()
        self._module = ref(pl_module)

    def _forget(self) -> None:
        """Begin anew, without what belongs to the module of an earlier fit."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._resumed_extra:
            self.history.pop()  # measured only because the first part of the run had ended
        self._resumed_extra = self._extra = False
        self._last_step = trainer.global_step  # after the last batch
        self._measured_at = -1  # the last measurement of this fit
        self._source: Any = Source(
            trainer, self.data, self.max_samples, self.seed, self.reader, self.split_over_ranks
        )
        with observing(pl_module):  # a logger may begin its run here
            self._source.open()
            report.log_settings(self._loggers(), self.state_key, self._settings())

    def _begin(self) -> None:
        """Refuse samples that cannot be measured, compare losses, and measure, all before the first step."""
        trainer = self._trainer
        model = trainer.lightning_module
        with observing(model):
            inputs, targets = self._source.pool or self.reader.read(model, self._batch)
            if not isinstance(inputs, Tensor) or len(inputs):  # otherwise others have the samples
                with resharding(model):
                    checks.check_samples(self, model, inputs, targets)
        compared = [  # once for all that read batches in one way
            (other.reader, other.likelihood)
            for other in trainer.callbacks
            if getattr(other, "_first_losses", None)
        ]
        if (self.reader, self.likelihood) not in compared and not self._sharded:
            self._first_losses = checks.first_losses(self, model)
        if self.at_start and trainer.global_step == 0:
            self._measure()

    def _check_outputs(self, outputs: Tensor, targets: Tensor | None) -> None:
        """Refuse outputs of the first samples that are not what the quantity needs; warn of probabilities."""
        likelihood = as_likelihood(self.likelihood)
        likelihood.check(outputs, targets)
        if isinstance(likelihood, Categorical) and look_like_probabilities(outputs):
            warn(
                f"{self.state_key} takes outputs for logits, and those of the first samples are probabilities: set "
                "`forward_fn`, e.g. to lambda module, inputs: module(inputs).log()."
            )

    def on_train_batch_start(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        batch: Any,
        *_: Any,
    ) -> None:
        is_first = self._batch is None
        # As the training step gets it: one that pops the labels takes them out of its own dict.
        self._batch = copy.copy(batch) if hasattr(batch, "keys") else batch
        if is_first:
            self._begin()

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        *_: Any,
    ) -> None:
        if self._first_losses:
            checks.compare_losses(self, outputs)
            self._first_losses = []
        if self._source.missing:
            self._tried(self._source.collect, self._batch, trainer.is_last_batch)
        if self._due(trainer):
            self._measure()

    def _due(self, trainer: Trainer) -> bool:
        if every := self.every_n_steps:
            last, self._last_step = self._last_step, trainer.global_step
            return self._last_step // every != last // every
        every = self.every_n_epochs  # first: this is asked at every batch, and looking up counts
        if not every or not trainer.is_last_batch:
            return False
        return (trainer.current_epoch + 1) % every == 0

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        steps = trainer.global_step
        if self.data != "train_batch" and self._measured_at != steps:
            self._extra = self._measure()
        if self.history:
            with observing(pl_module):
                self._tried(self._report)
        beyond_start = any(row["step"] for row in self.history)
        if steps and not (beyond_start or self._warned or self._trainer.fast_dev_run):
            warn(
                f"{self.state_key} has measured nothing during training, which ended after {steps} steps, with "
                f"`every_n_steps={self.every_n_steps}`, `every_n_epochs={self.every_n_epochs}` and "
                f"`max_samples={self.max_samples}`: set one of the first two, or less."
            )
        self._trainer = self._source = self._batch = None

    # One measurement

    def _measure(self) -> bool:
        """Measure, keep and log; return whether it succeeded."""
        model = self._trainer.lightning_module
        with observing(model):
            values = self._values(model)
        if values is None:
            if not self._source.missing:
                self._failed(RuntimeError("another process failed, or has too few samples yet"))
            return False
        step = self._measured_at = self._trainer.global_step
        self.history.append({"step": step, **values})
        totals, layers = parted(values)
        if len(layers) > self.max_layers:
            every = [*layers.items()]
            layers = dict(every[i] for i in report.spread(len(every), self.max_layers))
        series = self._logged(totals | layers)
        for logger in self._trainer.loggers:
            logger.log_metrics(series, step=step)
        # Into the dict that checkpointing and early stopping read: `log_dict` would do the same, and
        # take as long as a part of the measurement.
        unknown = dict.fromkeys(self.headline, math.nan)
        for key, value in self._logged(unknown | totals).items():
            self._trainer.callback_metrics[key] = torch.tensor(value, device="cpu")
        return True

    def _values(self, model: nn.Module) -> Mapping[str, float] | None:
        """Measure on every process; None where any has failed, of which all know before one waits for another."""
        part = None
        # As long as samples are collected, there is nothing to fail with.
        pair: Any = None if self._source.missing else self._tried(self._pair, model)
        sizes = on_every_process(self._trainer, -1 if pair is None else size(pair[0]))
        if min(sizes) >= 0:
            part = self._tried(self._observed, model, sizes, *pair)
        together = self._trainer.strategy.reduce_boolean_decision(part is not None)
        if part is None or not together:
            return None
        return self._tried(self.summarise, *part)

    def _tried(self, work: Callable[..., Any], *arguments: Any) -> Any:
        """Return what something returns; None and a warning where it fails."""
        try:
            return work(*arguments)
        except Exception as error:
            self._failed(error)
            return None

    def _failed(self, error: Exception) -> None:
        if not self._warned:
            warn(
                f"{self.state_key} could not measure at step {self._trainer.global_step} ({type(error).__name__}: "
                f"{error}); training goes on, and the same is not reported again.",
            )
        self._warned = True

    def _pair(self, model: nn.Module) -> Pair:
        check_finite(model)
        inputs, targets = self._source.read(self._batch)
        size(inputs)  # or fail here, before other processes wait
        return inputs, targets

    def _observed(
        self,
        model: nn.Module,
        sizes: list[int],
        inputs: Any,
        targets: Tensor | None,
    ) -> tuple[Any, Samples]:
        rank = self._trainer.global_rank
        first, total = 0, sizes[rank]
        if self.split_over_ranks:
            first, total = sum(sizes[:rank]), sum(sizes)
        if self._sharded:  # whose weights are gathered by all processes together
            if min(sizes) == 0:
                raise ValueError(f"sharded weights need a sample on every process, got {sizes}")
            inputs, targets = filled_up(inputs, targets, max(sizes))
        samples = Samples(
            inputs,
            targets,
            counted=sizes[rank],
            first=first,
            total=total,
            seed=hash((self.seed, self._trainer.global_step)),
            asked=self._asked,
            trainer=self._trainer,
        )
        with resharding(model):
            return self.observe(model, samples), samples

    # Loggers

    def _loggers(self) -> list[Any]:
        """Return who gets figures, tables and settings: nobody from other processes, or in a trial run."""
        hidden = self._trainer.fast_dev_run or not self._trainer.is_global_zero
        return [] if hidden else self._trainer.loggers

    def _report(self) -> None:
        """Give figure, table and summary to the loggers at the end of training."""
        name = self.headline[0]
        has_points = any(report.is_known(self.history, name) for name in self.headline)
        self._log_rows(name, self.history, self.plot if has_points else None)
        ends = self._logged(report.summary(self.history, self.headline))
        step = self._trainer.global_step
        report.log_summary(self._loggers(), self._key(name), ends, step)

    def _log_rows(self, name: str, rows: report.Rows, plot: Callable[[], Any] | None) -> None:
        """Give a table, and its figure if there is one and matplotlib, to the loggers."""
        loggers = self._loggers()
        figure = None
        if loggers and plot and find_spec("matplotlib"):  # drawing takes a while
            figure, _ = plot()
        for logger in loggers:
            key = self._key(f"{name}_table")
            report.log_table(logger, key, rows, self._trainer.global_step, figure)

    def _settings(self) -> dict[str, Any]:
        """Return the arguments that this callback was made with, and its defaults for the others."""
        return {
            name: getattr(self, name)
            for base in type(self).__mro__
            for name in inspect.signature(base).parameters
            if hasattr(self, name)
        }

    def _key(self, name: str) -> str:
        return f"{PREFIX}/{self.name}/{name}" if self.name else f"{PREFIX}/{name}"

    def _logged(self, values: Mapping[str, float]) -> dict[str, float]:
        return {self._key(name): value for name, value in values.items()}

    # Checkpoints

    @property
    def state_key(self) -> str:  # the schedule is no part of it: a resumed run may change it
        return f"{type(self).__qualname__}({self.name})" if self.name else type(self).__qualname__

    def __getstate__(self) -> dict[str, Any]:  # for other processes, which know them elsewhere
        return {**self.__dict__, "_module": None, "_trainer": None}

    def state_dict(self) -> dict[str, Any]:
        history = report.thinned(self.history, self.headline, KEPT_ROWS)
        return {"history": history, "extra": self._extra}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.history = list(state_dict["history"])
        self._extra = self._resumed_extra = state_dict["extra"]
        self._module = None


def parted(row: Mapping[str, float]) -> tuple[report.Row, report.Row]:
    """Return a measurement without its layers, and the layers: parts of another value that are named behind it.

    Example:
        >>> parted({"nats": 3.0, "nats/net.0": 1.0, "nats_at/0.5": 2.0})
        ({'nats': 3.0, 'nats_at/0.5': 2.0}, {'nats/net.0': 1.0})
    """
    totals, layers = {}, {}
    for name, value in row.items():
        whole, _, _ = name.rpartition("/")
        if whole in row:
            layers[name] = value
        else:
            totals[name] = value
    return totals, layers


def check_finite(model: nn.Module) -> None:
    """Raise a ``ValueError`` if a trainable weight is NaN or infinite."""
    weights = {
        name: getattr(p, "to_local", p.detach)().detach()
        for name, p in trainable_parameters(model).items()
    }
    sums = torch.stack([w.sum() for w in weights.values()])
    if not bool(sums.isfinite().all()):  # first: this runs at every measurement
        check_finite_tensors("weights", weights)
