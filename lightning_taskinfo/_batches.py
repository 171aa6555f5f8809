"""What a batch is, in one place: its inputs, its targets, and how a model is called on them.

Everything that looks at batches reads them here: callbacks, certificates, metrics, task embeddings
and transfer. ::

    reader = Reader(batch_fn, forward_fn)  # both `None` unless the user has given them
    inputs, targets = reader.read(model, batch)  # raises a ValueError that says what to do
    outputs = reader.outputs(model, inputs)  # a tensor [N, ..., C], one row for each sample

``inputs`` is a tensor, or tuples, lists and dicts of tensors, samples along the first axis:
:func:`take`, :func:`first_samples`, :func:`joined`, :func:`sample_count` and :func:`tensors` work
on all of them. ``targets`` stand where the outputs predict them: the labels of a causal language
model are shifted as its own loss does it, and padding is -100. Engines of ``fisher`` and the
likelihoods take both as they are; hand ``reader.outputs`` to them as ``forward_fn``, or leave it
out: :func:`outputs_of` is the default.

How the model is called is found out with the first batch, by calling it on two samples inside
``observing``, and remembered as long as the model lives. What is special about models of
transformers and peft is here as well; neither is imported.
"""

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from operator import itemgetter
from typing import Any, Literal, NamedTuple, TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad
from torch.nn.utils.rnn import pad_sequence

from lightning_taskinfo._observe import observing

BatchFn: TypeAlias = Callable[[Any], Any]
Forward: TypeAlias = Callable[[Any, Any], Any]
Pair: TypeAlias = tuple[Any, Tensor | None]

IGNORED = -100  # labels of this value count for nothing
FEW = 2  # samples that show how a model is called
TARGETS = ("targets", "target", "labels", "label", "y")  # names of fields that hold them
CAUSAL = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
NO_FORWARD = (  # where a `forward` is defined that is none
    "torch.nn.modules.module",
    "lightning.pytorch.core.module",
    "pytorch_lightning.core.module",
)


# Tensors in tuples, lists and dicts, samples along the first axis


def take(
    inputs: Any,
    pick: Callable[[Tensor], Any],
) -> Any:
    """Apply ``pick`` to every tensor of ``inputs`` and keep the structure.

    Example:
        >>> take({"x": torch.arange(3), "name": "a"}, lambda x: x[:1])
        {'x': tensor([0]), 'name': 'a'}
    """
    if isinstance(inputs, Tensor):
        return pick(inputs)
    if isinstance(inputs, Mapping):
        return {key: take(value, pick) for key, value in inputs.items()}
    if isinstance(inputs, list | tuple):
        taken = [take(value, pick) for value in inputs]
        return _of_kind(type(inputs), taken)
    return inputs


def _of_kind(
    kind: type,
    values: list[Any],
) -> Any:
    """Return a list, tuple or named tuple of some values."""
    return kind(*values) if hasattr(kind, "_fields") else kind(values)


def tensors(inputs: Any) -> Iterator[Tensor]:
    """Return every tensor of ``inputs``."""
    found: list[Tensor] = []
    take(inputs, found.append)
    return iter(found)


def moved(inputs: Any, device: torch.device) -> Any:
    """Return inputs on a device."""
    return take(inputs, lambda x: x.to(device))


def split(
    inputs: Any,
    size: int,
) -> Iterator[Any]:
    """Yield inputs in parts of at most so many samples.

    Example:
        >>> [part["x"].tolist() for part in split({"x": torch.arange(3)}, 2)]
        [[0, 1], [2]]
    """
    for start in range(0, sample_count(inputs), size):
        yield take(inputs, itemgetter(slice(start, start + size)))


def first_samples(
    inputs: Any,
    targets: Tensor | None,
    n: int,
) -> Pair:
    """Return the first ``n`` samples of a batch."""
    return take((inputs, targets), lambda x: x[:n])


def filled_up(
    inputs: Any,
    targets: Tensor | None,
    n: int,
) -> Pair:
    """Return ``n`` samples: those of a batch, and again from the first.

    Example:
        >>> import torch
        >>> filled_up(torch.tensor([[1.0], [2.0]]), torch.tensor([0, 1]), 3)[1]
        tensor([0, 1, 0])
    """
    rows = torch.arange(n, device="cpu") % size(inputs)
    return take((inputs, targets), lambda x: x[rows.to(x.device)])


def joined(parts: list[Any], model: nn.Module | None = None) -> Any:
    """Return batches of the same structure as one; sequences with an ``attention_mask`` are padded to one length.

    Args:
        parts: The batches.
        model: The network that is called on them, whose padding token is asked for where no batch
            shows it: some networks find the end of a text by that token, and not by the mask.

    Example:
        >>> joined([{"x": torch.zeros(2)}, {"x": torch.ones(1)}])
        {'x': tensor([0., 0., 1.])}
    """
    if isinstance(parts[0], Tensor):
        return torch.cat(parts)
    if isinstance(parts[0], Mapping):
        masks = [part.get("attention_mask") for part in parts]
        fields = {}
        for name in parts[0]:
            values = [part[name] for part in parts]
            if all(map(_is_sequence, values, masks)):
                fields[name] = _padded(values, _filler(name, values, masks, model))
            else:
                fields[name] = joined(values, model)
        return fields
    if isinstance(parts[0], list | tuple):
        places = zip(*parts, strict=True)
        return _of_kind(type(parts[0]), [joined([*place], model) for place in places])
    return parts[0]


def _filler(
    name: str,
    values: list[Tensor],
    masks: list[Any],
    model: nn.Module | None,
) -> int | float:
    """Return what a field has at places of padding: what batches have there, or the model's token, or 0."""
    if name in TARGETS:
        return IGNORED
    seen = [x[mask == 0].flatten() for x, mask in zip(values, masks, strict=True)]
    known = torch.cat(seen).unique()
    if len(known) == 1:
        return known.item()
    if name.endswith("input_ids") and model is not None:
        for module in model.modules():
            token = getattr(getattr(module, "config", None), "pad_token_id", None)
            if isinstance(token, int):
                return token
    return 0


def joined_targets(parts: list[Tensor]) -> Tensor:
    """Return the targets of batches as one; labels of tokens are padded to one length with -100.

    Example:
        >>> joined_targets([torch.tensor([[1, 2]]), torch.tensor([[3]])])
        tensor([[   1,    2],
                [   3, -100]])
    """
    if parts[0].ndim == 2 and not parts[0].is_floating_point():
        return _padded(parts, IGNORED)
    return torch.cat(parts)


def _is_sequence(x: Any, mask: Any) -> bool:
    """Whether a field has a value for each token, as the mask has, which leaves out padding."""
    if not isinstance(x, Tensor) or not isinstance(mask, Tensor):
        return False
    return mask.ndim == 2 and x.shape[1:2] == mask.shape[1:]


def _padded(parts: list[Tensor], value: float) -> Tensor:
    rows = [row for part in parts for row in part]
    return pad_sequence(rows, batch_first=True, padding_value=value)


def sample_count(inputs: Any) -> int:
    """Return the number of samples: the common length of all tensors of ``inputs``.

    Raises:
        ValueError: If there is no tensor, or the lengths differ.
    """
    if isinstance(inputs, Tensor) and inputs.ndim and inputs.shape[0]:
        return inputs.shape[0]
    lengths = {len(x) if x.ndim else 0 for x in tensors(inputs)}
    if not lengths:
        raise ValueError(
            "`inputs` must be a tensor, or a tuple, list or dict of tensors, got "
            f"{type(inputs).__name__} without tensors."
        )
    if len(lengths) != 1 or 0 in lengths:
        raise ValueError(
            f"`inputs` must hold tensors with the same, positive number of samples along axis 0, got {sorted(lengths)}."
        )
    return lengths.pop()


def size(inputs: Any) -> int:
    """Return the number of samples, which may be 0."""
    if any(x.ndim == 0 for x in tensors(inputs)):
        raise ValueError(
            "inputs must have an axis of samples, got a tensor without axes; `batch_fn` can leave it out."
        )
    return max(len(x) for x in tensors(inputs))


def described(batch: Any) -> str:
    """Return in words what a batch is that was to be something else.

    Example:
        >>> described({"image": torch.zeros(2), "label": 3}), described((1, "a", None))
        ('dict with image, label', 'tuple of int, str, NoneType')
    """
    kind = type(batch).__name__
    if isinstance(batch, Tensor):
        return f"{kind} of {batch.dtype} and shape {list(batch.shape)}"
    batch = _by_name(batch)
    if isinstance(batch, Mapping):
        return f"{kind} with {', '.join(map(str, batch)) or 'nothing'}"
    if isinstance(batch, list | tuple):
        return f"{kind} of {', '.join(type(part).__name__ for part in batch) or 'nothing'}"
    return kind


# Which parts of a batch are its inputs and which its targets


class Parts(NamedTuple):
    """The parts of a batch, before a model has said what it takes.

    Attributes:
        inputs: All that is no target: a single field by itself, several by name.
        targets: The targets.
        fields: Everything that a model may take: all fields by name, targets included, or the
            inputs of a pair.
        target: Name of the targets among them.
    """

    inputs: Any
    targets: Any
    fields: Any
    target: str | None = None


def _parted(batch: Any) -> Parts | None:
    """Tell the targets of a batch from its inputs, by their place or name; ``None`` if neither says it."""
    if type(batch) in (list, tuple) and _is_pair(batch) and isinstance(batch[0], Tensor):
        return Parts(batch[0], batch[1], batch[0])  # as a rule, and asked for in every step
    named = _fields_of(batch)
    target = _target_of(named)
    if target is not None:
        others = {name: value for name, value in named.items() if name != target}
        inputs: Any = others
        if len(others) == 1:
            (inputs,) = others.values()
        return Parts(inputs, named[target], named, target)
    if _is_pair(batch):
        return Parts(batch[0], batch[1], batch[0])
    return None


def _by_name(batch: Any) -> Any:
    """Return a dataclass or named tuple as a dict, and anything else as it is."""
    if is_dataclass(batch) and not isinstance(batch, type):
        return {field.name: getattr(batch, field.name) for field in fields(batch)}
    return batch._asdict() if hasattr(batch, "_asdict") else batch


def _fields_of(batch: Any) -> dict[str, Any]:
    """Return the fields of a mapping, dataclass or named tuple that hold tensors; nothing for other batches."""
    batch = _by_name(batch)
    if _is_pair(batch) and isinstance(batch[0], Mapping) and _target_of(batch[0]):
        batch = batch[0]  # beside it something else than the labels, such as the samples' numbers
    named = {}
    if isinstance(batch, Mapping):
        for name, value in batch.items():
            if _has_tensors(value):
                named[str(name)] = value
    return named


def _has_tensors(value: Any) -> bool:
    return next(tensors(value), None) is not None


def _target_of(named: Mapping[str, Any]) -> str | None:
    """Return the name of the field that holds the targets, if there is exactly one and others beside it."""
    found = [name for name in named if name in TARGETS]
    if len(found) == 1 and len(named) > 1:
        return found[0]
    return None


def _is_pair(batch: Any) -> bool:
    """Whether a batch is a pair of inputs and a tensor of targets."""
    if not isinstance(batch, list | tuple) or len(batch) != 2:
        return False
    return isinstance(batch[1], Tensor)


def labeled_part(batch: Any) -> Any:
    """Return the labelled part of a batch that a ``CombinedLoader`` has put together; other batches as they are.

    Example:
        >>> from torch import ones, zeros
        >>> labeled_part({"labeled": (ones(1), zeros(1)), "unlabeled": ones(2)})
        (tensor([1.]), tensor([0.]))
    """
    if not isinstance(batch, Mapping) or _target_of(batch) is not None:
        return batch
    key = labeled_key(batch, is_labeled)
    return batch if key is None else batch[key]


def is_labeled(batch: Any) -> bool:
    """Whether a batch has targets that are told from its inputs."""
    return _parted(batch) is not None


def labeled_key(
    parts: Mapping[Any, Any],
    is_labeled: Callable[[Any], bool],
) -> Any | None:
    """Return the key of the labelled one of several parts: the one that is called so, or the only one."""
    found = [key for key, part in parts.items() if is_labeled(part)]
    if "labeled" in found:
        return "labeled"
    return found[0] if len(found) == 1 else None


# How a model is called, and which of its outputs are the logits


class NoLogitsError(ValueError):
    """A model returned nothing that could be its logits."""


@dataclass(frozen=True)
class Call:
    """How a model is called on the inputs of a batch, and where it predicts the targets.

    Attributes:
        place: Name of the submodule that is called; nothing for the model itself.
        how: With the inputs as one argument (``"whole"``), one argument for each (``"spread"``), or
            one for each by its name (``"named"``).
        names: Which of the fields of a batch are handed over, or the one that is by itself;
            ``None`` where inputs have no names.
        takes_targets: Whether the inputs of a pair are handed over together with the targets.
        follows: Whether a label belongs to the outputs at the token before it.
        prompt: Number of tokens that a learned prompt adds in front of a sequence.
    """

    place: str = ""
    how: Literal["whole", "spread", "named"] = "whole"
    names: tuple[str, ...] | str | None = None
    takes_targets: bool = False
    follows: bool = False
    prompt: int = 0

    def read(self, parts: Parts) -> Pair:
        """Return what the model is called with, and the targets where the outputs predict them."""
        targets = parts.targets
        if self.prompt:
            targets = pad(targets, (self.prompt, 0), value=IGNORED)
        return self.inputs_of(parts), _shifted(targets) if self.follows else targets

    def inputs_of(self, parts: Parts) -> Any:
        """Return what the model is called with."""
        if self.takes_targets:
            return parts.inputs, parts.targets
        return parts.inputs if self.names is None else self._picked(parts.fields)

    def _picked(self, fields: Mapping[str, Any]) -> Any:
        if isinstance(self.names, tuple):
            return {name: fields[name] for name in self.names}
        return fields if self.names is None else fields[self.names]

    def __call__(self, model: nn.Module, inputs: Any) -> Tensor:
        """Run the model and return its logits."""
        module = model.get_submodule(self.place)
        if isinstance(inputs, Mapping):
            inputs = self._picked(inputs)
        if self.how == "named":
            return logits_of(module(**inputs))
        if self.how == "spread":
            return logits_of(module(*inputs))
        return logits_of(module(Fields(inputs) if isinstance(inputs, Mapping) else inputs))


class Fields(dict[str, Any]):
    """A dict whose values are attributes too, as those of a ``BatchEncoding`` or a dataclass."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


# How a model is called, by the kind of its inputs or batches: found once, by trying, and remembered
# as long as the model lives.
_found: WeakKeyDictionary[nn.Module, dict[Any, Call]] = WeakKeyDictionary()


def _kind(inputs: Any) -> Any:
    return tuple(inputs) if isinstance(inputs, Mapping) else type(inputs)


def logits_of(result: Any) -> Tensor:
    """Return the logits among a model's outputs.

    They are a tensor, a field or attribute ``logits``, or the only one of these in a tuple, as in
    ``(loss, logits)``. A tensor is one of real numbers with an axis of samples.

    Raises:
        NoLogitsError: If there is no such thing.

    Example:
        >>> logits_of((torch.tensor(0.7), torch.zeros(2, 3))).shape
        torch.Size([2, 3])
    """
    several = isinstance(result, list | tuple) and not hasattr(result, "logits")
    found = []
    for part in result if several else [result]:
        if isinstance(part, Mapping):
            part = part.get("logits")
        part = getattr(part, "logits", part)
        if isinstance(part, Tensor) and part.ndim and part.is_floating_point():
            found.append(part)
    if len(found) == 1:
        return found[0]
    raise NoLogitsError(
        f"the model must return a tensor of outputs, or something with `logits`, got {described(result)}; set "
        "`forward_fn` to a function of (model, inputs) that picks the outputs."
    )


def outputs_of(
    model: nn.Module,
    inputs: Any,
    forward_fn: Forward | None = None,
) -> Tensor:
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
    return call_on(model, inputs)(model, inputs)


def call_on(model: nn.Module, inputs: Any) -> Call:
    """Find out how a model is called on inputs; :func:`outputs_of` then calls it so, without trying anything.

    Args:
        model: Any module.
        inputs: As for :func:`outputs_of`.

    Raises:
        Exception: What the first and most natural way to call it raised, where none works.
    """
    known = _found.setdefault(model, {})
    kind = _kind(inputs)
    if kind not in known:
        if isinstance(inputs, Tensor) and has_forward(model):
            return Call()
        few, _ = first_samples(inputs, None, FEW)
        known[kind], _ = _settle_call(model, Parts(few, None, few))
    return known[kind]


def _settle_call(
    model: nn.Module,
    few: Parts,
) -> tuple[Call, Tensor]:
    """Find out how a model is called, by calling it on a few samples and leaving no trace.

    Args:
        model: The model.
        few: The parts of a batch of a few samples. Targets are handed over only if the model does
            not run without.

    Returns:
        The call, which is remembered, and its outputs.

    Raises:
        NoLogitsError: If it runs, and returns no logits.
        Exception: What the first and most natural way to call it raised, where none works.
    """
    first_error: Exception | None = None
    for call in _candidates(model, few):
        inputs = call.inputs_of(few)
        try:
            with observing(model), torch.no_grad():
                outputs = call(model, inputs)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            # A way to call the model that is not its own fails in any manner, and the next one is
            # tried.
            if first_error is None or isinstance(error, NoLogitsError):  # which ran to the end
                first_error = error
        else:
            _found.setdefault(model, {})[_kind(inputs)] = call
            return call, outputs
    raise first_error or TypeError(f"{type(model).__name__} has no `forward`")


def _candidates(
    model: nn.Module,
    few: Parts,
) -> Iterator[Call]:
    """Yield the ways to call a model, the most natural one first."""
    inner = inner_model(model)
    places = [""] if has_forward(model) else []
    places += [name for name, module in model.named_modules() if name and module is inner]
    for place in places:
        positional = _positional(model.get_submodule(place))
        if isinstance(few.fields, Mapping):
            choices = [[*few.fields]]
            decoder = {"decoder_input_ids", "decoder_inputs_embeds"}
            if not _is_encoder_decoder(inner) or decoder & few.fields.keys():
                choices.insert(0, [name for name in few.fields if name != few.target])
            for names in choices:
                yield from _named_calls(model.get_submodule(place), place, names, inner)
            continue
        calls = [Call(place)]
        if isinstance(few.inputs, list | tuple):
            required = [p for p in positional if p.default is p.empty]
            first = len(required) == len(few.inputs) > 1
            calls.insert(0 if first else 1, Call(place, "spread"))
        yield from calls
        if not place and few.targets is not None and len(positional) > 1:
            yield Call(how="spread", takes_targets=True)  # a model that returns its loss as well


def _named_calls(
    module: nn.Module,
    place: str,
    names: list[str],
    inner: nn.Module | None,
) -> Iterator[Call]:
    takes = inspect.signature(module.forward).parameters
    takes_others = any(p.kind is p.VAR_KEYWORD for p in takes.values())
    known = [name for name in names if takes_others or name in takes]
    if known:
        yield Call(place, "named", tuple(known))
    if len(names) == 1:
        yield Call(place, names=names[0])
    yield Call(place, names=tuple(names))
    if takes_others and inner is not None:  # and may hand on what the inner model does not take
        takes = inspect.signature(inner.forward).parameters
        known = [name for name in names if name in takes]
        yield Call(place, "named", tuple(known))


def has_forward(model: nn.Module) -> bool:
    """Whether a module has a ``forward`` of its own."""
    return getattr(model.forward, "__module__", "") not in NO_FORWARD


def _positional(model: nn.Module) -> list[inspect.Parameter]:
    """Return what a module's ``forward`` takes by position."""
    takes = inspect.signature(model.forward).parameters
    return [p for p in takes.values() if p.kind <= p.POSITIONAL_OR_KEYWORD]


# Models of Hugging Face


def inner_model(model: nn.Module) -> nn.Module | None:
    """Return the Hugging Face model in a module, adapters included; none if there is no one, or several are trained.

    Args:
        model: Any module, e.g. a LightningModule that holds the model as an attribute.
    """
    kinds = []
    for package, name in (("transformers", "PreTrainedModel"), ("peft", "PeftModel")):
        if package in sys.modules:  # otherwise nothing can be one
            kinds.append(getattr(sys.modules[package], name))
    models = [*dict.fromkeys(_outermost(model, tuple(kinds)))]
    if len(models) > 1:  # beside a teacher, say
        models = [each for each in models if any(p.requires_grad for p in each.parameters())]
    return models[0] if len(models) == 1 else None


def _outermost(
    module: nn.Module,
    kinds: tuple[type, ...],
) -> Iterator[nn.Module]:
    """Yield the modules of some kinds that are not inside another one of them."""
    if isinstance(module, kinds):
        yield module
    else:
        for child in module.children():
            yield from _outermost(child, kinds)


def _is_encoder_decoder(model: nn.Module | None) -> bool:
    """Whether a Hugging Face model makes the inputs of its decoder from the labels."""
    config = getattr(model, "config", None)
    return bool(getattr(config, "is_encoder_decoder", False))


def _shifted(labels: Tensor) -> Tensor:
    """Return labels ``[N, T]`` of which each stands where it is predicted: one place earlier.

    Example:
        >>> _shifted(torch.tensor([[5, 6, 7]]))
        tensor([[   6,    7, -100]])
    """
    return pad(labels, (0, 1), value=IGNORED)[..., 1:]


def _loss_shifts(
    model: nn.Module,
    arguments: Mapping[str, Any],
    labels: Tensor,
) -> bool | None:
    """Whether the model's own loss compares the outputs at a token with the label of the next one.

    The model itself is asked: its loss on a few samples is compared with the losses of both
    readings. ``None`` where that does not decide: a loss with label smoothing, or none.

    Args:
        model: A Hugging Face model.
        arguments: What it is called with, by name, without the labels.
        labels: Their labels, ``[N, T]``.
    """
    try:
        with observing(model), torch.no_grad():
            result = model(**arguments, labels=labels)
            loss = float(result.loss)
            logits = result.logits.float()
    except Exception:  # whatever a model does without a loss of its own
        return None
    prompt = logits.shape[1] - labels.shape[1]  # learned, before the tokens
    labels = pad(labels, (prompt, 0), value=IGNORED)
    rows = logits.flatten(0, -2)

    def agrees(aligned: Tensor) -> bool:
        other = float(cross_entropy(rows, aligned.flatten(), ignore_index=IGNORED))
        return abs(loss - other) <= 1e-3 * abs(loss)

    at_the_next = agrees(_shifted(labels))
    return None if at_the_next == agrees(labels) else at_the_next


# The reader of batches


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
        picked: Any = batch_fn(batch)
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
    parts = _parted(batch)
    if parts is None:
        raise ValueError(
            f"A batch must be a pair (inputs, targets), or have one field of {', '.join(TARGETS)} and others, got "
            f"{described(batch)}; set `batch_fn` to a function of the batch that returns (inputs, targets)."
        )
    if model is None:
        return parts.inputs, parts.targets
    known = _found.setdefault(model, {})
    kind = ("batch", _kind(parts.fields), parts.target, forward_fn)
    if kind not in known:
        if not _has_tensors(parts.inputs):
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
    few: Parts = take(parts, itemgetter(slice(FEW)))
    try:
        if forward_fn is None:
            call, outputs = _settle_call(model, few)
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
    if not isinstance(labels, Tensor) or labels.is_floating_point():
        return call
    if labels.ndim != 2 or outputs.ndim != 3:
        return call
    inner = inner_model(model)
    prompt = 0 if inner is None else max(0, outputs.shape[1] - labels.shape[1])
    return replace(call, follows=_follows(inner, parts), prompt=prompt)


def _follows(
    inner: nn.Module | None,
    parts: Parts,
) -> bool:
    """Whether the labels ``[N, T]`` of a sequence are predicted by the outputs at the token before.

    The dataset may have shifted them; then the model's own loss is asked, and where that does not
    decide, labels that are copies of the tokens are those of the next one.
    """
    labels = parts.targets
    tokens = parts.inputs
    if isinstance(parts.fields, Mapping):
        tokens = parts.fields.get("input_ids", tokens)
    alike = []
    for x in tensors(tokens):
        if x.shape == labels.shape and not x.is_floating_point():
            alike.append(x)
    copied = any(_agree(labels, ids) for ids in alike)
    if not copied and any(_agree(labels[:, :-1], ids[:, 1:]) for ids in alike):
        return False
    if inner is None:
        return copied and parts.target is not None
    arguments, _ = first_samples(parts.fields, None, FEW)
    if not isinstance(arguments, Mapping):
        arguments = {_positional(inner)[0].name: arguments}
    arguments.pop(parts.target, None)
    shifts = _loss_shifts(inner, arguments, labels[:FEW])
    if shifts is not None:
        return shifts
    base: Any = getattr(inner, "get_base_model", lambda: inner)()  # of adapters
    named_so = type(base).__name__.endswith(CAUSAL)
    return (copied or named_so) and not _is_encoder_decoder(base)


def _agree(labels: Tensor, tokens: Tensor) -> bool:
    """Whether all labels that count are the tokens."""
    counted = labels != IGNORED
    equal = labels == tokens
    return bool(counted.any()) and bool(equal[counted].all())
