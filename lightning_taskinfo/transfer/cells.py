"""One training of a transfer: a cell that any process can run, or continue where another was killed."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from lightning_taskinfo._files import read_result, write_tensors
from lightning_taskinfo._wandb import PREFIX
from lightning_taskinfo.transfer.logs import RunLog
from lightning_taskinfo.transfer.overlap import onset_of
from lightning_taskinfo.transfer.results import Result
from lightning_taskinfo.transfer.sampling import generators_kept
from lightning_taskinfo.transfer.training import Fitted, fit_stage

Stage = Literal["pretrain", "scratch", "fine_tune"]
SCRATCH = "scratch"


@dataclass(frozen=True)
class Job:
    """A module at its start, ready to be trained.

    Attributes:
        module: The module.
        seeds: What all randomness is drawn from, together with the epoch.
        fit: What the Trainer's ``fit`` is called with.
        test: What its ``test`` is called with; ``None`` for no test.
        options: Of the Trainer.
        weights: Returns what is kept of the trained module.
        after: Returns what is found after training, under names of :class:`Result`, and what is
            logged of it.
        before: What is logged before training.
        ours: Whether the module is ours, and not the user's: then what it logs has our prefix, and
            its checkpoints are whole.
    """

    module: Any
    seeds: tuple[int, ...]
    fit: Mapping[str, Any]
    test: Mapping[str, Any] | None
    options: Mapping[str, Any]
    weights: Callable[[], dict[str, Tensor]]
    after: Callable[[Fitted], tuple[dict[str, Any], dict[str, Any]]]
    before: Mapping[str, Any] = field(default_factory=dict)
    ours: bool = False


@dataclass(frozen=True)
class Recipe(ABC):
    """What is trained, and how: the user's own module from their starts, or the ready parts from starts made here.

    Attributes:
        title: What to call the transfer.
        namespace: Whose modules they are.
        configuration: What decides the numbers.
        labels: Numbers of target labels.
        seeds: The seeds.
        accelerator: Where to train.
        seconds: Estimate of the time of a training, if there is one.
    """

    title: str
    namespace: str
    configuration: dict[str, Any]
    labels: Sequence[int]
    seeds: Sequence[int]
    accelerator: str
    seconds: float | None

    @abstractmethod
    def cells(self, root: Path, log: RunLog) -> list["Cell"]:
        """Return all trainings, each after the one that it needs."""

    @abstractmethod
    def job(self, cell: "Cell") -> Job:
        """Return what a cell trains."""

    def parts(self) -> dict[str, dict[str, Any]]:
        """Return configurations of what can be added to but not changed, by a folder for each."""
        return {}

    def store(self, root: Path) -> None:  # noqa: B027 - most have nothing to write
        """Write what all trainings read."""


@dataclass(frozen=True)
class Cell:
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
        needs: Name of the pretraining whose weights it starts from.
    """

    recipe: Recipe = field(repr=False)
    root: Path
    log: RunLog = field(repr=False)
    name: str
    stage: Stage
    method: str
    labels: int
    seed: int
    start: str = SCRATCH
    way: str = "full"
    needs: str | None = None

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
    def pretrained(self) -> Path:
        """The file of the weights that it starts from."""
        return self.root / "stages" / str(self.needs) / "weights.pt"

    def result(self, name: str | None = None) -> Path:
        """Return the file with the result of this cell, or of another."""
        return self.root / "results" / f"{name or self.name}.json"

    def run(self) -> dict[str, Any]:
        """Train, test, and return the result in JSON-like values; files of a killed run are continued from.

        The global generators, which are the user's where this is the user's process, stay as they
        were.
        """
        begun = time.perf_counter()
        log = RunLog() if self.stage == "pretrain" else self.log
        settings = {"method": self.method, "labels": self.labels, "seed": self.seed}
        settings |= {"start": self.start, "adapt": self.way}
        with generators_kept():
            job = self.recipe.job(self)
            pretraining = self._pretraining()
            with log.run(self.name, settings, pretraining, own_module=job.ours) as run:
                run.log(job.before, step=0)
                fitted = fit_stage(
                    job.module,
                    folder=self.folder,
                    seeds=job.seeds,
                    fit=job.fit,
                    test=job.test,
                    options={**job.options, "logger": run.logger or False},
                    namespace=self.recipe.namespace,
                    lean=not job.ours,
                )
                found, logged = job.after(fitted)
                run.log({"target": found["test"], **logged})
                run.end(fitted.curve)
            write_tensors(self.folder / "weights.pt", job.weights())
        return {**found, "curve": fitted.curve, "seconds": time.perf_counter() - begun}

    def _pretraining(self) -> list[dict[str, float]]:
        """Rows of the pretraining's epochs, to stand in the log of every run that starts from it."""
        path = self.result(self.needs)
        return read_result(path)["curve"] if self.needs and path.exists() else []


def run_cell(cell: Cell) -> dict[str, Any]:
    """Run one cell."""
    return cell.run()


def results_of(cells: Sequence[Cell], found: Mapping[str, Any]) -> list[Result]:
    """Return one result for every start or method, number of labels and seed."""
    return [_result(cell, cells, found) for cell in cells if cell.stage != "pretrain"]


def _result(cell: Cell, cells: Sequence[Cell], found: Mapping[str, Any]) -> Result:
    own = found[cell.name]
    stages: dict[Stage, Any] = {cell.stage: own}
    if cell.needs is not None:
        stages = {"pretrain": found[cell.needs], **stages}
    overlap = own.get("overlap")
    if overlap is not None:
        scratch = [c for c in cells if c.stage == "scratch" and c.seed == cell.seed]
        curve = {c.labels: found[c.name]["missed_share"] for c in scratch}
        overlap = {**overlap, "onset": onset_of(overlap, curve)}
    return Result(
        cell.method,
        cell.labels,
        cell.seed,
        test=own["test"],
        source=found[cell.needs]["test"] if cell.needs else None,
        curves=[_point(stage, row) for stage, one in stages.items() for row in one["curve"]],
        information=own.get("information"),
        fisher_trace=own.get("fisher_trace"),
        overlap=overlap,
        certificate=own.get("certificate"),
        seconds={stage: one["seconds"] for stage, one in stages.items()},
    )


def _point(stage: Stage, row: Mapping[str, float]) -> dict[str, Any]:
    """An epoch without what was measured beside training: a run that is killed measures at other steps."""
    return {"stage": stage, **{k: v for k, v in row.items() if not k.startswith(f"{PREFIX}/")}}
