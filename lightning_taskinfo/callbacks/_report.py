"""A figure, a table and a summary to whatever loggers there are."""

import csv
import io
import math
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_taskinfo._wandb import PREFIX
from lightning_taskinfo.plotting import figure_pixels

if TYPE_CHECKING:
    from lightning_taskinfo.plotting import Figure

Row = dict[str, float]
Cell = float | str


def table(history: Sequence[Mapping[str, Cell]]) -> tuple[list[str], list[list[Cell | None]]]:
    """Return column names and rows of a history; what a row lacks is None.

    Example:
        >>> table([{"step": 1, "a": 2.0}, {"step": 2, "b": 3.0}])
        (['step', 'a', 'b'], [[1, 2.0, None], [2, None, 3.0]])
    """
    columns = list(dict.fromkeys(key for row in history for key in row))
    return columns, [[row.get(column) for column in columns] for row in history]


def summary(history: Sequence[Row], names: Sequence[str]) -> Row:
    """Return first, last, smallest and largest value of each name.

    Example:
        >>> summary([{"a": 2.0}, {"a": 5.0}, {"a": 3.0}], ["a"])
        {'a_first': 2.0, 'a_last': 3.0, 'a_min': 2.0, 'a_max': 5.0}
    """
    result: Row = {}
    for name in names:
        if values := [row[name] for row in history if name in row]:
            ends = {"first": values[0], "last": values[-1], "min": min(values), "max": max(values)}
            result |= {f"{name}_{key}": value for key, value in ends.items()}
    return result


def thinned(history: Sequence[Row], names: Sequence[str], limit: int) -> list[Row]:
    """Return about ``limit`` rows of a history, evenly over it, if it has more.

    The first and the last row, and those with the smallest and largest value of each name, are always among them:
    what :func:`summary` says stays the same.

    Args:
        history: One row per measurement.
        names: Whose extremes to keep.
        limit: Rows to keep beside those, at least 2.

    Example:
        >>> history = [{"step": step, "a": -abs(step - 3)} for step in range(9)]
        >>> [row["step"] for row in thinned(history, ["a"], limit=3)]
        [0, 3, 4, 8]
    """
    last = len(history) - 1
    if last < limit:
        return [dict(row) for row in history]
    kept = {round(last * i / (limit - 1)) for i in range(limit)}
    for name in names:
        numbered = [
            (row[name], i)
            for i, row in enumerate(history)
            if math.isfinite(row.get(name, math.nan))
        ]
        if numbered:
            kept |= {min(numbered)[1], max(numbered)[1]}
    return [dict(history[i]) for i in sorted(kept)]


def measured(history: Sequence[Row], names: Sequence[str]) -> list[str]:
    """Return the names of which a value is known.

    Example:
        >>> measured([{"a": 2.0, "b": float("nan")}], ["a", "b", "c"])
        ['a']
    """
    return [
        name for name in names if any(math.isfinite(row.get(name, math.nan)) for row in history)
    ]


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
    whole = without_layers(row)
    layers = [name for name in row if name not in whole]
    if len(layers) > limit:
        spread = [round(i * (len(layers) - 1) / max(1, limit - 1)) for i in range(limit)]
        layers = [layers[i] for i in spread]
    return whole | {name: row[name] for name in layers}


def log_settings(
    loggers: Sequence[Any], prefix: str, who: str, settings: Mapping[str, Any]
) -> None:
    """Give a callback's settings to the configuration of each run, and tell W&B which axis its values have.

    Args:
        loggers: Lightning's loggers.
        prefix: What all keys begin with.
        who: The callback.
        settings: Its arguments; functions and tensors are named, not stored.
    """
    known = {f"{prefix}/{who}/{name}": _plain(value) for name, value in settings.items()}
    for logger in loggers:
        if hasattr(logger.experiment, "define_metric"):  # W&B
            logger.experiment.define_metric(f"{prefix}/*", step_metric="trainer/global_step")
        if hasattr(
            logger.experiment, "add_text"
        ):  # TensorBoard, whose hyperparameters would bring a metric of their own
            cells = [[name, str(value)] for name, value in known.items()]
            logger.experiment.add_text(
                f"{prefix}/{who}/settings", _markdown(["setting", "value"], cells), 0
            )
        else:
            logger.log_hyperparams(known)


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple) and all(
        isinstance(part, int | float | str) for part in value
    ):
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
        if hasattr(logger.experiment, "summary"):  # W&B
            logger.experiment.summary.update(ends)
        elif hasattr(logger.experiment, "add_text"):  # TensorBoard
            cells = [[name, _text(value)] for name, value in ends.items()]
            logger.experiment.add_text(
                f"{key}_summary", _markdown(["value", "of the run"], cells), step
            )
        elif isinstance(
            getattr(logger, "log_dir", None), str
        ):  # CSV, and others that write to a folder
            _write_rows(
                Path(logger.log_dir), f"{key}_summary", ["value", "of the run"], [*ends.items()]
            )


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
        if hasattr(logger, "log_table") and hasattr(logger, "log_image"):  # W&B
            logger.log_table(f"{key}_table", columns=columns, data=rows, step=step)
            if figure is not None:
                logger.log_image(f"{key}_figure", images=[figure_pixels(figure).numpy()], step=step)
        elif hasattr(logger.experiment, "add_image"):  # TensorBoard
            logger.experiment.add_text(f"{key}_table", _markdown(columns, rows), step)
            if figure is not None:
                logger.experiment.add_image(
                    f"{key}_figure", figure_pixels(figure), step, dataformats="HWC"
                )
        elif isinstance(
            getattr(logger, "log_dir", None), str
        ):  # CSV, and others that write to a folder
            _write(Path(logger.log_dir), key, figure, columns, rows)


def has_matplotlib() -> bool:
    """Whether figures can be drawn."""
    return find_spec("matplotlib") is not None


def _markdown(columns: list[str], rows: Sequence[Sequence[Cell | None]]) -> str:
    lines = [columns, ["---"] * len(columns), *([_text(cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _text(cell: Cell | None) -> str:
    if cell is None:
        return ""
    return cell if isinstance(cell, str) else f"{cell:.6g}"


def _write(
    folder: Path,
    key: str,
    figure: "Figure | None",
    columns: list[str],
    rows: list[list[Cell | None]],
) -> None:
    _write_rows(folder, f"{key}_table", columns, rows)
    if figure is not None:
        figure.savefig(folder / f"{_file_name(key)}_figure.png", dpi=150)


def _write_rows(
    folder: Path, key: str, columns: list[str], rows: Sequence[Sequence[Cell | None]]
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    text = io.StringIO()
    csv.writer(text).writerows([columns, *rows])
    (folder / f"{_file_name(key)}.csv").write_text(text.getvalue())


def _file_name(key: str) -> str:
    return key.removeprefix(f"{PREFIX}/").replace("/", "_")
