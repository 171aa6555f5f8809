"""What goes to Weights & Biases: scalars, pictures and tables, under names that say whose they are."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PREFIX = "taskinfo"  # of everything that is logged
Rows = tuple[Sequence[str], Sequence[Sequence[Any]]]  # columns, and what stands below them


def ours(name: str) -> str:
    """Return the key of a value, which begins with the prefix.

    Example:
        >>> ours("val_loss"), ours("taskinfo/fisher_trace")
        ('taskinfo/val_loss', 'taskinfo/fisher_trace')
    """
    return f"{PREFIX}/{name.removeprefix(f'{PREFIX}/')}"


def log_once(
    run: Any,
    key: str,
    *,
    scalars: Mapping[str, float],
    figures: Mapping[str, "Figure"],
    tables: Mapping[str, Rows],
) -> None:
    """Log scalars, figures as images, and tables, all of them below ``taskinfo/<key>``.

    Args:
        run: What ``wandb.init()`` returned.
        key: What the names share; empty for nothing.
        scalars: Numbers by name.
        figures: Figures by name.
        tables: Columns and rows by name.
    """
    import wandb

    from lightning_taskinfo.plotting import figure_pixels

    values: dict[str, Any] = dict(scalars)
    for name, figure in figures.items():
        values[name] = wandb.Image(figure_pixels(figure).numpy())
    for name, (columns, rows) in tables.items():
        data = [list(row) for row in rows]
        values[name] = wandb.Table(columns=list(columns), data=data)
    run.log({ours(f"{key}/{name}".lstrip("/")): value for name, value in values.items()})
