"""Inputs and targets of any batch, read in one place.

Everything that looks at batches reads them here: callbacks, certificates, metrics, task embeddings
and transfer. ::

    reader = Reader(batch_fn, forward_fn)  # both `None` unless the user has given them
    inputs, targets = reader.read(model, batch)  # raises a ValueError that says what to do
    outputs = reader.outputs(model, inputs)  # a tensor [N, ..., C], one row for each sample

``inputs`` is a tensor, or tuples, lists and dicts of tensors, samples along the first axis: the
functions of ``_nested`` work on all of them. ``targets`` stand where the outputs predict them: the
labels of a causal language model are shifted as its own loss does it (``_next_token``), and padding
is -100. Engines of ``fisher`` and the likelihoods take both as they are; hand ``reader.outputs`` to
them as ``forward_fn``, or leave it out: ``outputs_of`` of ``_calls`` is the default.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_taskinfo._calls import (
    FEW,
    Call,
    Forward,
    NoLogitsError,
    inner_model,
    kind_of,
    known_calls,
    logits_of,
    outputs_of,
    settle_call,
)
from lightning_taskinfo._fields import Parts, labeled_part, numbers_of, parted
from lightning_taskinfo._nested import IGNORED, TARGETS, Pair, described, has_tensors, pick, size
from lightning_taskinfo._next_token import follows
from lightning_taskinfo._observe import observing

BatchFn = Callable[[Any], Any]


@dataclass(frozen=True)
class Reader:
    """How batches are read, and how a model is called on their inputs.

    Args:
        batch_fn: Picks ``(inputs, targets)`` out of a batch, targets aligned with the outputs;
            batches are understood by themselves where ``None``.
        forward_fn: How to get the outputs, ``forward_fn(model, inputs)``; found out where ``None``.
    """

    batch_fn: BatchFn | None = None
    forward_fn: Forward | None = None

    def read(self, model: nn.Module | None, batch: Any) -> Pair:
        """Return inputs and targets of a batch.

        Args:
            model: The model that is trained on it; see :func:`read_batch` for what is done without.
            batch: The batch.

        Raises:
            ValueError: If it cannot be read, or the model cannot be called on it.
        """
        if self.batch_fn is not None:
            return read_by(self.batch_fn, batch)
        return read_batch(batch, model, self.forward_fn)

    def outputs(self, model: nn.Module, inputs: Any) -> Tensor:
        """Return the model's outputs, one row for each sample.

        Args:
            model: The model.
            inputs: Inputs as :meth:`read` returns them.
        """
        return outputs_of(model, inputs, self.forward_fn)


def read_by(
    batch_fn: BatchFn,
    batch: Any,
) -> Pair:
    """Return what the user's function picks out of a batch.

    Raises:
        ValueError: If it fails, or returns anything but a pair.
    """
    rule = "`batch_fn` must return (inputs, targets) of every batch"
    try:
        picked = batch_fn(batch)
    except Exception as error:
        found = f"{type(error).__name__} ({error}) for {described(batch)}"
        raise ValueError(f"{rule}, got {found}.") from error
    if not isinstance(picked, list | tuple) or len(picked) != 2:
        raise ValueError(f"{rule}, got {described(picked)}.")
    return picked[0], picked[1]


def read_batch(
    batch: Any,
    model: nn.Module | None = None,
    forward_fn: Forward | None = None,
) -> Pair:
    """Return inputs and targets of a batch whose meaning is plain.

    That is a pair, or a mapping or dataclass with one field for the targets (``targets``,
    ``target``, ``labels``, ``label`` or ``y``); or a mapping of such batches of which one is
    labelled, as a ``CombinedLoader`` makes them.

    Args:
        batch: The batch.
        model: The model that is trained on it. It decides which fields are its inputs, and whether
            labels are those of the next token; without a model all other fields are inputs, a
            single one by itself.
        forward_fn: How the user calls the model, ``forward_fn(model, inputs)``, with all other
            fields as inputs.

    Raises:
        ValueError: If the batch is anything else, or the model cannot be called on it.

    Example:
        >>> read_batch({"image": torch.ones(1, 2), "label": torch.tensor([3])})
        (tensor([[1., 1.]]), tensor([3]))
    """
    batch = labeled_part(batch)
    parts = parted(batch)
    if parts is None:
        raise ValueError(
            f"A batch must be a pair (inputs, targets), or have one field of {', '.join(TARGETS)} and others, got "
            f"{described(batch)}; set `batch_fn` to a function of the batch that returns (inputs, targets)."
        )
    if model is None:
        return parts.inputs, parts.targets
    known = known_calls.setdefault(model, {})
    numbers = () if parts.target is None else numbers_of(batch)
    kind = ("batch", kind_of(parts.fields), parts.target, numbers, forward_fn)
    if kind not in known:
        if forward_fn is None:
            _check_numbers(model, numbers)
        if not has_tensors(parts.inputs):
            raise ValueError(
                "the inputs of a batch must be tensors, samples along the first axis, or lists and dicts of them, got "
                f"{described(parts.inputs)}; set `batch_fn` to a function of the batch that returns such inputs and "
                "the targets."
            )
        if not size(parts.inputs):  # no samples to find out with
            return parts.inputs, parts.targets
        known[kind] = _found_out(model, parts, forward_fn)
    return known[kind].read(parts)


def with_targets(
    model: nn.Module,
    inputs: Any,
    targets: Tensor | None,
    forward_fn: Forward | None = None,
) -> Pair:
    """Return inputs and targets that were given to a function; ``labels`` of a dict are targets if there are no others.

    Args:
        model: The model.
        inputs: Inputs, or a batch of Hugging Face with its labels.
        targets: The targets, if they are given apart.
        forward_fn: How the user calls the model.
    """
    if targets is None and isinstance(inputs, Mapping) and "labels" in inputs and len(inputs) > 1:
        return read_batch(inputs, model, forward_fn)
    return inputs, targets


def _found_out(
    model: nn.Module,
    parts: Parts,
    forward_fn: Forward | None,
) -> Call:
    """Call the model in every way that it may be meant; the first that works says how batches are read."""
    few: Parts = pick(parts, _telling_rows(parts.targets))
    try:
        if forward_fn is None:
            call, outputs = settle_call(model, few)
        else:
            call = Call()
            with observing(model), torch.no_grad():
                outputs = logits_of(forward_fn(model, few.inputs))
    except NoLogitsError:
        raise
    except Exception as error:
        raise ValueError(
            f"calling the module on the inputs of a batch failed ({type(error).__name__}: {error}); set `forward_fn` "
            "to a function of (module, inputs) that returns the outputs, or `batch_fn` to one of the batch that "
            "returns (inputs, targets)."
        ) from error
    labels = parts.targets
    if labels.is_floating_point():
        return call
    inner = inner_model(model)
    if forward_fn is None:
        _check_alignment(inner, outputs)
    if labels.ndim != 2 or outputs.ndim != 3:
        return call
    prompt = 0
    adapter = getattr(inner, "active_peft_config", None)
    if getattr(adapter, "is_prompt_learning", False):
        prompt = max(0, outputs.shape[1] - labels.shape[1])
    return replace(call, follows=follows(inner, parts, few), prompt=prompt)


def _check_numbers(model: nn.Module, numbers: tuple[str, ...]) -> None:
    """Refuse numbers that a model takes beside the samples: what is read of a batch are tensors."""
    for module in (model, inner_model(model) or model):
        taken = inspect.signature(module.forward).parameters.keys() & {*numbers}
        if taken:
            raise ValueError(
                f"the field {min(taken)!r} of a batch is a number that `forward` takes, and only tensors are handed "
                "over: make it a tensor with one value for each sample, or set `forward_fn`."
            )


def _check_alignment(inner: nn.Module | None, outputs: Tensor) -> None:
    """Refuse models of Hugging Face whose labels do not stand at the places of their outputs."""
    kind = type(inner).__name__
    if kind.endswith(("ForCTC", "DoubleHeadsModel")):
        raise ValueError(
            f"{kind} has labels that are not those of the outputs at their places: set `batch_fn` to a function "
            "of the batch that returns (inputs, targets) with one target for each output."
        )
    classes = getattr(getattr(inner, "config", None), "num_labels", None)
    if outputs.ndim == 4 and outputs.shape[1] == classes:
        raise ValueError(
            f"the outputs {list(outputs.shape)} of {kind} have their classes on axis 1: set `forward_fn` to a function "
            "of (model, inputs) that returns them on the last axis, and as many rows and columns as the labels have: "
            "`interpolate(model(**inputs).logits, size).movedim(1, -1)`."
        )


def _telling_rows(targets: Tensor) -> slice | Tensor:
    """Return the first samples, or, of sequences, those with the most labels that count."""
    if targets.ndim != 2:
        return slice(FEW)
    counts = (targets != IGNORED).sum(1)
    return counts.argsort(descending=True, stable=True)[:FEW]
