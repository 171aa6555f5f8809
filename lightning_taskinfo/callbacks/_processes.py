"""Numbers from all processes."""

import torch
from torch import Tensor

from lightning_taskinfo._lightning import Trainer


def summed(trainer: Trainer, values: Tensor | list[float]) -> Tensor:
    """Return what all processes' values add up to, in float64; the values themselves where there is one process."""
    if trainer.world_size == 1:
        device = values.device if isinstance(values, Tensor) else "cpu"
        return torch.as_tensor(values, dtype=torch.float64, device=device)
    mine = torch.as_tensor(values, dtype=torch.float64, device=trainer.strategy.root_device)
    return trainer.strategy.reduce(mine, reduce_op="sum")


def on_every_process(trainer: Trainer, number: int) -> list[int]:
    """Return the number that each process has."""
    if trainer.world_size == 1:
        return [number]
    gathered = trainer.strategy.all_gather(
        torch.tensor(number, device=trainer.strategy.root_device)
    )
    return gathered.flatten().tolist()
