"""Run a module with other weights for a while."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import Tensor, nn


@contextmanager
def swapped(
    model: nn.Module, parameters: Iterable[nn.Parameter], values: Iterable[Tensor]
) -> Iterator[None]:
    """Put ``values`` in the place of ``parameters`` wherever ``model`` holds them, and put them back afterwards.

    Unlike ``torch.func.functional_call`` this works for any function that uses the model, and for a
    model that holds the same submodule under two names, where that leaves the new values behind.

    Example:
        >>> import torch
        >>> net = nn.Linear(1, 1, bias=False)
        >>> weight = net.weight
        >>> with swapped(net, [weight], [torch.full((1, 1), 2.0)]):
        ...     net(torch.tensor([[3.0]]))
        tensor([[6.]])
        >>> net.weight is weight
        True
    """
    new = dict(zip(map(id, parameters), values, strict=True))
    places = [
        (module._parameters, name, p)
        for module in model.modules()
        for name, p in module._parameters.items()
        if id(p) in new
    ]
    try:
        for held, name, p in places:
            held[name] = new[id(p)]  # type: ignore[assignment]
        yield
    finally:
        for held, name, p in places:
            held[name] = p
