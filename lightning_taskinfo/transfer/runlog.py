"""Where the metrics of one method, number of labels and seed go: a run of Weights & Biases, a csv file, or nowhere."""

import csv
import hashlib
import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, get_args

from lightning_taskinfo._files import atomic_write
from lightning_taskinfo._lightning import DEFAULT

LoggerKind = Literal["none", "csv", "wandb", "wandb_offline"]
Row = dict[str, float]


@dataclass(frozen=True)
class RunLog:
    """Which logger the runs of an experiment have.

    Args:
        kind: ``"none"``; ``"csv"`` for a table of each run's epochs; ``"wandb"`` or ``"wandb_offline"`` for a run of
            Weights & Biases each, all in one group.
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
            raise ValueError(f"`logger` must be one of {', '.join(get_args(LoggerKind))}, got {self.kind!r}.")

    @contextmanager
    def run(self, name: str, configuration: Mapping[str, Any], pretraining: Sequence[Row]) -> Iterator["Run"]:
        """Open a run, with the pretraining's epochs in it, and close it, whatever happens.

        Args:
            name: Name of the run; the same when a killed one is continued.
            configuration: What it is run with.
            pretraining: Rows of the pretraining's epochs.
        """
        logger = self._wandb(name, configuration) if self.kind.startswith("wandb") else None
        run = Run(logger, self.folder / f"{name}.csv" if self.kind == "csv" else None)
        try:
            for row in pretraining:
                run.log({f"pretrain/{key}": value for key, value in row.items()})
            yield run
        finally:
            if logger is not None:
                logger.experiment.finish()

    def _wandb(self, name: str, configuration: Mapping[str, Any]) -> Any:
        import wandb

        self.folder.mkdir(parents=True, exist_ok=True)
        run = wandb.init(  # not by Lightning, whose call W&B answers with a warning about an old argument
            name=name,
            dir=self.folder,
            project=self.project,
            group=self.group,
            id=hashlib.sha256(f"{self.folder.absolute()}/{self.group}/{name}".encode()).hexdigest()[:12],
            resume="allow",
            mode="offline" if self.kind == "wandb_offline" else None,
            config=dict(configuration),
            reinit="create_new",
            settings=wandb.Settings(silent=True, console="off"),  # many runs share one terminal
        )
        run.define_metric("trainer/global_step")  # as Lightning does
        run.define_metric("*", step_metric="trainer/global_step", step_sync=True)
        return import_module(f"{self.namespace}.loggers").WandbLogger(
            name=name, save_dir=self.folder, project=self.project, experiment=run
        )


class Run:
    """The log of one run.

    Args:
        logger: The Lightning logger, for the Trainer; ``None`` for none.
        path: Of the csv file; ``None`` for none.
    """

    def __init__(self, logger: Any, path: Path | None) -> None:
        self.logger, self.path = logger, path

    def log(self, values: Mapping[str, Any]) -> None:
        """Log numbers, nested dicts with ``/`` between the names; what is no number is left out."""
        if self.logger is not None and (numbers := flatten(values)):
            self.logger.log_metrics(numbers)

    def table(self, curve: Sequence[Row]) -> None:
        """Write the epochs as a csv file, where that was asked for."""
        if self.path is None or not curve:
            return
        columns = list(dict.fromkeys(key for row in curve for key in row))
        text = io.StringIO()
        writer = csv.DictWriter(text, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(curve)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(self.path, "w") as file:
            file.write(text.getvalue())


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
