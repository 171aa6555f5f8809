"""What counts as an error, and as a disagreement: one class per sample, or one per token of a sequence."""

from typing import Literal, TypeAlias, get_args

from torch import Tensor

ErrorKind: TypeAlias = Literal["class", "token", "sequence"]
IGNORED = -100  # the label of padding, as in torch's cross entropy


def predictions(outputs: Tensor) -> Tensor:
    """Return the class with the highest score; -1, which is always wrong, where a score is no number.

    Args:
        outputs: Scores, shape ``[..., C]``.

    Example:
        >>> import torch
        >>> predictions(torch.tensor([[2.0, 1.0], [torch.nan, 1.0]]))
        tensor([ 0, -1])
    """
    return outputs.argmax(-1).masked_fill(outputs.isnan().any(-1), -1)


def differences(predicted: Tensor, reference: Tensor, counted: Tensor, kind: ErrorKind) -> Tensor:
    """Return how far predictions differ from labels, or from another network's predictions, for each sample.

    For one class per sample, or a whole sequence, that is 0 or 1; for tokens, the share that
    differs. All three obey the triangle inequality, on which the bound for the network itself
    rests.

    Args:
        predicted: Predicted classes, shape ``[N]`` or ``[N, T]``.
        reference: What they are compared with, of the same shape.
        counted: Where a difference counts, of the same shape, boolean.
        kind: ``"class"``, ``"token"`` (share of the tokens that differ) or ``"sequence"`` (whether
            any does).

    Returns:
        A value in [0, 1] for each sample, float64, shape ``[N]``.

    Example:
        >>> import torch
        >>> ours, theirs = torch.tensor([[1, 2, 3]]), torch.tensor([[1, 5, -100]])
        >>> differences(ours, theirs, theirs != -100, "token")
        tensor([0.5000], dtype=torch.float64)
        >>> differences(ours, theirs, theirs != -100, "sequence")
        tensor([1.], dtype=torch.float64)
    """
    differs = (predicted != reference) & counted
    if kind == "class":
        return differs.double()
    if kind == "sequence":
        return differs.any(-1).double()
    return differs.sum(-1).double() / counted.sum(-1).clamp_min(1)


def zero_one_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return 1 for each wrong class and 0 for each right one.

    Args:
        outputs: Scores of the classes, shape ``[N, C]``; a sample with a score that is no number is
            wrong.
        targets: Indices of the right classes, integers of shape ``[N]``.

    Raises:
        ValueError: If the shapes do not fit, or the targets are no integers.

    Example:
        >>> import torch
        >>> zero_one_loss(torch.tensor([[2.0, 1.0], [2.0, 1.0]]), torch.tensor([0, 1]))
        tensor([0., 1.])
    """
    if outputs.ndim != 2 or targets.shape != outputs.shape[:1]:
        shapes = f"{list(outputs.shape)} and {list(targets.shape)}"
        raise ValueError(f"`outputs` and `targets` must have shapes [N, C] and [N], got {shapes}.")
    check_labels("`targets`", targets)
    return (predictions(outputs) != targets).to(outputs.dtype)


def check_labels(what: str, targets: Tensor) -> None:
    """Raise a ``ValueError`` for targets that are no class indices."""
    if targets.is_floating_point() or targets.is_complex():
        raise ValueError(
            f"{what} must be class indices (integers) of shape [N], got {targets.dtype} of shape {list(targets.shape)}."
        )


def check_error(kind: ErrorKind, outputs: Tensor, targets: Tensor, all_targets: Tensor) -> None:
    """Raise a ``ValueError`` if outputs and labels do not fit the kind of error, before anything is measured.

    Args:
        kind: What the user counts.
        outputs: Outputs for a few samples.
        targets: The labels of the same samples.
        all_targets: The labels of all samples.
    """
    if kind not in get_args(ErrorKind):
        raise ValueError(f"`error` must be one of {get_args(ErrorKind)}, got {kind!r}.")
    check_labels("targets of `data`", targets)
    shape = list(outputs.shape)
    if kind == "class" and outputs.ndim == 3 and targets.ndim == 2:
        raise ValueError(
            f"`error` must be 'token' or 'sequence' where `model` returns {shape}, got 'class'."
        )
    wanted = "[N, C]" if kind == "class" else "[N, T, V]"
    if outputs.ndim != wanted.count(",") + 1 or outputs.shape[-1] < 2:
        raise ValueError(
            f"`model` must return scores {wanted} of at least 2 classes for `error` = {kind!r}, got {shape}."
        )
    if targets.shape != outputs.shape[:-1]:
        raise ValueError(
            f"targets of `data` must have shape {shape[:-1]} where `model` returns {shape}, got {list(targets.shape)}."
        )
    named = all_targets if kind == "class" else all_targets[all_targets != IGNORED]
    low, high = int(named.min()), int(named.max())
    C = outputs.shape[-1]
    if low < 0 or high >= C:
        wrong = low if low < 0 else high
        raise ValueError(
            f"targets of `data` must be classes from 0 to {C - 1}, as `model` returns {C} scores, got {wrong}."
        )
