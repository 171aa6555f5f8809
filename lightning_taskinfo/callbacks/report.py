"""What is made of a history, and how figures, tables and summaries reach whatever loggers there are."""

import csv
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.util import find_spec
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


def known(history: Sequence[Row], name: str) -> list[tuple[float, int]]:
    """Return the finite values of a name, each with the number of its row.

    Example:
        >>> known([{"a": 2.0}, {"b": 1.0}, {"a": float("nan")}, {"a": 5.0}], "a")
        [(2.0, 0), (5.0, 3)]
    """
    values = [(row.get(name, math.nan), number) for number, row in enumerate(history)]
    return [pair for pair in values if math.isfinite(pair[0])]


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
        return [*history]
    kept = {*spread(len(history), limit)}
    for name in names:
        values = known(history, name)
        if values:
            kept |= {min(values)[1], max(values)[1]}
    return [history[i] for i in sorted(kept)]


def spread(total: int, n: int) -> list[int]:
    """Return ``n`` of ``total`` numbers, evenly from the first to the last.

    Example:
        >>> spread(9, 3)
        [0, 4, 8]
    """
    steps = max(1, n - 1)
    return [round(i * (total - 1) / steps) for i in range(n)]


def without_layers(row: Row) -> Row:
    """Return a measurement without its layers, which are parts of another value and named behind it.

    Example:
        >>> without_layers({"nats": 3.0, "nats/net.0": 1.0, "nats_at/0.5": 2.0})
        {'nats': 3.0, 'nats_at/0.5': 2.0}
    """
    return {name: value for name, value in row.items() if name.rpartition("/")[0] not in row}


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
    return few | {name: row[name] for name in layers}


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
    if value is None or isinstance(value, bool | int | float | str):
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


def report(
    loggers: Sequence[Any], key: str, plot: Callable[[], Any] | None, rows: Rows, step: int
) -> None:
    """Give figure and table to each logger in the way it has: as objects, as an image and text, or as files.

    Args:
        loggers: Lightning's loggers.
        key: What figure and table are called, with ``_figure`` and ``_table`` behind.
        plot: Draws the figure, if there is one to be drawn; not called without matplotlib.
        rows: What was measured.
        step: The optimizer step at the end of training.
    """
    figure = None
    if loggers and plot is not None and find_spec("matplotlib"):  # drawing takes a while
        figure, _ = plot()
    for logger in loggers:
        log_table(logger, f"{key}_table", rows, step)
        if figure is not None:
            log_figure(logger, f"{key}_figure", figure, step)


def log_table(logger: Any, key: str, rows: Rows, step: int) -> None:
    """Give a table to a logger: as a table of W&B, a text of TensorBoard, or a file beside what else it writes."""
    columns = [*dict.fromkeys(chain.from_iterable(rows))]
    cells = [[row.get(column) for column in columns] for row in rows]
    if _is_wandb(logger):
        logger.log_table(key, columns=columns, data=cells, step=step)
    elif _is_tensorboard(logger):
        lines: list[Any] = [columns, ["---"] * len(columns), *cells]
        text = "\n".join(f"| {' | '.join(map(_text, line))} |" for line in lines)
        logger.experiment.add_text(key, text, step)
    elif path := _file(logger, f"{key}.csv"):
        with path.open("w", newline="") as file:
            csv.writer(file).writerows([columns, *cells])


def log_figure(logger: Any, key: str, figure: Any, step: int) -> None:
    """Give a figure to a logger, in the way of :func:`log_table`."""
    if _is_wandb(logger):
        logger.log_image(key, images=[figure_pixels(figure).numpy()], step=step)
    elif _is_tensorboard(logger):
        logger.experiment.add_image(key, figure_pixels(figure), step, dataformats="HWC")
    elif path := _file(logger, f"{key}.png"):
        figure.savefig(path, dpi=150)


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
    return Path(folder, key.removeprefix(f"{PREFIX}/").replace("/", "_"))


def _text(cell: float | str | None) -> str:
    if cell is None:
        return ""
    return cell if isinstance(cell, str) else f"{cell:.6g}"
