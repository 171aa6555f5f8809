"""What penalties do with a network: other weights and still statistics for a while, and how strongly a loss pulls."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


@contextmanager
def swapped(
    model: nn.Module, parameters: Iterable[nn.Parameter], values: Iterable[Tensor]
) -> Iterator[None]:
    """Put ``values`` in the place of ``parameters`` wherever ``model`` holds them, and put them back afterwards.

    Unlike ``torch.func.functional_call`` this works for any function that uses the model, and for a
    model that holds the same submodule under two names, where that leaves the new values behind.

    Example:
        >>> net = nn.Linear(1, 1, bias=False)
        >>> weight = net.weight
        >>> with swapped(net, [weight], [torch.full((1, 1), 2.0)]):
        ...     net(torch.tensor([[3.0]]))
        tensor([[6.]])
        >>> net.weight is weight
        True
    """
    new = dict(zip(map(id, parameters), values, strict=True))
    places = []
    for module in model.modules():
        for name, p in module._parameters.items():
            if id(p) in new:
                places.append((module._parameters, name, p))
    try:
        for held, name, p in places:
            held[name] = new[id(p)]  # type: ignore[assignment]
        yield
    finally:
        for held, name, p in places:
            held[name] = p


@contextmanager
def frozen_batchnorm_statistics(model: nn.Module) -> Iterator[None]:
    """Let forwards in train mode normalise by their own batch, without moving the running statistics.

    A forward on inputs of another task moves the statistics that evaluation uses towards that task.
    Where the penalty needs such a forward and the statistics should stay those of the labelled
    data, run it in here.

    Args:
        model: The module whose batch-norm layers are frozen for a while.

    Example:
        >>> net = nn.BatchNorm1d(2).train()
        >>> with frozen_batchnorm_statistics(net):
        ...     _ = net(torch.randn(8, 2) + 5)
        >>> net.running_mean, net.num_batches_tracked
        (tensor([0., 0.]), tensor(0))
    """
    tracking = []
    for module in model.modules():
        if isinstance(module, _BatchNorm) and module.track_running_stats:
            tracking.append(module)
    try:
        for module in tracking:
            module.track_running_stats = False
        yield
    finally:
        for module in tracking:
            module.track_running_stats = True


def gradient_norms(terms: Mapping[str, Tensor], parameters: Sequence[Tensor]) -> dict[str, float]:
    """Return the norm of each term's gradient over all parameters; ``.grad`` and the graphs stay as they are.

    Args:
        terms: Scalars with a graph, by name.
        parameters: What to differentiate by; those that a term does not reach count as 0.

    Example:
        >>> w, v = torch.ones(4, requires_grad=True), torch.ones(1, requires_grad=True)
        >>> gradient_norms({"sum": w.sum(), "other": v.sum()}, [w])
        {'sum': 2.0, 'other': 0.0}
    """

    def norm(term: Tensor) -> float:
        gradients = torch.autograd.grad(term, parameters, retain_graph=True, allow_unused=True)
        norms = [g.float().norm() for g in gradients if g is not None]
        if norms:
            return torch.stack(norms).norm().item()
        return 0.0

    return {name: norm(term) for name, term in terms.items()}
