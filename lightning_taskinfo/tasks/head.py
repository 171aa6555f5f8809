"""The head of a probe: found by name, its inputs collected, and a linear one fitted in its place."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from lightning_taskinfo._batches import (
    Forward,
    call_on,
    first_samples,
    moved,
    outputs_of,
    sample_count,
    split,
)
from lightning_taskinfo._observe import observing

BATCH = 512


def find_head(probe: nn.Module, head: str | None) -> str:
    """Return the name of the head: what the user says, or the last ``nn.Linear`` of the probe.

    Raises:
        ValueError: If there is no such module, no linear layer, or nothing but the head.
    """
    modules = dict(probe.named_modules())
    if head is None:
        linear = [name for name, module in modules.items() if isinstance(module, nn.Linear)]
        if not linear:
            raise ValueError(
                "`head` must name the probe's last layer, as the probe has no nn.Linear."
            )
        head = linear[-1]
    if head not in modules:
        raise ValueError(
            f"`head` must name a module of the probe, got {head!r}; there are {list(modules)[1:]}."
        )
    if not head:
        raise ValueError("`head` must name a part of the probe, got the whole of it.")
    return head


def collect_features(
    probe: nn.Module, head: str, inputs: Any, forward_fn: Forward | None = None
) -> Tensor:
    """Return what the head gets as input, ``[N, D]``, in float64 on the CPU; the probe is only observed.

    Args:
        probe: The network.
        head: Name of the module that is its head.
        inputs: A tensor, or tuples, lists and dicts of tensors, ``N`` samples along the first axis.
        forward_fn: How to call the probe, ``forward_fn(probe, inputs)``; found out where ``None``.

    Raises:
        ValueError: If the head does not run once a pass, on one tensor ``[N, D]``.
    """
    seen: list[tuple[object, ...]] = []
    if forward_fn is None:
        # Before the hook, which would see it being tried.
        call_on(probe, first_samples(inputs, None, 2)[0])
    handle = probe.get_submodule(head).register_forward_pre_hook(
        lambda _module, args: seen.append(args)
    )
    device = next(probe.parameters()).device
    parts = []
    try:
        with observing(probe), torch.no_grad():
            for batch in split(inputs, BATCH):
                seen.clear()
                outputs_of(probe, moved(batch, device), forward_fn)
                parts.append(_features(seen, head, sample_count(batch)))
    finally:
        handle.remove()
    return torch.cat(parts)


def _features(seen: list[tuple[object, ...]], head: str, n: int) -> Tensor:
    if len(seen) == 1 and len(seen[0]) == 1:
        (features,) = seen[0]
        if isinstance(features, Tensor) and features.ndim == 2 and len(features) == n:
            return features.detach().double().cpu()
    got = [
        [list(x.shape) if isinstance(x, Tensor) else type(x).__name__ for x in args]
        for args in seen
    ]
    raise ValueError(
        f"`head` must run once a pass, on one tensor [N, D], and is the last nn.Linear where not given; {head!r} got "
        f"{got} for {n} samples."
    )


def fit_linear_head(
    features: Tensor, labels: Tensor, *, weight_decay: float, max_iter: int = 1000
) -> nn.Linear:
    r"""Fit a linear classifier to frozen features: the one minimum of a strictly convex loss, whatever the order.

    .. math:: \frac1N \sum_n -\log \mathrm{softmax}(W z_n + b)_{y_n} + \frac{\lambda}{2} \|W\|^2,
        \qquad z = (x - \bar x) / s

    with the features standardised; a feature that never varies is left alone. In float64 and from
    zero, by L-BFGS.

    Args:
        features: Shape ``[N, D]``, float64.
        labels: Classes from 0 on, none of them empty, shape ``[N]``.
        weight_decay: :math:`\lambda`, positive: without it the weights of separable classes have no
            bound.
        max_iter: Most steps of L-BFGS.

    Returns:
        A float64 layer from the features as they are (the standardisation is folded in) to the
        classes' logits.
    """
    mean, std = features.mean(0), features.std(0, correction=0)
    std = torch.where(std > 1e-12 * features.abs().amax(0), std, 1.0)
    z, C = (features - mean) / std, int(labels.max()) + 1
    W = torch.zeros(C, z.shape[1], dtype=torch.float64, requires_grad=True)
    b = torch.zeros(C, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS(
        [W, b],
        max_iter=max_iter,
        tolerance_grad=1e-9,
        tolerance_change=0,
        line_search_fn="strong_wolfe",
    )

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = cross_entropy(z @ W.T + b, labels) + 0.5 * weight_decay * W.square().sum()
        value.backward()
        return value

    with torch.inference_mode(False), torch.enable_grad():
        optimizer.step(loss)
    # No draw from the global generator.
    head = nn.utils.skip_init(nn.Linear, z.shape[1], C, dtype=torch.float64)
    with torch.no_grad():
        head.weight.copy_(W / std)
        head.bias.copy_(b - (W / std) @ mean)
    return head
