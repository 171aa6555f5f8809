"""Where the metrics of runs go: Weights & Biases, csv files."""

import csv
import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from lightning_taskinfo._files import atomic_write
from lightning_taskinfo._lightning import DEFAULT
from lightning_taskinfo._wandb import PREFIX, log_once, ours
from lightning_taskinfo.callbacks.report import summary

if TYPE_CHECKING:
    from lightning_taskinfo.transfer.report import TransferReport

LoggerKind = Literal["none", "csv", "wandb", "wandb_offline"]
Row = dict[str, float]
OF_LIGHTNING = ("epoch", "trainer/global_step")


@dataclass(frozen=True)
class RunLog:
    """Which logger the runs of an experiment have.

    Args:
        kind: ``"none"``; ``"csv"`` for a table of each run's epochs; ``"wandb"`` or
            ``"wandb_offline"`` for a run of Weights & Biases each, all in one group.
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
        if self.kind not in get_args(LoggerKind):
            raise ValueError(
                f"`logger` must be one of {', '.join(get_args(LoggerKind))}, got {self.kind!r}."
            )

    @contextmanager
    def run(
        self,
        name: str,
        configuration: Mapping[str, Any],
        pretraining: Sequence[Row],
        *,
        own_module: bool = True,
    ) -> Iterator["Run"]:
        """Open a run, with the pretraining's epochs in it, and close it, whatever happens.

        Args:
            name: Name of the run; the same when a killed one is continued.
            configuration: What it is run with.
            pretraining: Rows of the pretraining's epochs.
            own_module: Whether what the module logs is ours to name, and not the user's.
        """
        logger = None
        if self.kind.startswith("wandb"):
            logger = self._wandb(name, configuration, own_module=own_module)
        path = self.folder / f"{name}.csv" if self.kind == "csv" else None
        run = Run(logger, path)
        try:
            for row in pretraining:
                run.log({"pretrain": _plain(row)})
            yield run
        finally:
            if logger is not None:
                logger.experiment.finish()

    def _wandb(self, name: str, configuration: Mapping[str, Any], *, own_module: bool) -> Any:
        import wandb

        self.folder.mkdir(parents=True, exist_ok=True)
        whole = f"{self.folder.absolute()}/{self.group}/{name}"
        run = wandb.init(  # not by Lightning, whose call W&B answers with a warning about an old argument
            name=name,
            dir=self.folder,
            project=self.project,
            group=self.group,
            id=hashlib.sha256(whole.encode()).hexdigest()[:12],
            resume="allow",
            mode="offline" if self.kind == "wandb_offline" else None,
            config=dict(configuration),
            reinit="create_new",
            settings=wandb.Settings(silent=True, console="off"),  # many runs share one terminal
        )
        run.define_metric("trainer/global_step")  # as Lightning does
        run.define_metric("*", step_metric="trainer/global_step", step_sync=True)
        run.define_metric(ours("pretrain/*"), step_metric=ours("pretrain/epoch"))
        logger: Any = import_module(f"{self.namespace}.loggers").WandbLogger
        if own_module:
            logger = type("Logger", (_NamesOurs, logger), {})
        return logger(name=name, save_dir=self.folder, project=self.project, experiment=run)


class _NamesOurs:
    """A part of a logger of Weights & Biases: everything that is logged by our own module has our prefix."""

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        named = {}
        for key, value in metrics.items():
            named[key if key in OF_LIGHTNING else ours(key)] = value
        super().log_metrics(named, step)  # type: ignore[misc]


class Run:
    """The log of one run.

    Args:
        logger: The Lightning logger, for the Trainer; ``None`` for none.
        path: Of the csv file; ``None`` for none.
    """

    def __init__(self, logger: Any, path: Path | None) -> None:
        self.logger = logger
        self.path = path

    def log(self, values: Mapping[str, Any], step: int | None = None) -> None:
        """Log numbers, nested dicts with ``/`` between the names; what is no number is left out.

        Args:
            values: Numbers and dicts by name.
            step: The optimizer step they belong to; the last one by default.
        """
        if self.logger is not None and (numbers := flatten(values)):
            named = {ours(key): value for key, value in numbers.items()}
            self.logger.log_metrics(named, step)

    def end(self, curve: Sequence[Row]) -> None:
        """Put first, last, smallest and largest value of the epochs into the run's summary, or all into a csv file."""
        if self.logger is not None:
            rows = [_plain(row) for row in curve]
            names = dict.fromkeys(key for row in rows for key in row if key != "epoch")
            ends = summary(rows, [*names])
            named = {ours(key): value for key, value in ends.items()}
            self.logger.experiment.summary.update(named)
        if self.path is None or not curve:
            return
        columns = list(dict.fromkeys(key for row in curve for key in row))
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(self.path, "w") as file:
            writer = csv.DictWriter(file, columns, lineterminator="\n")
            writer.writeheader()
            writer.writerows(curve)


def _plain(row: Row) -> Row:
    """Return metrics by their names without our prefix."""
    return {key.removeprefix(f"{PREFIX}/"): value for key, value in row.items()}


def flatten(values: Mapping[str, Any], prefix: str = "") -> Row:
    """Return the numbers of nested dicts under joined names.

    Example:
        >>> flatten({"before": {"total": 1.0, "layers": {"head": 1.0}}, "overlap": None})
        {'before/total': 1.0, 'before/layers/head': 1.0}
    """
    found: Row = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            found |= flatten(value, f"{prefix}{key}/")
        elif isinstance(value, int | float):
            found[f"{prefix}{key}"] = float(value)
    return found


WORDS = ("labels", "method", "_verdict", "_reason")  # ends of the columns that are no measurements


def log_to_wandb(
    report: "TransferReport",
    *,
    project: str = "lightning-taskinfo",
    group: str | None = None,
    mode: Literal["online", "offline"] | None = None,
    folder: str | os.PathLike[str] = ".",
    confidence: float = 0.95,
) -> Path:
    """Make a run that holds the table, the figures as images, and the numbers as scalars.

    The numbers are called ``taskinfo/<method>/50_labels/accuracy``. Another run that is open
    meanwhile stays as it is.

    Args:
        report: What to log.
        project: Project in W&B.
        group: Group of the experiment's runs; the name of the report by default.
        mode: ``"online"``, or ``"offline"`` (to look at with ``wandb leet``); what W&B is set to by
            default.
        folder: Folder in which W&B makes its folder ``wandb``.
        confidence: Probability that an interval covers.

    Returns:
        The run's folder.

    Example::

        run = log_to_wandb(transfer(Classifier, target, starts=starts), mode="offline")
        print(f"wandb leet {run}")
    """
    import wandb

    Path(folder).mkdir(parents=True, exist_ok=True)  # or W&B writes to a temporary one
    rows = report.table(confidence)
    with wandb.init(
        project=project,
        group=group or report.name,
        name=f"{report.name}: summary",
        job_type="summary",
        config=report.configuration,
        dir=folder,
        mode=mode,
        reinit="create_new",
        settings=wandb.Settings(console="off"),
    ) as run:
        figures = report.figures(confidence)
        for figure in figures.values():
            figure.set_dpi(150)
        columns = list(rows[0])
        cells = [list(row.values()) for row in rows]
        log_once(
            run,
            "",
            scalars=scalars(rows),
            figures={f"figures/{name}": figure for name, figure in figures.items()},
            tables={"results": (columns, cells)},
        )
        return Path(run.dir).parent


def scalars(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Return the numbers of a report's table by name; what is not known is left out.

    Example:
        >>> scalars([{"labels": 50, "method": "lautum", "accuracy": 0.5, "loss": None, "over_scratch_loss_reason": ""}])
        {'lautum/50_labels/accuracy': 0.5}
    """
    numbers = {}
    for row in rows:
        cell = f"{row['method']}/{row['labels']}_labels"
        for name, value in row.items():
            if value is not None and not name.endswith(WORDS):
                numbers[f"{cell}/{name}"] = value
    return numbers
