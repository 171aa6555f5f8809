"""The report of a transfer experiment in Weights & Biases: one summary run in the group of the experiment."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lightning_taskinfo._arguments import checked_arguments

if TYPE_CHECKING:
    from lightning_taskinfo.transfer.report import TransferReport

WORDS = ("labels", "method", "_verdict", "_reason")  # ends of the columns that are no measurements


@checked_arguments
def log_to_wandb(
    report: "TransferReport",
    *,
    project: str = "lightning-taskinfo",
    group: str | None = None,
    mode: Literal["online", "offline"] | None = None,
    folder: str | os.PathLike[str] = ".",
    confidence: float = 0.95,
) -> Path:
    """Make a run that holds the table, the figures as images, and the numbers as scalars ``method/50_labels/accuracy``.

    Another run that is open meanwhile stays as it is.

    Args:
        report: What to log.
        project: Project in W&B.
        group: Group of the experiment's runs; the name of the report by default.
        mode: ``"online"``, or ``"offline"`` (to look at with ``wandb leet``); what W&B is set to by default.
        folder: Folder in which W&B makes its folder ``wandb``.
        confidence: Probability that an interval covers.

    Returns:
        The run's folder.
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
        table = wandb.Table(columns=list(rows[0]), data=[list(row.values()) for row in rows])
        images = {f"figures/{name}": wandb.Image(pixels) for name, pixels in _pixels(report, confidence).items()}
        run.log({"results": table, **images, **scalars(rows)})
        return Path(run.dir).parent


def scalars(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Return the numbers of a report's table by name; what is not known is left out.

    Example:
        >>> scalars([{"labels": 50, "method": "lautum", "accuracy": 0.5, "loss": None, "over_scratch_loss_reason": ""}])
        {'lautum/50_labels/accuracy': 0.5}
    """
    return {
        f"{row['method']}/{row['labels']}_labels/{name}": value
        for row in rows
        for name, value in row.items()
        if value is not None and not name.endswith(WORDS)
    }


def _pixels(report: "TransferReport", confidence: float) -> dict[str, Any]:
    from lightning_taskinfo.plotting import figure_pixels

    figures = report.figures(confidence)
    for figure in figures.values():
        figure.set_dpi(150)
    return {name: figure_pixels(figure).numpy() for name, figure in figures.items()}
