"""Follow the loss and the gradient norm of each sample through a training, and find those that are hard to learn."""

import math
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from lightning_taskinfo._lightning import LightningModule, Trainer
from lightning_taskinfo._nested import Pair, sample_count
from lightning_taskinfo._ranges import check_choice
from lightning_taskinfo._warn import reason_of, warn
from lightning_taskinfo.callbacks.fisher_trace import by_layer
from lightning_taskinfo.callbacks.probe import Probe
from lightning_taskinfo.callbacks.source import (
    NotingSampler,
    Samples,
    on_every_process,
    summed,
)
from lightning_taskinfo.fisher.accumulators import TraceSums
from lightning_taskinfo.fisher.measure import squared_norms_by_name
from lightning_taskinfo.fisher.step_losses import StepLosses, losses_of
from lightning_taskinfo.plotting import Drawn, Given, plot_ranking

Score = Literal["loss", "squared_norm"]
Losses = Callable[[], tuple[Tensor, Tensor]]  # sums and counts of a step
LARGEST = 10**9  # number of a sample: memory grows with it
LISTED = 100  # samples in the table of the loggers
STEPS = 128  # whose losses are added up at once
NOT_READ = "the training step had no backward pass"
ONE_EACH = "`index_fn`, or the sampler of the loader, must give one number for each"
IN_ORDER = (
    "torch",
    "transformers",
    "lightning_taskinfo",
)  # whose collating functions keep the order


@dataclass(frozen=True)
class SampleScores:
    """The mean loss and squared gradient norm of each sample over the steps of a training.

    A sample with a large score was hard to learn: its label may be wrong, or it is unlike the
    others.

    Args:
        loss: Mean training loss, ``[N]``; NaN where it was not read.
        squared_norm: Mean squared gradient norm, ``[N]``; NaN where it was not read.
        seen: How often each sample was trained on, ``[N]``.
        rank_by: What ranks the samples.

    Example:
        >>> loss, norm = torch.tensor([0.1, 2.0, 0.5]), torch.tensor([1.0, 9.0, float("nan")])
        >>> scores = SampleScores(loss, norm, torch.tensor([3, 3, 3]), "loss")
        >>> print(scores)
         rank  index     loss  squared norm  seen
            1      1        2             9     3
            2      2      0.5           nan     3
            3      0      0.1             1     3
    """

    loss: Tensor
    squared_norm: Tensor
    seen: Tensor
    rank_by: Score

    @property
    def scores(self) -> Tensor:
        """What ranks the samples, ``[N]``; NaN for samples that were not seen."""
        return self.loss if self.rank_by == "loss" else self.squared_norm

    def ranking(self) -> Tensor:
        """Return the numbers of all samples that have a score, the most suspicious one first."""
        known = self.scores.isfinite().nonzero().flatten()
        return known[self.scores[known].argsort(descending=True, stable=True)]

    def top(self, k: int) -> list[dict[str, float]]:
        """Return the ``k`` most suspicious samples, a row each.

        Args:
            k: How many.
        """
        rows = []
        for rank, index in enumerate(self.ranking()[:k].tolist(), start=1):
            row = {"rank": rank, "index": index}
            for name in ("loss", "squared_norm", "seen"):
                row[name] = getattr(self, name)[index].item()
            rows.append(row)
        return rows

    def __str__(self) -> str:
        form = "{rank:>5}{index:>7}{loss:>9.4g}{squared_norm:>14.4g}{seen:>6}"
        rows = [form.format(**row) for row in self.top(10)]
        return "\n".join([" rank  index     loss  squared norm  seen", *rows])

    def plot(self, *, k: int = 50, ax: Given = None) -> Drawn:
        """Draw all scores, the largest first; needs matplotlib.

        Args:
            k: How many of the first are marked.
            ax: Draw here instead of in a new figure.
        """
        names = {"loss": "mean training loss (nats)", "squared_norm": "mean squared gradient norm"}
        ranked = self.scores[self.ranking()]
        return plot_ranking(ranked.tolist(), k=k, ylabel=names[self.rank_by], ax=ax)


class SampleSums:
    """Adds up losses and squared norms by the number of the sample, in memory that grows with the largest number.

    Args:
        table: Sums so far, as :attr:`table` has them.
    """

    def __init__(self, table: Tensor | None = None) -> None:
        self._table = torch.zeros(5, 0, device="cpu") if table is None else table
        self._waiting: list[tuple[list[int], Losses, Tensor]] = []

    def add(self, numbers: list[int], losses: Losses, norms: Tensor) -> None:
        """Add what a step has shown: several at once, since they take little longer than one.

        Args:
            numbers: Numbers of the samples.
            losses: Of all of them, as from :meth:`StepLosses.later`; what is not finite does not count.
            norms: Squared, of all of them; NaN where they were not read.
        """
        self._waiting.append((numbers, losses, norms))
        if len(self._waiting) == STEPS:
            self._add_waiting()

    @property
    def table(self) -> Tensor:
        """By row: sums of losses and squared norms, how many of each, and how often a sample was seen."""
        if self._waiting:
            self._add_waiting()
        return self._table

    def _add_waiting(self) -> None:
        steps, losses, norms = zip(*self._waiting, strict=True)
        self._waiting = []
        index = as_index([*chain.from_iterable(steps)]).to(self._table.device)
        missing = int(index.max()) + 1 - self._table.shape[1]
        if missing > 0:
            self._table = F.pad(self._table, (0, missing))
        values = self._table.new_empty(2, len(index))
        values[0] = losses_of([read() for read in losses])
        values[1] = torch.cat(norms)
        finite = values.isfinite()
        seen = finite.new_ones(1, len(index))
        added = torch.cat([torch.where(finite, values, 0), finite, seen])
        self._table.scatter_add_(1, index.expand_as(added), added)

    def scores(self, rank_by: Score) -> SampleScores:
        """Return the means over steps."""
        losses, norms, read, measured, seen = self.table.cpu()
        return SampleScores(losses / read, norms / measured, seen.long(), rank_by)


def as_index(numbers: Any) -> Tensor:
    """Return the numbers of samples as a tensor.

    Raises:
        ValueError: If they are not whole numbers in the range of a dataset.
    """
    try:
        index = torch.frombuffer(array("q", numbers), dtype=torch.long)  # fast
        if index.min() >= 0 and index.max() <= LARGEST:
            return index
    except (TypeError, ValueError, OverflowError):  # no whole numbers, none at all, or too large
        pass
    raise ValueError(f"{ONE_EACH} sample, from 0 to {LARGEST}, got {str(numbers)[:80]}.")


class HardSamples(Probe):
    r"""Find the samples that are hard to learn, such as those with a wrong label.

    The loss of each sample is read off the training step itself, in every step, with its dropout
    masks and precision. The squared norm of its gradient, by its own label, is measured after the
    steps whose values are logged, as by ``FisherTrace(labels="empirical")``: in eval mode, of the
    first ``max_samples`` samples of the batch. Both are averaged over the steps in which they were
    read. ``callback.samples`` ranks the samples, ``print`` shows the first of them, and the loggers
    get table and figure at the end of training. Samples are numbered as in the training loader's
    dataset: ``loader.dataset[index]``. The module and its batches stay as they are: the callback
    notes the numbers that the loader's sampler draws.

    Logged are ``sample_loss``, the mean loss of a batch's samples, and ``squared_gradient_norm``,
    the trace of the empirical Fisher information, with its standard error and its layers.

    Losses can be read for cross-entropy, binary cross-entropy and squared errors of torch, which
    Hugging Face models use, too; without weights of classes and label smoothing. What cannot be
    read is said at the first step.

    Args:
        rank_by: What ranks the samples: ``"loss"``, or ``"squared_norm"``, which is then measured
            after every step unless a schedule is given.
        norms: Whether gradient norms are measured. Without them the network is not run.
        max_samples: Norms of at most this many samples of a batch are measured, over all processes
            together.
        index_fn: Picks the numbers of the samples out of a batch; needed where the loader does not
            know them, as with an iterable dataset, or where ``collate_fn`` or a hook changes the
            order of samples.
        **probe: When to log, and how to read batches, see
            :class:`~lightning_taskinfo.callbacks.Probe`. Targets are what the loss sees, in its
            order. A training that is shorter than the schedule logs values at its end.

    Raises:
        ValueError: If an argument is out of its range.

    Example::

        callback = HardSamples()
        Trainer(callbacks=[callback]).fit(module, loader)
        print(callback.samples)  # the ten most suspicious samples
    """

    default_every_n_steps = 500
    ylabel = "mean squared gradient norm"
    _sums: SampleSums

    def __init__(
        self,
        *,
        rank_by: Score = "loss",
        norms: bool = True,
        max_samples: int = 64,
        index_fn: Callable[[Any], Any] | None = None,
        **probe: Any,
    ) -> None:
        check_choice(["loss", "squared_norm"], rank_by=rank_by)
        if rank_by == "squared_norm":
            if not norms:
                raise ValueError(f"`rank_by` must be 'loss' with `norms=False`, got {rank_by!r}.")
            self.default_every_n_steps = 1
        # One by one: configuration files find by this call which options are left.
        super().__init__(
            max_samples=max_samples,
            data="train_batch",
            labels="empirical",
            at_start=False,
            **probe,
        )
        self.rank_by: Score = rank_by
        self.norms = norms
        self.headline = ("squared_gradient_norm",) if norms else ("sample_loss",)
        self._index_fn = index_fn
        self._noting: list[Any] = []  # loaders whose samplers note what they draw

    @property
    def samples(self) -> SampleScores:
        """What is known of the samples; while several processes train, what this process has seen of them."""
        return self._sums.scores(self.rank_by)

    # Before the first step

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_fit_start(trainer, pl_module)
        if not pl_module.automatic_optimization:
            raise ValueError(
                f"{self.state_key} needs automatic optimization, got a module that does its own."
            )
        self._first_step = True
        self._numbers: Any = None  # of the samples, until they are added
        self._problem = NOT_READ  # empty if the step was read
        self._by_sample: Tensor | None = None  # squared norms, of the first ones of this step
        self._sharded &= self.norms  # otherwise the module is not called by us
        strategy: Any = trainer.strategy
        process = strategy.process_dataloader

        def process_and_note(loader: Any) -> Any:
            if draws_in_order(loader):
                vars(loader)["batch_sampler"] = NotingSampler(loader.batch_sampler)
                self._noting.append(loader)
            return process(loader)

        # Lightning calls it on every loader, before it is opened.
        strategy.process_dataloader = process_and_note

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        table = self._sums.table  # of a checkpoint or an earlier fit
        if trainer.global_rank:  # it counts once
            table = table[:, :0]
        self._sums = SampleSums(table.to(pl_module.device))
        self._no_norm = self._sums.table.new_full((1,), math.nan)
        self._drawn: list[Any] | None = None  # in this epoch,
        self._skipped: int | None = None  # from this batch on
        self._follow = True  # whether samples are known by number
        if self._index_fn is not None:
            return
        loader: Any = trainer.train_dataloader
        collate = getattr(loader, "collate_fn", None)
        home = str(getattr(collate, "__module__", ""))
        self._follow = isinstance(getattr(loader, "batch_sampler", None), NotingSampler)
        if not self._follow:
            problem = (
                "does not know which samples a batch holds, and ranks none: the training loader must be one DataLoader "
                f"that makes batches of an indexed dataset and keeps their order, got {type(loader).__name__}"
            )
        elif home.partition(".")[0] not in IN_ORDER:
            name = getattr(collate, "__qualname__", type(collate).__qualname__)
            problem = f"takes the samples of a batch in the order in which {name!r} gets them, which may change it"
        else:
            return
        warn(
            f"{self.state_key} {problem}; set `index_fn` to a function of the batch that returns their numbers."
        )

    def _begin(self) -> None:
        if self.norms:
            super()._begin()

    def on_train_epoch_start(self, *_: Any) -> None:
        self._drawn, self._skipped = None, 0

    # The training step

    def on_train_batch_start(self, *step: Any) -> None:
        super().on_train_batch_start(*step)
        self._problem = NOT_READ

    def on_before_backward(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        loss: Tensor,
    ) -> None:
        try:
            self._read(loss)
            self._problem = ""
        except Exception as error:
            if self._first_step:
                raise
            self._problem = reason_of(error)  # which leaves a gap
        self._first_step = False

    def _read(self, loss: Tensor) -> None:
        """Read the losses and the numbers of the samples."""
        pair = self._batch
        # As most batches are: reading them like the others takes a tenth of the time.
        is_plain = type(pair) is list and [*map(type, pair)] == [Tensor, Tensor]
        if self.reader.batch_fn or not is_plain:
            pair = self.reader.read(None, pair)
        inputs, targets = pair
        size = sample_count(inputs)
        if self._follow:
            self._numbers = self._numbers_of(size)
        losses = StepLosses(loss, size, targets)
        self._losses: Any = losses.later()
        if self._first_step and losses.problem and self.rank_by == "loss":
            raise ValueError(
                f"{self.state_key} cannot read the losses of samples: {losses.problem}. Set `batch_fn` to a "
                "function of the batch that returns inputs and the targets of the loss, or rank_by='squared_norm'."
            )

    def _numbers_of(self, size: int) -> Any:
        """Return the numbers of the samples in the batch."""
        if self._index_fn is not None:
            numbers = self._index_fn(self._batch)
            if isinstance(numbers, Tensor):
                numbers = numbers.tolist()
            as_index(numbers)  # or say so
        else:
            batch_idx = self._trainer.fit_loop.batch_idx
            if self._drawn is None:
                self._drawn = self._trainer.train_dataloader.batch_sampler.drawn
            if self._skipped is None:  # a training that is resumed within an epoch
                self._skipped = batch_idx
            numbers = self._drawn[batch_idx - self._skipped]
            if self._first_step:
                as_index(numbers)  # or say so
        if len(numbers) != size:
            raise ValueError(f"{ONE_EACH} of {size} samples, got {len(numbers)}.")
        return numbers

    def on_train_batch_end(self, *step: Any) -> None:
        super().on_train_batch_end(*step)  # which may measure norms
        by_sample, self._by_sample = self._by_sample, None
        # Once: Lightning also ends batches that it has not begun.
        numbers, self._numbers = self._numbers, None
        if numbers is None or self._problem:
            return
        norms = self._no_norm.expand(len(numbers))
        if by_sample is not None:
            norms = norms.clone()
            norms[: len(by_sample)] = by_sample
        self._sums.add(numbers, self._losses, norms)

    # What is logged

    def _pair(self, model: nn.Module) -> Pair:
        if self.norms:
            return super()._pair(model)
        return torch.empty(0, device="cpu"), None  # the model is not run

    def observe(self, model: nn.Module, samples: Samples) -> tuple[list[str], list[float]]:
        """Return the names of parameters, and sums over samples: of squared norms, and of losses."""
        if self._problem:
            raise RuntimeError(self._problem)
        losses = losses_of([self._losses()])
        losses = losses[losses.isfinite()]
        of_losses = [losses.double().sum().item(), len(losses)]
        if not self.norms:
            return [], of_losses
        norms = squared_norms_by_name(model, samples.inputs, samples.targets, samples.asked)
        norms = {name: part[: samples.counted] for name, part in norms.items()}
        self._by_sample = torch.stack([*norms.values()]).sum(0)
        names, of_norms = TraceSums.of(norms)
        return names, [*of_norms, *of_losses]

    def summarise(
        self, observed: tuple[list[str], list[float]], samples: Samples
    ) -> dict[str, float]:
        names, sums = observed
        *of_norms, loss, count = samples.summed(sums).tolist()
        values = {"sample_loss": loss / count if count else math.nan}
        if of_norms:
            values |= by_layer(self, "squared_gradient_norm", TraceSums(names, of_norms))
        return values

    # The end, checkpoints and processes

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._sums = SampleSums(self._table_of_all())
        if not (self.history or self._problem):  # shorter than `every_n_steps`
            self._extra = self._measure()
        super().on_train_end(trainer, pl_module)

    def _report(self) -> None:
        super()._report()
        samples = self.samples
        if samples.seen.any():
            plot = partial(samples.plot, k=LISTED)
            self._log_rows("suspicious_samples", samples.top(LISTED), plot)

    def teardown(self, trainer: Trainer, *_: Any, **stage: Any) -> None:
        self._trainer = self._drawn = self._losses = None
        vars(trainer.strategy).pop("process_dataloader", None)
        for loader in self._noting:
            if isinstance(loader.batch_sampler, NotingSampler):
                vars(loader)["batch_sampler"] = loader.batch_sampler.noted
        self._noting = []

    on_exception = teardown

    def _forget(self) -> None:
        self._sums = SampleSums()

    def _table_of_all(self) -> Tensor:
        """Return the sums over all processes, which all have to ask for them, or those of this one after training."""
        table = self._sums.table
        if self._trainer is None or self._trainer.world_size == 1:
            return table
        size = table.shape[1]
        sizes = on_every_process(self._trainer, size)
        padded = torch.nn.functional.pad(table, (0, max(sizes) - size))
        return summed(self._trainer, padded).to(table)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "samples": self._table_of_all().cpu()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._sums = SampleSums(state_dict["samples"].clone())


def draws_in_order(loader: Any) -> bool:
    """Whether a loader's sampler, which does not note them yet, draws the numbers of its batches in their order."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return False
    in_order = not loader.num_workers or getattr(loader, "in_order", True)
    return in_order and not isinstance(loader.batch_sampler, NotingSampler | None)
