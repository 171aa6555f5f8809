"""Collectives over the ranks of a distributed run; in a single process each returns what it was given."""

import torch
import torch.distributed as dist
from torch import Tensor


def world_size() -> int:
    """Return the number of ranks."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    return 1


def sum_over_ranks(*tensors: Tensor) -> list[Tensor]:
    """Return the sums over all ranks, without gradient, through one collective."""
    if world_size() == 1:
        return [tensor.detach() for tensor in tensors]
    flat = torch.cat([tensor.detach().flatten() for tensor in tensors])
    dist.all_reduce(flat)
    sizes = [tensor.numel() for tensor in tensors]
    totals = []
    for total, tensor in zip(flat.split(sizes), tensors, strict=True):
        totals.append(total.view(tensor.shape))
    return totals


def mean_over_ranks(*tensors: Tensor) -> list[Tensor]:
    """Return the means over all ranks, without gradient, through one collective."""
    return [total / world_size() for total in sum_over_ranks(*tensors)]


def gather_rows(tensor: Tensor) -> Tensor:
    """Return the rows of all ranks, in the order of the ranks; their numbers may differ."""
    if world_size() == 1:
        return tensor.detach()
    count = torch.tensor(len(tensor), device=tensor.device)
    counts = [torch.zeros_like(count) for _ in range(world_size())]
    dist.all_gather(counts, count)
    longest = int(torch.stack(counts).max())
    padded = tensor.new_zeros(longest, *tensor.shape[1:])
    padded[: len(tensor)] = tensor.detach()
    gathered = [torch.zeros_like(padded) for _ in counts]
    dist.all_gather(gathered, padded)
    parts = []
    for rows, n in zip(gathered, counts, strict=True):
        parts.append(rows[: int(n)])
    return torch.cat(parts)
