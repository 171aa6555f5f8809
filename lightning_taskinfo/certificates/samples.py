"""The samples a certificate is about: all of them, each once, as they are."""

from typing import Any, TypeAlias

from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_taskinfo._batches import described, joined, sample_count, tensors
from lightning_taskinfo.functional._tensors import check_finite

Data: TypeAlias = tuple[Any, Tensor] | Dataset[Any] | DataLoader[Any]


def read_samples(data: Data, *, argument: str = "data") -> tuple[Any, Tensor]:
    """Return all inputs and targets.

    A loader's dataset is read in its own order, without the loader's sampler: repeated, reweighted or dropped samples
    would not be the independent draws that a certificate speaks of. A random augmentation is applied once.

    Args:
        data: ``(inputs, targets)``, also as a list; or a dataset of such pairs, or a loader of one.
        argument: What the caller calls it, for messages.

    Raises:
        ValueError: If it is something else, has fewer than 8 samples, or values that are not finite.
    """
    if isinstance(data, str):
        wanted = "(inputs, targets), a dataset of such pairs or a loader"
        raise ValueError(
            f"`{argument}` must be {wanted}, got {data!r}; `tasks.prepare_task({data!r}).data` is such a pair."
        )
    data = _pair_of(data)
    if isinstance(data, tuple) or (isinstance(data, list) and len(data) == 2 and isinstance(data[0], Tensor)):
        inputs, targets = data
    else:
        loader = data if isinstance(data, DataLoader) else DataLoader(data, batch_size=256)
        batches = list(DataLoader(loader.dataset, batch_size=256, collate_fn=loader.collate_fn))
        if not batches:
            raise ValueError(f"`{argument}` must hold at least 8 samples, got 0.")
        if not (isinstance(batches[0], list | tuple) and len(batches[0]) == 2):
            raise ValueError(f"`{argument}` must hold pairs (inputs, targets), got {described(batches[0])}.")
        inputs, targets = (joined([batch[part] for batch in batches]) for part in (0, 1))
    if not isinstance(targets, Tensor):
        raise ValueError(f"`{argument}` must hold a tensor of targets, got {type(targets).__name__}.")
    n = sample_count(inputs) if len(targets) else 0
    if n != len(targets):
        raise ValueError(f"`{argument}` must hold a target for each input, got {len(targets)} for {n}.")
    if n < 8:
        raise ValueError(f"`{argument}` must hold at least 8 samples, got {n}.")
    for values in (*tensors(inputs), targets):
        check_finite(argument, values)
    return inputs, targets


def _pair_of(data: Any) -> Any:
    """The pair of something like a ``tasks.Task``, or what was given."""
    own = getattr(data, "data", None)
    return own if isinstance(own, tuple) and len(own) == 2 else data


def read_tensors(data: Data, *, argument: str = "data") -> tuple[Tensor, Tensor]:
    """Return all inputs and targets where inputs have to be one tensor.

    Args:
        data: As for :func:`read_samples`.
        argument: What the caller calls it, for messages.
    """
    inputs, targets = read_samples(data, argument=argument)
    if not isinstance(inputs, Tensor):
        raise ValueError(f"`{argument}` must hold one tensor of inputs, got {type(inputs).__name__}.")
    return inputs, targets


def check_labels(what: str, targets: Tensor) -> None:
    """Raise a ``ValueError`` for targets that are no class indices."""
    if targets.is_floating_point() or targets.is_complex():
        raise ValueError(
            f"{what} must be class indices (integers) of shape [N], got {targets.dtype} of shape {list(targets.shape)}."
        )


def zero_one_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return 1 for each wrong class and 0 for each right one.

    Args:
        outputs: Scores of the classes, shape ``[N, C]``; a sample with a score that is no number is wrong.
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
    wrong = (outputs.argmax(1) != targets) | outputs.isnan().any(1)
    return wrong.to(outputs.dtype)
