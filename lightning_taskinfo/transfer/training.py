"""One training of a transfer: any process can run it, or go on where another was killed, with the same numbers."""

import hashlib
import logging
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Literal, get_args

from torch import Tensor, nn

from lightning_taskinfo import _files
from lightning_taskinfo._lightning import DEFAULT, NAMESPACES, Callback, LightningModule, Trainer
from lightning_taskinfo._observe import trainable_parameters
from lightning_taskinfo._ranges import check_choice
from lightning_taskinfo._wandb import ours
from lightning_taskinfo._warn import first_line
from lightning_taskinfo.regularizers import Regularizer
from lightning_taskinfo.transfer.sampling import check_different, generators_kept, reseed
from lightning_taskinfo.transfer.starts import Adapt, Start, adapted, way_name

Stage = Literal["pretrain", "scratch", "fine_tune"]
LoggerKind = Literal["none", "wandb", "wandb_offline"]
Row = dict[str, float]
Values = dict[str, Any]
After = Callable[[Row], tuple[Values, Values]]
SCRATCH = "scratch"
ADVICE = "Delete it to train that stage again."
SILENT = {
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


@dataclass(frozen=True)
class Job:
    """A module at its start, ready to be trained.

    Attributes:
        module: The module.
        seeds: What all randomness is drawn from, together with the epoch.
        fit: What the Trainer's ``fit`` is called with: a data module or loaders.
        test: What its ``test`` is called with; ``None`` for no test.
        options: Of the Trainer.
        weights: Returns what is kept of the trained module.
        after: Takes the metrics of the test and returns what is found after training, under names
            of :class:`~lightning_taskinfo.transfer.report.Result`, and what is logged of it.
        before: What is logged before training.
    """

    module: Any
    seeds: tuple[int, ...]
    fit: Values
    test: Values | None
    options: Values
    weights: Callable[[], dict[str, Tensor]]
    after: After
    before: Values


class Recipe:
    """What is trained, and how: the user's own module from their starts, or ready parts from starts that are made here.

    Attributes:
        title: What to call the transfer.
        namespace: Whose modules they are.
        configuration: What decides the numbers.
        starts: Starts by name, scratch among them.
        pretrained: By start, what to call the pretraining that makes its weights.
        labels: Numbers of labels.
        seeds: The seeds.
        seconds: Estimate of the time of a training, if there is one.
        origins: Where the weights of each start of the user's come from, in words.
        learned: By the identity of the function that makes a module, what its way to learn is known by.
    """

    title: str
    namespace: str
    configuration: Values
    starts: dict[str, Start]
    pretrained: Mapping[str, str]
    labels: Sequence[int]
    seeds: Sequence[int]
    seconds: float | None = None
    origins: Mapping[str, str]
    learned: dict[int, Values]

    def take_ways(self, adapt: Sequence[Adapt] | str) -> None:
        """Try every way to adapt on every start; keep the ways by name, and what each trains.

        Raises:
            ValueError: If there is no such way, or it leaves nothing to train.
        """
        ways = [adapt] if isinstance(adapt, str) else adapt
        names = [way_name(way) for way in ways]
        check_different("adapt", names)
        self.ways = dict(zip(names, ways, strict=True))
        self.trained = {}
        for (name, start), way in product(self.starts.items(), self.ways):
            if name != SCRATCH:
                module = self.adapted(start.module(0), name, way)
                self.trained[name, way] = [*trainable_parameters(module)]

    def adapted(self, module: Any, start: str, way: str) -> Any:
        """Leave trainable what is trained of a module at its start; all of it from scratch.

        The head is the last layer, and whatever else has no pretrained weights.
        """
        if start == SCRATCH:
            return module
        known = self.starts[start]
        return adapted(module, self.ways[way], {*known.fresh, *known.last})

    def trials(self, root: Path, log: "RunLog") -> list["Trial"]:
        """Return all trainings, each after the one that it needs: scratch in full, starts in every way."""
        make = partial(Trial, self, root, log)
        pairs = [(SCRATCH, "full"), *self.trained]
        found: dict[str, Trial] = {}
        for seed, labels, (start, way) in product(self.seeds, self.labels, pairs):
            needs = None
            scratch = start == SCRATCH
            if start in self.pretrained:  # starts that are pretrained alike share it
                made = self.pretrained[start]
                name = f"pretrain-{made}-seed{seed}"
                needs = found.setdefault(name, make(name, "pretrain", made, labels, seed, made))
            name = f"{start}-{way}-{labels}-seed{seed}"
            stage: Stage = "scratch" if scratch else "fine_tune"
            method = start if scratch or len(self.ways) == 1 else f"{start}, {way}"
            found[name] = make(name, stage, method, labels, seed, start, way, needs)
        return [*found.values()]

    def job(self, trial: "Trial") -> Job:
        """Return what a training trains."""
        raise NotImplementedError

    def store(self, root: Path) -> None:
        """Write the weights of the starts, which may be added but not changed; trainings read them there."""
        for name, start in self.starts.items():
            path = root / "starts" / name / "weights.pt"
            with generators_kept():
                known = {"weights": start.digest(), **self.learned.get(id(start.make), {})}
                _files.claim_folder(path.parent, known)
            if start.weights:
                if not path.exists():
                    _files.write_tensors(path, start.weights)
                self.starts[name] = replace(start, weights=path)
        for (name, way), trained in self.trained.items():
            folder = root / "starts" / name / f"adapted-{way}"
            _files.claim_folder(folder, {"trained": ", ".join(trained)})


@dataclass(frozen=True)
class RunLog:
    """Which logger the runs of an experiment have.

    Args:
        kind: ``"none"``; ``"wandb"`` or ``"wandb_offline"`` for a run of Weights & Biases each, all
            in one group.
        project: Project in Weights & Biases.
        group: Group of the experiment there.
        folder: Where files go.
        namespace: Lightning's.

    Raises:
        ValueError: If ``kind`` is unknown.
    """

    kind: LoggerKind = "none"
    project: str = "lightning-taskinfo"
    group: str = "transfer"
    folder: Path = Path("runs")
    namespace: str = DEFAULT

    def __post_init__(self) -> None:
        check_choice(get_args(LoggerKind), logger=self.kind)

    @contextmanager
    def run(self, name: str, settings: Values) -> Iterator[Any]:
        """Open the logger of a run, if it has one, and close it, whatever happens.

        Args:
            name: Name of the run; the same when a killed one is continued.
            settings: What it is run with.
        """
        if self.kind == "none":
            yield None
            return
        import wandb

        _files.make_folder(self.folder)
        whole = f"{self.folder.absolute()}/{self.group}/{name}"
        run = wandb.init(  # not by Lightning, whose call W&B answers with a warning about an old argument
            name=name,
            dir=self.folder,
            project=self.project,
            group=self.group,
            id=hashlib.sha256(whole.encode()).hexdigest()[:12],
            resume="allow",
            mode="offline" if self.kind == "wandb_offline" else None,
            config=settings,
            reinit="create_new",
            settings=wandb.Settings(silent=True, console="off"),  # many runs share one terminal
        )
        run.define_metric("trainer/global_step")  # as Lightning does
        run.define_metric("*", step_metric="trainer/global_step", step_sync=True)
        logger = NAMESPACES[self.namespace].loggers.WandbLogger(
            name=name, save_dir=self.folder, project=self.project, experiment=run
        )
        try:
            yield logger
        finally:
            run.finish()


def log_numbers(
    logger: Any,
    values: Values,
    step: int | None = None,
) -> None:
    """Log numbers, nested dicts with ``/`` between the names; what is no number is left out.

    Args:
        logger: A logger of Weights & Biases, or ``None``.
        values: Numbers and dicts by name.
        step: The optimizer step they belong to; the last one by default.
    """
    if logger is not None and (numbers := flatten(values)):
        logger.log_metrics({ours(key): value for key, value in numbers.items()}, step)


def flatten(values: Values, prefix: str = "") -> Row:
    """Return the numbers of nested dicts under joined names.

    Example:
        >>> flatten({"before": {"total": 1.0, "layers": {"head": 1.0}}, "overlap": None})
        {'before/total': 1.0, 'before/layers/head': 1.0}
    """
    found: Row = {}
    for key, value in values.items():
        if isinstance(value, dict):
            found |= flatten(value, f"{prefix}{key}/")
        elif isinstance(value, int | float):
            found[f"{prefix}{key}"] = float(value)
    return found


@dataclass(frozen=True)
class Trial:
    """One training.

    Attributes:
        recipe: Knows what is trained.
        root: The folder of the transfer.
        log: Where metrics go.
        name: A name that is good for a file.
        stage: ``"pretrain"``, ``"scratch"`` or ``"fine_tune"``.
        method: What the report calls it.
        labels: Number of target labels.
        seed: The seed.
        start: Name of the start.
        way: Name of the way to adapt.
        needs: The pretraining whose weights it starts from.
    """

    recipe: Recipe
    root: Path
    log: RunLog
    name: str
    stage: Stage
    method: str
    labels: int
    seed: int
    start: str = SCRATCH
    way: str = "full"
    needs: "Trial | None" = None

    @property
    def description(self) -> str:
        """What it is, in words."""
        if self.stage == "pretrain":
            return f"pretrain {self.start}, seed {self.seed}"
        return f"{self.method}, {self.labels} labels, seed {self.seed}"

    @property
    def folder(self) -> Path:
        """Where its files are."""
        return self.root / "stages" / self.name

    @property
    def weights(self) -> Path:
        """The file of its trained weights."""
        return self.folder / "weights.pt"

    @property
    def result(self) -> Path:
        """The file with its result."""
        return self.root / "results" / f"{self.name}.json"

    def run(self) -> Values:
        """Train, test, and return the result in JSON-like values; files of a killed run are continued from.

        The global generators, which are the user's where this is the user's process, stay as they
        were.
        """
        begun = time.perf_counter()
        settings = {name: getattr(self, name) for name in ("method", "labels", "seed", "start")}
        earlier: Values = {"curves": [], "seconds": {}}
        if self.needs:
            earlier = _files.read_result(self.needs.result)
        with generators_kept():
            job = self.recipe.job(self)
            with self.log.run(self.name, {**settings, "adapt": self.way}) as logger:
                log_numbers(logger, job.before, step=0)
                curve, test = fit_stage(job, self.folder, self.recipe.namespace, logger)
                found, logged = job.after(test)
                tested = "source" if self.stage == "pretrain" else "target"
                log_numbers(logger, {tested: found["test"], **logged})
            _files.write_tensors(self.weights, job.weights())
        epochs = [{"stage": self.stage, **row} for row in curve]
        return {
            **found,
            "source": earlier.get("test"),
            "curves": [*earlier["curves"], *epochs],
            "seconds": {**earlier["seconds"], self.stage: time.perf_counter() - begun},
        }


class EpochWriter(Callback):
    """Writes a checkpoint between epochs; the first of the callbacks.

    All of an epoch is done by then, schedulers of the learning rate too, and nothing of the next one.
    Writing takes at most a twentieth of the time: after a slow write, epochs go by until the next.

    Args:
        path: Of the checkpoint.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._next_write = 0.0
        self._trained = False

    def on_train_epoch_start(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
    ) -> None:
        """Write what the epoch before has left, unless this is the first of the run."""
        self._trained = True
        if trainer.current_epoch and time.monotonic() >= self._next_write:
            self._write(trainer)

    def on_fit_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
    ) -> None:
        """Write what is tested: averages of weights take their place at the end of training."""
        if self._trained:  # otherwise it stands there already
            self._write(trainer)

    def on_load_checkpoint(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        checkpoint: Values,
    ) -> None:
        """Put weights back that were never trained: callbacks that average weights look for all of them."""
        checkpoint["state_dict"] = {**pl_module.state_dict(), **checkpoint["state_dict"]}

    def _write(self, trainer: Trainer) -> None:
        begun = time.monotonic()
        save_checkpoint(trainer, self.path)
        ended = time.monotonic()
        self._next_write = ended + 20 * (ended - begun)

    def on_save_checkpoint(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        checkpoint: Values,
    ) -> None:
        """Let the loops stand between epochs: a run that is given `max_steps` would repeat the last one otherwise."""
        loops = checkpoint["loops"]["fit_loop"]
        for progress in loops["epoch_progress"].values():
            progress.update(dict.fromkeys(progress, progress["completed"]))
        batches = loops["epoch_loop.batch_progress"]
        batches["is_last_batch"] = False
        batches["current"] = dict.fromkeys(batches["current"], 0)


class EpochKeeper(Callback):
    """Seeds every epoch from (seed, stage, epoch), and keeps its metrics; the last of the callbacks.

    Args:
        parts: What the random generators are seeded from, before the epoch.
    """

    def __init__(self, parts: tuple[int, ...]) -> None:
        self.parts = parts
        self.curve: list[Row] = []
        self._frozen: set[nn.Parameter] = set()

    def on_fit_start(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
    ) -> None:
        """Remember what is frozen from the beginning: a start knows those weights."""
        self._frozen = _frozen(pl_module)

    def on_train_epoch_start(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
    ) -> None:
        """Let frozen parts run as in evaluation: no dropout, and statistics of batch normalisation that stay."""
        frozen = _frozen(pl_module)
        for part in pl_module.modules():
            parameters = {*part.parameters()}
            if parameters and parameters <= frozen:
                part.eval()

    def on_train_batch_start(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Seed; earlier hooks come before Lightning itself has drawn what it draws."""
        if batch_idx == 0:
            reseed(*self.parts, trainer.current_epoch)

    def on_train_epoch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
    ) -> None:
        """Keep the epoch's metrics."""
        # The last ones too: Lightning forgets them when a run goes on.
        row = dict(self.curve[-1]) if self.curve else {}
        for name, value in trainer.callback_metrics.items():
            row[name] = float(value)
        row["epoch"] = trainer.current_epoch + 1
        self.curve.append(row)

    def on_save_checkpoint(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        checkpoint: Values,
    ) -> None:
        """Leave out what a run knows without it: arguments, of any kind, and weights that were never trained."""
        for name in ("hyper_parameters", "hparams_name", "hparams_type"):
            checkpoint.pop(name, None)
        for name, parameter in pl_module.named_parameters():
            if parameter in self._frozen and not parameter.requires_grad:
                checkpoint["state_dict"].pop(name, None)

    def state_dict(self) -> Values:
        """Return the metrics so far."""
        return {"curve": self.curve}

    def load_state_dict(self, state_dict: Values) -> None:
        """Take up the metrics of the epochs before."""
        self.curve = list(state_dict["curve"])


def _frozen(module: nn.Module) -> set[nn.Parameter]:
    """Parameters that are not trained; those of a critic are, by the regularizer that has it."""
    critics = [part for part in module.modules() if isinstance(part, Regularizer)]
    trained = {parameter for part in critics for parameter in part.parameters()}
    return {parameter for parameter in module.parameters() if not parameter.requires_grad} - trained


def fit_stage(
    job: Job,
    folder: Path,
    namespace: str,
    logger: Any,
) -> tuple[list[Row], Row]:
    """Train from the last finished epoch in ``folder`` if there is one, and test.

    Args:
        job: What to train; the weights of its module are the trained ones afterwards.
        folder: Of this training alone.
        namespace: Whose Trainer: that of the module.
        logger: For the Trainer; ``None`` for none.

    Returns:
        A row of metrics per epoch, and those of the test.

    Raises:
        ValueError: If the checkpoint is damaged. It is left as it is.
    """
    last = folder / "last.ckpt"
    keeper = EpochKeeper(job.seeds)
    job.module.strict_loading = False  # what is frozen is not in the checkpoint
    callbacks = [EpochWriter(last), *job.options.get("callbacks", []), keeper]
    options = {**job.options, "logger": logger or False, "callbacks": callbacks}
    test = {}
    resumed = None
    with quiet(), interruptible():
        trainer = make_trainer(namespace, options)
        if last.exists():
            _files.check_archive(last, advice=ADVICE)  # before Lightning says so
            resumed = str(last)
        trainer.fit(job.module, **job.fit, ckpt_path=resumed)
        if job.test is not None:
            test = dict(trainer.test(job.module, **job.test, verbose=False)[0])
    return keeper.curve, test


def make_trainer(namespace: str, options: Values) -> Trainer:
    """Return a Trainer that draws and writes nothing by itself."""
    usual = {"devices": 1, "log_every_n_steps": 10, "num_sanity_val_steps": 0}
    return NAMESPACES[namespace].Trainer(**usual | options | SILENT)


def check_trainer(rule: str, namespace: str, options: Values) -> None:
    """Raise a ``ValueError`` with a rule if Lightning makes no Trainer of some options on this machine."""
    try:
        with quiet():
            make_trainer(namespace, {**options, "logger": False})
    except Exception as error:  # of a kind of its own for each
        raise ValueError(f"{rule} ({first_line(error)}).") from error


def save_checkpoint(trainer: Trainer, path: Path) -> None:
    """Write a checkpoint beside its place and move it there, so that a killed process leaves the one before.

    No two processes write beside it under the same name: one of a killed run may be at work still,
    on another machine.
    """
    with _files.atomic_path(path) as beside:
        trainer.save_checkpoint(beside)


@contextmanager
def interruptible() -> Iterator[None]:
    """Let Ctrl-C be a ``KeyboardInterrupt``: a Trainer ends the process instead, and is deaf to Ctrl-C from then on."""
    handler = signal.getsignal(signal.SIGINT)
    try:
        yield
    except SystemExit as end:
        if not isinstance(end.__context__, KeyboardInterrupt):
            raise
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, handler)
        raise KeyboardInterrupt from None


@contextmanager
def quiet() -> Iterator[None]:
    """Keep Lightning from telling what a run of many small trainings need not hear."""
    names = ("pytorch_lightning", "lightning.pytorch", "lightning.fabric")
    levels = {logging.getLogger(name): logging.getLogger(name).level for name in names}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="pytorch_lightning|lightning")
        try:
            for logger in levels:
                logger.setLevel(logging.WARNING)
            yield
        finally:
            for logger, level in levels.items():
                logger.setLevel(level)
