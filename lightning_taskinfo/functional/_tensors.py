"""What a tensor must be, or looks like."""

import torch
from torch import Tensor


def check_finite(argument: str, tensor: Tensor) -> None:
    """Raise a ``ValueError`` if ``tensor`` holds NaN or infinity."""
    # A sum is far cheaper than a look at every value, and finite only where all of them are.
    if not (torch.isfinite(tensor.sum()) or torch.isfinite(tensor).all()):
        count = int((~torch.isfinite(tensor)).sum())
        raise ValueError(
            f"`{argument}` must be finite, got {count} values that are not: clean the data."
        )


def check_same_shape(outputs: Tensor, targets: Tensor | None) -> None:
    """Raise a ``ValueError`` if there are targets of another shape than the outputs have."""
    if targets is not None and targets.shape != outputs.shape:
        pick = "module(x).squeeze(-1)" if outputs.shape[-1:] == (1,) else "module(x)[..., 0]"
        raise ValueError(
            f"`targets` must have the outputs' shape {list(outputs.shape)}, got {list(targets.shape)}; "
            "an extra or missing axis would silently broadcast. A callback's `forward_fn` or `batch_fn` fixes it, "
            f"such as `lambda module, x: {pick}`, or whatever picks the prediction."
        )


def look_like_probabilities(outputs: Tensor) -> bool:
    """Whether ``outputs``, shape ``[N, ..., C]`` with ``C > 1``, are not negative and add up to 1 over classes.

    Half precision rounds sums to about a hundredth. Logits of any use do not do this for every
    sample.

    Example:
        >>> look_like_probabilities(torch.tensor([[0.25, 0.75]])), look_like_probabilities(torch.tensor([[0.5, 0.75]]))
        (True, False)
    """
    rows = outputs.detach().float()
    return bool(
        rows.shape[-1] > 1 and (rows >= 0).all() and ((rows.sum(-1) - 1).abs() < 0.01).all()
    )
