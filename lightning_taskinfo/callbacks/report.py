"""What is made of a history, and how figures, tables and summaries reach whatever loggers there are."""

import csv
import math
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_taskinfo._wandb import PREFIX
from lightning_taskinfo.plotting import figure_pixels

if TYPE_CHECKING:
    from lightning_taskinfo.plotting import Figure

Row = dict[str, float]
Cell = float | str
ENDS = ["value", "of the run"]  # columns of a summary


def table(history: Sequence[Mapping[str, Cell]]) -> tuple[list[str], list[list[Cell | None]]]:
    """Return column names and rows of a history; what a row lacks is None.

    Example:
        >>> table([{"step": 1, "a": 2.0}, {"step": 2, "b": 3.0}])
        (['step', 'a', 'b'], [[1, 2.0, None], [2, None, 3.0]])
    """
    columns = list(dict.fromkeys(chain.from_iterable(history)))
    rows = [[row.get(column) for column in columns] for row in history]
    return columns, rows


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


def known(history: Sequence[Row], name: str) -> list[tuple[float, int]]:
    """Return the finite values of a name, each with the number of its row.

    Example:
        >>> known([{"a": 2.0}, {"b": 1.0}, {"a": float("nan")}, {"a": 5.0}], "a")
        [(2.0, 0), (5.0, 3)]
    """
    values = []
    for number, row in enumerate(history):
        value = row.get(name, math.nan)
        if math.isfinite(value):
            values.append((value, number))
    return values


def thinned(history: Sequence[Row], names: Sequence[str], limit: int) -> list[Row]:
    """Return about ``limit`` rows of a history, evenly over it, if it has more.

    The first and the last row, and those with the smallest and largest value of each name, are
    always among them: what :func:`summary` says stays the same.

    Args:
        history: One row per measurement.
        names: Whose extremes to keep.
        limit: Rows to keep beside those, at least 2.

    Example:
        >>> history = [{"step": step, "a": -abs(step - 3)} for step in range(9)]
        >>> [row["step"] for row in thinned(history, ["a"], limit=3)]
        [0, 3, 4, 8]
    """
    if len(history) <= limit:
        return [dict(row) for row in history]
    kept = set(spread(len(history), limit))
    for name in names:
        values = known(history, name)
        if values:
            _, smallest = min(values)
            _, largest = max(values)
            kept |= {smallest, largest}
    return [dict(history[i]) for i in sorted(kept)]


def spread(total: int, n: int) -> list[int]:
    """Return ``n`` of ``total`` numbers, evenly from the first to the last.

    Example:
        >>> spread(9, 3)
        [0, 4, 8]
    """
    step = total - 1
    steps = max(1, n - 1)
    return [round(i * step / steps) for i in range(n)]


def without_layers(row: Row) -> Row:
    """Return a measurement without its layers, which are parts of another value and named behind it.

    Example:
        >>> without_layers({"nats": 3.0, "nats/net.0": 1.0, "nats_at/0.5": 2.0})
        {'nats': 3.0, 'nats_at/0.5': 2.0}
    """
    kept = {}
    for name, value in row.items():
        whole, _, _ = name.rpartition("/")
        if whole not in row:
            kept[name] = value
    return kept


def with_few_layers(row: Row, limit: int) -> Row:
    """Return a measurement with at most ``limit`` of its layers, evenly from the first to the last.

    Example:
        >>> row = {"nats": 3.0, "nats/a": 1.0, "nats/b": 0.5, "nats/c": 1.5}
        >>> with_few_layers(row, 2)
        {'nats': 3.0, 'nats/a': 1.0, 'nats/c': 1.5}
    """
    few = without_layers(row)
    layers = [name for name in row if name not in few]
    if len(layers) > limit:
        layers = [layers[i] for i in spread(len(layers), limit)]
    for name in layers:
        few[name] = row[name]
    return few


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
            rows = [[name, str(value)] for name, value in stored.items()]
            log_rows(logger, f"{PREFIX}/{who}/settings", ["setting", "value"], rows, 0)
        else:
            logger.log_hyperparams(stored)


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        is_plain = all(isinstance(x, int | float | str) for x in value)
        if is_plain:
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
    for logger in loggers:
        if _is_wandb(logger):
            logger.experiment.summary.update(ends)
        else:
            log_rows(logger, f"{key}_summary", ENDS, [*ends.items()], step)


def report(
    loggers: Sequence[Any],
    key: str,
    figure: "Figure | None",
    history: Sequence[Mapping[str, Cell]],
    step: int,
) -> None:
    """Give figure and table to each logger in the way it has: as objects, as an image and text, or as files.

    Args:
        loggers: Lightning's loggers.
        key: What figure and table are called, with ``_figure`` and ``_table`` behind.
        figure: The figure; None where there is no matplotlib.
        history: What was measured.
        step: The optimizer step at the end of training.
    """
    columns, rows = table(history)
    for logger in loggers:
        log_rows(logger, f"{key}_table", columns, rows, step)
        if figure is not None:
            log_figure(logger, f"{key}_figure", figure, step)


def log_rows(
    logger: Any,
    key: str,
    columns: list[str],
    rows: Sequence[Sequence[Cell | None]],
    step: int,
) -> None:
    """Give a table to a logger: as a table of W&B, a text of TensorBoard, or a file beside what else it writes."""
    if _is_wandb(logger):
        logger.log_table(key, columns=columns, data=rows, step=step)
    elif _is_tensorboard(logger):
        lines = [columns, ["---"] * len(columns)]
        for row in rows:
            lines.append([_text(cell) for cell in row])
        text = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
        logger.experiment.add_text(key, text, step)
    elif path := _file(logger, f"{key}.csv"):
        with path.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(columns)
            writer.writerows(rows)


def log_figure(logger: Any, key: str, figure: "Figure", step: int) -> None:
    """Give a figure to a logger, in the way of :func:`log_rows`."""
    if _is_wandb(logger):
        image = figure_pixels(figure).numpy()
        logger.log_image(key, images=[image], step=step)
    elif _is_tensorboard(logger):
        logger.experiment.add_image(key, figure_pixels(figure), step, dataformats="HWC")
    elif path := _file(logger, f"{key}.png"):
        figure.savefig(path, dpi=150)


def has_matplotlib() -> bool:
    """Whether figures can be drawn."""
    return find_spec("matplotlib") is not None


def _is_wandb(logger: Any) -> bool:
    return hasattr(logger.experiment, "define_metric")


def _is_tensorboard(logger: Any) -> bool:
    return hasattr(logger.experiment, "add_text")


def _file(logger: Any, key: str) -> Path | None:
    """Return where a logger that writes to a folder, as that of csv files, has a file of this key."""
    folder = getattr(logger, "log_dir", None)
    if not isinstance(folder, str):
        return None
    Path(folder).mkdir(parents=True, exist_ok=True)
    name = key.removeprefix(f"{PREFIX}/")
    return Path(folder, name.replace("/", "_"))


def _text(cell: Cell | None) -> str:
    if cell is None:
        return ""
    return cell if isinstance(cell, str) else f"{cell:.6g}"
