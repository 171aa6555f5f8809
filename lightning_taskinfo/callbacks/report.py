"""What is made of a history, and how figures, tables and summaries reach whatever loggers there are."""

import csv
import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from lightning_taskinfo._wandb import PREFIX
from lightning_taskinfo.plotting import figure_pixels

Row = dict[str, float]
Rows = Sequence[Mapping[str, Any]]


def summary(history: Sequence[Row], names: Iterable[str]) -> Row:
    """Return first, last, smallest and largest value of each name.

    Example:
        >>> summary([{"a": 2.0}, {"a": 5.0}, {"a": 3.0}], ["a"])
        {'a_first': 2.0, 'a_last': 3.0, 'a_min': 2.0, 'a_max': 5.0}
    """
    result: Row = {}
    for name in names:
        values = [row[name] for row in history if name in row]
        if values:
            result[f"{name}_first"] = values[0]
            result[f"{name}_last"] = values[-1]
            result[f"{name}_min"] = min(values)
            result[f"{name}_max"] = max(values)
    return result


def is_known(history: Sequence[Row], name: str) -> bool:
    """Return whether a name has a finite value in any row.

    Example:
        >>> is_known([{"a": 2.0}, {"b": float("nan")}], "a"), is_known([{"b": float("nan")}], "b")
        (True, False)
    """
    return any(math.isfinite(row.get(name, math.nan)) for row in history)


def thinned(history: Sequence[Row], names: Iterable[str], limit: int) -> list[Row]:
    """Return about ``limit`` rows of a history, evenly over it, if it has more.

    Those with the smallest and largest value of each name are always among them, so that
    :func:`summary` stays the same.

    Example:
        >>> history = [{"step": step, "a": -abs(step - 3)} for step in range(9)]
        >>> [row["step"] for row in thinned(history, ["a"], limit=3)]
        [0, 3, 4, 8]
    """
    kept = {*spread(len(history), limit)}
    for name in names:
        values = [(row[name], i) for i, row in enumerate(history) if is_known([row], name)]
        if values:
            kept |= {min(values)[1], max(values)[1]}
    return [history[i] for i in sorted(kept)]


def spread(total: int, n: int) -> list[int]:
    """Return ``n`` of ``total`` numbers, evenly from the first to the last; all of them if there are no more.

    Example:
        >>> spread(9, 3), spread(2, 3)
        ([0, 4, 8], [0, 1])
    """
    n = min(n, total)
    steps = max(1, n - 1)
    return [round(i * (total - 1) / steps) for i in range(n)]


def log_settings(loggers: Sequence[Any], who: str, settings: Mapping[str, Any]) -> None:
    """Give a callback's settings to the configuration of each run, and tell W&B which axis its values have.

    Args:
        loggers: Lightning's loggers.
        who: The callback.
        settings: Its arguments; functions and tensors are named, not stored.
    """
    stored = {f"{PREFIX}/{who}/{name}": _plain(value) for name, value in settings.items()}
    for logger in loggers:
        if _is_wandb(logger):
            logger.experiment.define_metric(f"{PREFIX}/*", step_metric="trainer/global_step")
        if _is_tensorboard(logger):  # whose hyperparameters would bring a metric of their own
            rows = [{"setting": name, "value": str(value)} for name, value in stored.items()]
            log_table(logger, f"{PREFIX}/{who}/settings", rows, 0)
        else:
            logger.log_hyperparams(stored)


def _plain(value: Any) -> Any:
    if isinstance(value, int | float | str | None):
        return value
    if isinstance(value, list | tuple):
        return list(value)
    return getattr(value, "__qualname__", type(value).__name__)


def log_summary(loggers: Sequence[Any], key: str, ends: Row, step: int) -> None:
    """Give first, last, smallest and largest values to the summary of each run, not to its series.

    Args:
        loggers: Lightning's loggers.
        key: What the summary is called where it becomes a text or a file, with ``_summary`` behind.
        ends: The values by name.
        step: The optimizer step at the end of training.
    """
    rows = [{"value": name, "of the run": value} for name, value in ends.items()]
    for logger in loggers:
        if _is_wandb(logger):
            logger.experiment.summary.update(ends)
        else:
            log_table(logger, f"{key}_summary", rows, step)


def log_table(logger: Any, key: str, rows: Rows, step: int, figure: Any = None) -> None:
    """Give a table, and a figure of it if there is one, to a logger.

    They become a table and an image of W&B, a text and an image of TensorBoard, or files beside
    what else it writes.
    """
    columns = [*dict.fromkeys(chain.from_iterable(rows))]
    cells: list[list[Any]] = [[row.get(column) for column in columns] for row in rows]
    picture = f"{key.removesuffix('_table')}_figure"
    if _is_wandb(logger):
        logger.log_table(key, columns=columns, data=cells, step=step)
        if figure:
            logger.log_image(picture, images=[figure_pixels(figure).numpy()], step=step)
    elif _is_tensorboard(logger):
        every: list[list[Any]] = [columns, ["---"] * len(columns), *cells]
        lines = [f"| {' | '.join(map(_text, line))} |" for line in every]
        logger.experiment.add_text(key, "\n".join(lines), step)
        if figure:
            logger.experiment.add_image(picture, figure_pixels(figure), step, dataformats="HWC")
    elif isinstance(getattr(logger, "log_dir", None), str):  # as that of csv files
        folder = Path(logger.log_dir)
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / f"{_file(key)}.csv").open("w", newline="") as file:
            csv.writer(file).writerows([columns, *cells])
        if figure:
            figure.savefig(folder / f"{_file(picture)}.png", dpi=150)


def _is_wandb(logger: Any) -> bool:
    return hasattr(logger.experiment, "define_metric")


def _is_tensorboard(logger: Any) -> bool:
    return hasattr(logger.experiment, "add_text")


def _file(key: str) -> str:
    """Return the name of the file of a key, in the folder of a logger that has one."""
    return key.removeprefix(f"{PREFIX}/").replace("/", "_")


def _text(cell: Any) -> str:
    if isinstance(cell, int | float):
        return f"{cell:.6g}"
    return cell or ""
