"""Keep batch normalisation's running statistics where they are."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


@contextmanager
def frozen_batchnorm_statistics(model: nn.Module) -> Iterator[None]:
    """Let forwards in train mode normalise by their own batch, without moving the running statistics.

    A forward on inputs of another task moves the statistics that evaluation uses towards that task.
    Where the penalty needs such a forward and the statistics should stay those of the labelled
    data, run it in here.

    Args:
        model: The module whose batch-norm layers are frozen for a while.

    Example:
        >>> import torch
        >>> net = nn.BatchNorm1d(2).train()
        >>> with frozen_batchnorm_statistics(net):
        ...     _ = net(torch.randn(8, 2) + 5)
        >>> net.running_mean, net.num_batches_tracked
        (tensor([0., 0.]), tensor(0))
    """
    tracking = [
        module
        for module in model.modules()
        if isinstance(module, _BatchNorm) and module.track_running_stats
    ]
    try:
        for module in tracking:
            module.track_running_stats = False
        yield
    finally:
        for module in tracking:
            module.track_running_stats = True
