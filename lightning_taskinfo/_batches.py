"""What a batch is, in one place: its inputs, its targets, and how a model is called on them.

Everything that looks at batches reads them here: callbacks, certificates, metrics, task embeddings and transfer. ::

    reader = Reader(batch_fn, forward_fn)  # both `None` unless the user has given them
    inputs, targets = reader.read(model, batch)  # raises a ValueError that says what to do
    outputs = reader.outputs(model, inputs)  # a tensor [N, ..., C], one row for each sample

``inputs`` is a tensor, or tuples, lists and dicts of tensors, samples along the first axis: :func:`take`,
:func:`first_samples`, :func:`joined`, :func:`sample_count` and :func:`tensors` work on all of them. ``targets`` stand
where the outputs predict them: the labels of a causal language model are shifted as its own loss does it, and padding
is -100. Engines of ``fisher`` and the likelihoods take both as they are; hand ``reader.outputs`` to them as
``forward_fn``, or leave it out: :func:`outputs_of` is the default.

How the model is called is found out with the first batch, by calling it on two samples inside ``observing``, and
remembered as long as the model lives.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from operator import itemgetter
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from lightning_taskinfo._hugging_face import IGNORED, inner_model, predicts_the_next, shifted
from lightning_taskinfo._model_calls import (
    Call,
    NoLogitsError,
    has_forward,
    logits_of,
    positional_names,
    settle_call,
    settled_call,
)
from lightning_taskinfo._observe import observing

BatchFn: TypeAlias = Callable[[Any], Any]
Forward: TypeAlias = Callable[[Any, Any], Any]
TARGETS = ("targets", "target", "labels", "label", "y")
LABELED = ("labeled", "labelled")  # the part of a combined batch that has targets
FEW = 2  # samples that show how a model is called


@dataclass(frozen=True)
class Reader:
    """How batches are read, and how a model is called on their inputs.

    Args:
        batch_fn: Picks ``(inputs, targets)`` out of a batch, targets aligned with the outputs; batches are understood
            by themselves where ``None``.
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
        return sample_count(_parted(batch, model).inputs)

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
    return settled_call(model, inputs) or settle_call(model, first_samples(inputs, None, FEW)[0])[0]


def read_batch(
    batch: Any, model: nn.Module | None = None, forward_fn: Forward | None = None
) -> tuple[Any, Tensor | None]:
    """Return inputs and targets of a batch whose meaning is plain.

    That is a pair, or a mapping or dataclass with one field for the targets (``targets``, ``target``, ``labels``,
    ``label`` or ``y``); or a mapping of such batches of which one is labelled, as a ``CombinedLoader`` makes them.

    Args:
        batch: The batch.
        model: The model that is trained on it. It decides which fields are its inputs, and whether labels are those of
            the next token; without a model all other fields are inputs, a single one by itself.
        forward_fn: How the user calls the model, ``forward_fn(model, inputs)``, with all other fields as inputs.

    Raises:
        ValueError: If the batch is anything else, or the model cannot be called on it.

    Example:
        >>> read_batch({"image": torch.ones(1, 2), "label": torch.tensor([3])})
        (tensor([[1., 1.]]), tensor([3]))
    """
    parts = _parted(batch, model)
    reading = None if model is None else _reading(model, parts, forward_fn)
    if reading is None:
        return parts.inputs, parts.targets
    return reading.inputs_of(parts), reading.aligned(parts.targets)


def with_targets(
    model: nn.Module, inputs: Any, targets: Tensor | None, forward_fn: Forward | None = None
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


@dataclass(frozen=True)
class Parts:
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


def _parted(batch: Any, model: nn.Module | None) -> Parts:
    """Tell the targets of a batch from its inputs, by their place or name.

    Raises:
        ValueError: If neither says it.
    """
    batch = labeled_part(batch)
    named = fields_of(batch, model)
    target = target_of(named)
    if target is not None:
        others = {name: value for name, value in named.items() if name != target}
        inputs = next(iter(others.values())) if len(others) == 1 else others
        return Parts(inputs, named[target], named, target)
    if is_pair(batch):
        return Parts(batch[0], batch[1], {}, None)
    raise ValueError(
        f"A batch must be a pair (inputs, targets), or have one field of {', '.join(TARGETS)} and others, got "
        f"{described(batch)}; set `batch_fn` to a function of the batch that returns (inputs, targets)."
    )


# How batches of one kind are read for one model: found out with the first of them.


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

    def inputs_of(self, parts: Parts) -> Any:
        """Return what the model is called with."""
        if self.call is not None and self.call.names is not None:
            return self.call.inputs_of(parts.fields)
        return (parts.inputs, parts.targets) if self.takes_targets else parts.inputs

    def aligned(self, targets: Tensor | None) -> Tensor | None:
        """Return the targets where the outputs predict them."""
        if targets is None:
            return None
        if self.prompt:
            targets = nn.functional.pad(targets, (self.prompt, 0), value=IGNORED)
        return shifted(targets) if self.follows else targets


_readings: "WeakKeyDictionary[nn.Module, dict[Any, Reading]]" = WeakKeyDictionary()


def _reading(model: nn.Module, parts: Parts, forward_fn: Forward | None) -> Reading | None:
    """Return how batches of this kind are read; none if this one has no samples to find out with."""
    known = _readings.setdefault(model, {})
    kind = (tuple(parts.named) or type(parts.inputs), forward_fn)
    if kind not in known:
        if not any(True for _ in tensors(parts.inputs)):
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
    model: nn.Module, few: Any, few_targets: Any, target: str | None, forward_fn: Forward | None
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
            call, outputs = settle_call(
                model, (few, few_targets)
            )  # a model that returns its loss as well
            return Reading(call, takes_targets=True), outputs
    except NoLogitsError:
        raise
    except Exception as error:
        raise ValueError(
            f"calling the module on the inputs of a batch failed ({type(error).__name__}: {error}); set `forward_fn` "
            "to a function of (module, inputs) that returns the outputs, or `batch_fn` to one of the batch that "
            "returns (inputs, targets)."
        ) from error


def _find_alignment(reading: Reading, model: nn.Module, parts: Parts, outputs: Tensor) -> Reading:
    """Find out which of the outputs at a sequence's tokens predict which of its labels ``[N, T]``."""
    targets = parts.targets
    whole = isinstance(targets, Tensor) and not targets.is_floating_point()
    if not whole or targets.ndim != 2 or outputs.ndim != 3:
        return reading
    inner = inner_model(model)
    tokens = _tokens(parts)
    copied = tokens is not None and _agree(targets, tokens)
    if tokens is not None and not copied and _agree(targets[:, :-1], tokens[:, 1:]):
        follows = False  # the dataset has shifted them already
    elif inner is None:
        follows = copied and parts.target is not None
    else:
        few, few_targets = first_samples(parts.fields, targets, FEW)
        few = few if isinstance(few, Mapping) else {positional_names(inner)[0]: few}
        arguments = {name: x for name, x in few.items() if name != parts.target}
        follows = few_targets is not None and predicts_the_next(inner, arguments, few_targets)
    prompt = 0 if inner is None else max(0, outputs.shape[1] - targets.shape[1])
    return replace(reading, follows=follows, prompt=prompt)


def _tokens(parts: Parts) -> Tensor | None:
    """Return the tokens that labels may be a copy of."""
    inputs = parts.named.get("input_ids", parts.inputs)
    found = [
        x for x in tensors(inputs) if x.shape == parts.targets.shape and not x.is_floating_point()
    ]
    return found[0] if len(found) == 1 else None


def _agree(labels: Tensor, tokens: Tensor) -> bool:
    """Whether all labels that count are the tokens."""
    counted = labels != IGNORED
    return bool(counted.any()) and bool((labels == tokens)[counted].all())


def fields_of(batch: Any, model: nn.Module | None = None) -> dict[str, Any]:
    """Return the fields of a mapping, dataclass or named tuple that hold tensors; nothing for other batches.

    A tuple with a place for each argument of the model's ``forward``, labels among them, has their names.
    """
    if is_dataclass(batch) and not isinstance(batch, type):
        batch = {field.name: getattr(batch, field.name) for field in fields(batch)}
    elif isinstance(batch, tuple) and hasattr(batch, "_asdict"):
        batch = batch._asdict()
    elif isinstance(batch, list | tuple) and len(batch) > 2 and model is not None:
        names = positional_names(model)[: len(batch)]
        if len(names) == len(batch) and names[-1] in TARGETS:
            batch = dict(zip(names, batch, strict=True))
    elif is_pair(batch, Mapping) and target_of(batch[0]):
        batch = batch[0]  # beside it something else than the labels, such as the samples' numbers
    if not isinstance(batch, Mapping):
        return {}
    return {str(name): value for name, value in batch.items() if any(True for _ in tensors(value))}


def target_of(named: Mapping[str, Any]) -> str | None:
    """Return the name of the field that holds the targets, if there is exactly one and others beside it."""
    found = [name for name in named if name in TARGETS]
    return found[0] if len(found) == 1 and len(named) > 1 else None


def is_pair(batch: Any, kind: type = object) -> bool:
    """Whether a batch is a pair of inputs, of some kind, and a tensor of targets."""
    pair = isinstance(batch, list | tuple) and len(batch) == 2
    return pair and isinstance(batch[0], kind) and isinstance(batch[1], Tensor)


def labeled_part(batch: Any) -> Any:
    """Return the labelled part of a batch that a ``CombinedLoader`` has put together; other batches as they are.

    Example:
        >>> labeled_part({"labeled": (torch.ones(1), torch.zeros(1)), "unlabeled": torch.ones(2)})
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


# Batches of any structure, as torch's loaders make them.


def take(inputs: Any, pick: Callable[[Tensor], Tensor]) -> Any:
    """Apply ``pick`` to every tensor of ``inputs`` and keep the structure.

    Example:
        >>> take({"x": torch.arange(3), "name": "a"}, lambda x: x[:1])
        {'x': tensor([0]), 'name': 'a'}
    """
    if isinstance(inputs, Tensor):
        return pick(inputs)
    if isinstance(inputs, Mapping):
        return {key: take(value, pick) for key, value in inputs.items()}
    if isinstance(inputs, tuple) and hasattr(inputs, "_fields"):
        return type(inputs)(*(take(value, pick) for value in inputs))
    if isinstance(inputs, list | tuple):
        return type(inputs)(take(value, pick) for value in inputs)
    return inputs


def moved(inputs: Any, device: torch.device) -> Any:
    """Return inputs on a device."""
    return take(inputs, lambda x: x.to(device))


def split(inputs: Any, size: int) -> Iterator[Any]:
    """Yield inputs in parts of at most so many samples.

    Example:
        >>> [part["x"].tolist() for part in split({"x": torch.arange(3)}, 2)]
        [[0, 1], [2]]
    """
    for start in range(0, sample_count(inputs), size):
        yield take(inputs, itemgetter(slice(start, start + size)))


def tensors(inputs: Any) -> Iterator[Tensor]:
    """Yield every tensor of ``inputs``."""
    if isinstance(inputs, Tensor):
        yield inputs
    elif isinstance(inputs, Mapping):
        for value in inputs.values():
            yield from tensors(value)
    elif isinstance(inputs, list | tuple):
        for value in inputs:
            yield from tensors(value)


def described(batch: Any) -> str:
    """Return in words what a batch is that was to be something else.

    Example:
        >>> described({"image": torch.zeros(2), "label": 3}), described((1, "a", None))
        ('dict with image, label', 'tuple of int, str, NoneType')
    """
    kind = type(batch).__name__
    if is_dataclass(batch):
        return f"{kind} with {', '.join(field.name for field in fields(batch)) or 'nothing'}"
    if names := getattr(batch, "_fields", ()):  # of a named tuple
        return f"{kind} with {', '.join(names)}"
    if isinstance(batch, Mapping):
        return f"{kind} with {', '.join(map(str, batch)) or 'nothing'}"
    if isinstance(batch, list | tuple):
        return f"{kind} of {', '.join(type(part).__name__ for part in batch) or 'nothing'}"
    return kind


def joined(parts: list[Any]) -> Any:
    """Return batches of the same structure as one; sequences with an ``attention_mask`` are padded to one length.

    Example:
        >>> joined([{"x": torch.zeros(2)}, {"x": torch.ones(1)}])
        {'x': tensor([0., 0., 1.])}
    """
    if isinstance(parts[0], Tensor):
        return torch.cat(parts)
    if isinstance(parts[0], Mapping):
        parts = _of_one_length(parts)
        return {key: joined([part[key] for part in parts]) for key in parts[0]}
    if isinstance(parts[0], list | tuple):
        groups = [joined(list(group)) for group in zip(*parts, strict=True)]
        return type(parts[0])(*groups) if hasattr(parts[0], "_fields") else type(parts[0])(groups)
    return parts[0]


def joined_targets(parts: list[Tensor]) -> Tensor:
    """Return the targets of batches as one; labels of tokens are padded to one length with -100.

    Example:
        >>> joined_targets([torch.tensor([[1, 2]]), torch.tensor([[3]])])
        tensor([[   1,    2],
                [   3, -100]])
    """
    if parts[0].ndim == 2 and not parts[0].is_floating_point():
        longest = max(part.shape[1] for part in parts)
        parts = [_longer(part, longest, IGNORED) for part in parts]
    return torch.cat(parts)


def _of_one_length(parts: list[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return sequences of tokens with more padding, which their mask leaves out; other batches as they are."""
    masks = [part.get("attention_mask") for part in parts]
    lengths = [mask.shape[1] for mask in masks if isinstance(mask, Tensor) and mask.ndim == 2]
    if len(lengths) < len(parts) or len({*lengths}) == 1:
        return parts
    longest = max(lengths)
    return [
        {
            name: _longer(x, longest, IGNORED if name in TARGETS else 0)
            if isinstance(x, Tensor) and x.ndim > 1 and x.shape[1] == length
            else x
            for name, x in part.items()
        }
        for part, length in zip(parts, lengths, strict=True)
    ]


def _longer(x: Tensor, length: int, value: int) -> Tensor:
    """Return ``[N, T, ...]`` with so many places on the second axis, the new ones filled with a value."""
    behind = [0, 0] * (x.ndim - 2)
    return nn.functional.pad(x, (*behind, 0, length - x.shape[1]), value=value)


def sample_count(inputs: Any) -> int:
    """Return the number of samples: the common length of all tensors of ``inputs``.

    Raises:
        ValueError: If there is no tensor, or the lengths differ.
    """
    lengths = {len(x) if x.dim() else 0 for x in tensors(inputs)}
    if not lengths:
        found = type(inputs).__name__ + (
            "" if not isinstance(inputs, list | tuple | Mapping) else " without tensors"
        )
        raise ValueError(
            f"`inputs` must be a tensor, or a tuple, list or dict of tensors, got {found}."
        )
    if len(lengths) != 1 or 0 in lengths:
        raise ValueError(
            f"`inputs` must hold tensors with the same, positive number of samples along axis 0, got {sorted(lengths)}."
        )
    return lengths.pop()


def first_samples(inputs: Any, targets: Tensor | None, n: int) -> tuple[Any, Tensor | None]:
    """Return the first ``n`` samples of a batch."""
    return take(inputs, lambda x: x[:n]), None if targets is None else targets[:n]


def filled_up(inputs: Any, targets: Tensor | None, n: int) -> tuple[Any, Tensor | None]:
    """Return ``n`` samples: those of a batch, and again from the first.

    Example:
        >>> import torch
        >>> filled_up(torch.tensor([[1.0], [2.0]]), torch.tensor([0, 1]), 3)[1]
        tensor([0, 1, 0])
    """
    if size(inputs) == n:
        return inputs, targets
    rows = torch.arange(n, device="cpu") % size(inputs)
    return take(inputs, lambda x: x[rows.to(x.device)]), None if targets is None else targets[
        rows.to(targets.device)
    ]


def size(inputs: Any) -> int:
    """Return the number of samples, which may be 0."""
    if any(x.ndim == 0 for x in tensors(inputs)):
        raise ValueError(
            "inputs must have an axis of samples, got a tensor without axes; `batch_fn` can leave it out."
        )
    return max(len(x) for x in tensors(inputs))
