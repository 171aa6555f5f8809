"""How strongly the terms of a loss pull at the weights."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor


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
        return torch.stack(norms).norm().item() if norms else 0.0

    return {name: norm(term) for name, term in terms.items()}
