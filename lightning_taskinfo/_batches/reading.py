"""Which parts of a batch are its inputs and which its targets, and what the model makes of them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from lightning_taskinfo._batches.calls import (
    Call,
    NoLogitsError,
    has_forward,
    inner_model,
    logits_of,
    positional_names,
    predicts_the_next,
    settle_call,
    settled_call,
    shifted,
)
from lightning_taskinfo._batches.structure import (
    IGNORED,
    TARGETS,
    described,
    first_samples,
    sample_count,
    size,
    tensors,
)
from lightning_taskinfo._observe import observing

LABELED = ("labeled", "labelled")  # the part of a combined batch that has targets


@dataclass(frozen=True)
class BatchParts:
    """The parts of a batch, before a model has said what it takes.

    Attributes:
        inputs: All that is no target: a single field by itself, several by name.
        targets: The targets.
        named: All fields by name, targets included; empty for a pair.
        target: Name of the targets among them.
    """

    inputs: Any
    targets: Any
    named: Mapping[str, Any]
    target: str | None

    @property
    def fields(self) -> Any:
        """Everything that a model may take."""
        return self.named or self.inputs


def parted(batch: Any, model: nn.Module | None) -> BatchParts:
    """Tell the targets of a batch from its inputs, by their place or name.

    Raises:
        ValueError: If neither says it.
    """
    if _is_pair_of_tensors(batch):  # the most common kind first
        return BatchParts(batch[0], batch[1], {}, None)
    batch = labeled_part(batch)
    named = fields_of(batch, model)
    target = target_of(named)
    if target is not None:
        others = {name: value for name, value in named.items() if name != target}
        inputs: Any = others
        if len(others) == 1:
            (inputs,) = others.values()
        return BatchParts(inputs, named[target], named, target)
    if is_pair(batch):
        return BatchParts(batch[0], batch[1], {}, None)
    raise ValueError(
        f"A batch must be a pair (inputs, targets), or have one field of {', '.join(TARGETS)} and others, got "
        f"{described(batch)}; set `batch_fn` to a function of the batch that returns (inputs, targets)."
    )


def _is_pair_of_tensors(batch: Any) -> bool:
    if type(batch) not in (list, tuple) or len(batch) != 2:
        return False
    return isinstance(batch[0], Tensor) and isinstance(batch[1], Tensor)


def fields_of(batch: Any, model: nn.Module | None = None) -> dict[str, Any]:
    """Return the fields of a mapping, dataclass or named tuple that hold tensors; nothing for other batches.

    A tuple with a place for each argument of the model's ``forward``, labels among them, has their
    names.
    """
    if is_dataclass(batch) and not isinstance(batch, type):
        names = [field.name for field in fields(batch)]
        batch = {name: getattr(batch, name) for name in names}
    elif isinstance(batch, tuple) and hasattr(batch, "_asdict"):
        batch = batch._asdict()
    elif isinstance(batch, list | tuple) and len(batch) > 2 and model is not None:
        names = positional_names(model)[: len(batch)]
        if len(names) == len(batch) and names[-1] in TARGETS:
            batch = dict(zip(names, batch, strict=True))
    elif is_pair(batch, Mapping) and target_of(batch[0]):
        batch = batch[0]  # beside it something else than the labels, such as the samples' numbers
    named: dict[str, Any] = {}
    if isinstance(batch, Mapping):
        for name, value in batch.items():
            if _has_tensors(value):
                named[str(name)] = value
    return named


def _has_tensors(value: Any) -> bool:
    return next(tensors(value), None) is not None


def target_of(named: Mapping[str, Any]) -> str | None:
    """Return the name of the field that holds the targets, if there is exactly one and others beside it."""
    found = [name for name in named if name in TARGETS]
    if len(found) == 1 and len(named) > 1:
        return found[0]
    return None


def is_pair(batch: Any, kind: type = object) -> bool:
    """Whether a batch is a pair of inputs, of some kind, and a tensor of targets."""
    pair = isinstance(batch, list | tuple) and len(batch) == 2
    return pair and isinstance(batch[0], kind) and isinstance(batch[1], Tensor)


def labeled_part(batch: Any) -> Any:
    """Return the labelled part of a batch that a ``CombinedLoader`` has put together; other batches as they are.

    Example:
        >>> from torch import ones, zeros
        >>> labeled_part({"labeled": (ones(1), zeros(1)), "unlabeled": ones(2)})
        (tensor([1.]), tensor([0.]))
    """
    if not isinstance(batch, Mapping) or target_of(batch) is not None:
        return batch
    key = labeled_key(batch, is_labeled)
    return batch if key is None else batch[key]


def is_labeled(batch: Any) -> bool:
    """Whether a batch has targets that are told from its inputs."""
    return is_pair(batch) or target_of(fields_of(batch)) is not None


def labeled_key(parts: Mapping[Any, Any], is_labeled: Callable[[Any], bool]) -> Any | None:
    """Return the key of the labelled one of several parts: the only one that is, or the one that is called so."""
    found = [key for key, part in parts.items() if is_labeled(part)]
    called = [key for key in found if key in LABELED]
    if len(called) == 1:
        return called[0]
    return found[0] if len(found) == 1 else None


BatchFn: TypeAlias = Callable[[Any], Any]
Forward: TypeAlias = Callable[[Any, Any], Any]
FEW = 2  # samples that show how a model is called


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

    def read(self, model: nn.Module, batch: Any) -> tuple[Any, Tensor | None]:
        """Return inputs and targets of a batch.

        Args:
            model: The model that is trained on it.
            batch: The batch.

        Raises:
            ValueError: If it cannot be read, or the model cannot be called on it.
        """
        if self.batch_fn is not None:
            return read_by(self.batch_fn, batch)
        return read_batch(batch, model, self.forward_fn)

    def count(self, model: nn.Module, batch: Any) -> int:
        """Return the number of samples of a batch, without calling the model.

        Args:
            model: The model that is trained on it.
            batch: The batch.

        Raises:
            ValueError: If it cannot be read.
        """
        if self.batch_fn is not None:
            return sample_count(read_by(self.batch_fn, batch)[0])
        return sample_count(parted(batch, model).inputs)

    def outputs(self, model: nn.Module, inputs: Any) -> Tensor:
        """Return the model's outputs, one row for each sample.

        Args:
            model: The model.
            inputs: Inputs as :meth:`read` returns them.
        """
        return outputs_of(model, inputs, self.forward_fn)


def outputs_of(model: nn.Module, inputs: Any, forward_fn: Forward | None = None) -> Tensor:
    """Return a model's outputs: a tensor, or the ``logits`` of what it returns.

    Args:
        model: Any module.
        inputs: A tensor, or tuples, lists and dicts of tensors, ``N`` samples along the first axis.
        forward_fn: How to call the model, ``forward_fn(model, inputs)``; found out where ``None``.

    Raises:
        ValueError: If the model returns no logits.

    Example:
        >>> outputs_of(nn.Linear(3, 2), torch.zeros(5, 3)).shape
        torch.Size([5, 2])
    """
    if forward_fn is not None:
        return logits_of(forward_fn(model, inputs))
    return (settled_call(model, inputs) or call_on(model, inputs))(model, inputs)


def call_on(model: nn.Module, inputs: Any) -> Call:
    """Find out how a model is called on inputs; :func:`outputs_of` then calls it so, without trying anything.

    Args:
        model: Any module.
        inputs: As for :func:`outputs_of`.

    Raises:
        Exception: What the first and most natural way to call it raised, where none works.
    """
    if isinstance(inputs, Tensor) and has_forward(model):
        return Call("", "whole")
    known = settled_call(model, inputs)
    if known is not None:
        return known
    few, _ = first_samples(inputs, None, FEW)
    return settle_call(model, few)[0]


def read_batch(
    batch: Any,
    model: nn.Module | None = None,
    forward_fn: Forward | None = None,
) -> tuple[Any, Tensor | None]:
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
    if model is None and _is_pair_of_tensors(batch):
        return batch[0], batch[1]
    parts = parted(batch, model)
    reading = None if model is None else _reading(model, parts, forward_fn)
    if reading is None:
        return parts.inputs, parts.targets
    return reading.inputs_of(parts), reading.aligned(parts.targets)


def with_targets(
    model: nn.Module,
    inputs: Any,
    targets: Tensor | None,
    forward_fn: Forward | None = None,
) -> tuple[Any, Tensor | None]:
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


def read_by(batch_fn: BatchFn, batch: Any) -> tuple[Any, Tensor | None]:
    """Return what the user's function picks out of a batch.

    Raises:
        ValueError: If it fails, or returns anything but a pair.
    """
    try:
        picked: Any = batch_fn(batch)
    except Exception as error:
        raise ValueError(
            "`batch_fn` must return (inputs, targets) of every batch, got "
            f"{type(error).__name__} ({error}) for {described(batch)}."
        ) from error
    if not isinstance(picked, list | tuple) or len(picked) != 2:
        raise ValueError(
            f"`batch_fn` must return (inputs, targets) of every batch, got {described(picked)}."
        )
    return picked[0], picked[1]


@dataclass(frozen=True)
class Reading:
    """What was found out about a model and the batches it is trained on.

    Attributes:
        call: How the model is called; ``None`` where its user says so by a function.
        takes_targets: Whether the inputs of a pair are handed over together with the targets.
        follows: Whether a label belongs to the outputs at the token before it.
        prompt: Number of tokens that a learned prompt adds in front of a sequence.
    """

    call: Call | None = None
    takes_targets: bool = False
    follows: bool = False
    prompt: int = 0

    def inputs_of(self, parts: BatchParts) -> Any:
        """Return what the model is called with."""
        if self.call is not None and self.call.names is not None:
            return self.call.inputs_of(parts.fields)
        if self.takes_targets:
            return (parts.inputs, parts.targets)
        return parts.inputs

    def aligned(self, targets: Tensor | None) -> Tensor | None:
        """Return the targets where the outputs predict them."""
        if targets is None:
            return None
        if self.prompt:
            targets = nn.functional.pad(targets, (self.prompt, 0), value=IGNORED)
        return shifted(targets) if self.follows else targets


_readings: "WeakKeyDictionary[nn.Module, dict[Any, Reading]]" = WeakKeyDictionary()


def _reading(model: nn.Module, parts: BatchParts, forward_fn: Forward | None) -> Reading | None:
    """Return how batches of this kind are read; none if this one has no samples to find out with."""
    known = _readings.setdefault(model, {})
    kind = (tuple(parts.named) or type(parts.inputs), forward_fn)
    if kind not in known:
        if not _has_tensors(parts.inputs):
            raise ValueError(
                "the inputs of a batch must be tensors, samples along the first axis, or lists and dicts of them, got "
                f"{described(parts.inputs)}; set `batch_fn` to a function of the batch that returns such inputs and "
                "the targets."
            )
        if not size(parts.inputs):
            return None
        some = parts.fields if forward_fn is None else parts.inputs
        few, few_targets = first_samples(some, parts.targets, FEW)
        reading, outputs = _find_call(model, few, few_targets, parts.target, forward_fn)
        known[kind] = _find_alignment(reading, model, parts, outputs)
    return known[kind]


def _find_call(
    model: nn.Module,
    few: Any,
    few_targets: Any,
    target: str | None,
    forward_fn: Forward | None,
) -> tuple[Reading, Tensor]:
    """Call the model in every way that it may be meant; return the first that works, and its outputs."""
    try:
        if forward_fn is not None:
            with observing(model), torch.no_grad():
                return Reading(), logits_of(forward_fn(model, few))
        try:
            call, outputs = settle_call(model, few, target)
            return Reading(call), outputs
        except TypeError:
            if isinstance(few, Mapping) or len(positional_names(model)) < 2:
                raise
            # A model that returns its loss as well.
            call, outputs = settle_call(model, (few, few_targets))
            return Reading(call, takes_targets=True), outputs
    except NoLogitsError:
        raise
    except Exception as error:
        raise ValueError(
            f"calling the module on the inputs of a batch failed ({type(error).__name__}: {error}); set `forward_fn` "
            "to a function of (module, inputs) that returns the outputs, or `batch_fn` to one of the batch that "
            "returns (inputs, targets)."
        ) from error


def _find_alignment(
    reading: Reading,
    model: nn.Module,
    parts: BatchParts,
    outputs: Tensor,
) -> Reading:
    """Find out which of the outputs at a sequence's tokens predict which of its labels ``[N, T]``."""
    targets = parts.targets
    whole = isinstance(targets, Tensor) and not targets.is_floating_point()
    if not whole or targets.ndim != 2 or outputs.ndim != 3:
        return reading
    inner = inner_model(model)
    tokens = _tokens(parts)
    copied = shifted = False
    if tokens is not None:
        copied = _agree(targets, tokens)
        shifted = not copied and _agree(targets[:, :-1], tokens[:, 1:])
    if shifted:
        follows = False  # the dataset has done it already
    elif inner is None:
        follows = copied and parts.target is not None
    else:
        few, few_targets = first_samples(parts.fields, targets, FEW)
        if not isinstance(few, Mapping):
            few = {positional_names(inner)[0]: few}
        arguments = {name: x for name, x in few.items() if name != parts.target}
        follows = few_targets is not None and predicts_the_next(inner, arguments, few_targets)
    prompt = 0
    if inner is not None:
        prompt = max(0, outputs.shape[1] - targets.shape[1])
    return replace(reading, follows=follows, prompt=prompt)


def _tokens(parts: BatchParts) -> Tensor | None:
    """Return the tokens that labels may be a copy of."""
    inputs = parts.named.get("input_ids", parts.inputs)
    whole = [x for x in tensors(inputs) if not x.is_floating_point()]
    found = [x for x in whole if x.shape == parts.targets.shape]
    return found[0] if len(found) == 1 else None


def _agree(labels: Tensor, tokens: Tensor) -> bool:
    """Whether all labels that count are the tokens."""
    counted = labels != IGNORED
    equal = labels == tokens
    return bool(counted.any()) and bool(equal[counted].all())
