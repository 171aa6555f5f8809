"""``taskinfo complexity``."""

import json
import re
from pathlib import Path
from typing import Any

from lightning_taskinfo._files import write_json
from lightning_taskinfo.tasks.complexity import BETAS, structure_function
from lightning_taskinfo.tasks.specs import Task, network_for, prepare_task
from lightning_taskinfo.tasks.structure import StructureFunction
from lightning_taskinfo.tasks.training import Training


def complexity(
    tasks: tuple[str, ...] = ("digits", "digits:random-labels"),
    folder: Path = Path("complexity"),
    betas: tuple[float, ...] = BETAS,
    max_samples: int = 1000,
    size: int = 8,
    width: int = 32,
    steps: int = 400,
    prior_std: float = 0.1,
    seed: int = 0,
    data_dir: str | None = None,
) -> str:
    """Trace the structure function of tasks: how much loss a nat in the weights of a small network buys.

    Args:
        tasks: What to measure: digits, letters, an npz file or a folder of idx files, several with + in between; and
            behind colons even-odd, small-large, inverted, random-labels, one-<class> or only-<class>-<class>….
        folder: Folder for complexity.json, complexity.png and what an interrupted call continues from.
        betas: Prices of a nat, beside the sum of the loss.
        max_samples: At most this many samples of each task; complexities are comparable at equal numbers only.
        size: Height and width of the embedded digits and letters, 8 or 28.
        width: Neurons of each of the two hidden layers.
        steps: Optimizer steps for each price, and before the first.
        prior_std: Standard deviation of the weights before training.
        seed: Seed of samples, network, batches and noise.
        data_dir: Folder of further datasets; TASKINFO_DATA_DIR where not given.

    Returns:
        A table: price, information in the weights and loss for each task, and the critical prices.

    Raises:
        ValueError: If an argument is outside its domain, or the folder holds another measurement.
    """
    from lightning_taskinfo.tasks.plots import plot_structure_functions

    for argument, value, least in (("steps", steps, 1), ("max_samples", max_samples, 8)):
        if value < least:
            raise ValueError(f"`{argument}` must be at least {least}, got {value}.")
    source: dict[str, Any] = {
        "max_samples": max_samples,
        "size": size,
        "seed": seed,
        "data_dir": data_dir,
    }
    loaded = [prepare_task(spec, **source) for spec in tasks]
    training = Training(pretrain_steps=steps, steps=steps)

    def trace(task: Task) -> StructureFunction:
        return structure_function(
            network_for(task, width), task.data, betas, prior_std=prior_std, training=training, seed=seed,
            name=task.name, folder=folder / re.sub("[:/]", "_", task.name),
        )  # fmt: skip

    curves = [trace(task) for task in loaded]
    figure, _ = plot_structure_functions(curves)
    figure.savefig(folder / "complexity.png", dpi=150)
    write_json(folder / "complexity.json", [json.loads(curve.to_json()) for curve in curves])
    return "\n".join(
        [*map(_text, curves), str(folder / "complexity.png"), str(folder / "complexity.json")]
    )


def _text(curve: StructureFunction) -> str:
    lines = [
        f"{curve.name}, {curve.samples} samples",
        "      beta    KL (nats)   loss/sample     error",
    ]
    for beta, kl, loss, error in zip(
        curve.betas, curve.kl, curve.loss, curve.loss_error, strict=True
    ):
        lines.append(
            f"{beta:10.4g} {kl:12.2f} {loss / curve.samples:13.4f} {error / curve.samples:9.4f}"
        )
    critical = curve.critical_beta()
    found = "not within these prices" if critical is None else f"{critical:.4g}"
    lines.append(f"critical beta: {found}")
    if short := curve.unfinished():
        prices = ", ".join(f"{beta:.4g}" for beta in short)
        lines.append(
            f"not to be trusted: training stopped short of the minimum at beta {prices}; set more --steps"
        )
    return "\n".join([*lines, ""])
