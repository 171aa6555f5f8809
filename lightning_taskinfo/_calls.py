"""How a model is called, and which of its outputs are the logits.

Both are found out with the first inputs, by calling the model on two samples inside ``observing``,
and remembered as long as the model lives. Models of transformers and peft are known here; neither
package is imported.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from lightning_taskinfo._fields import Parts
from lightning_taskinfo._nested import IGNORED, Pair, described, pick
from lightning_taskinfo._observe import observing

Forward = Callable[[Any, Any], Any]

FEW = 2  # samples that show how a model is called


class NoLogitsError(ValueError):
    """A model returned nothing that could be its logits."""


@dataclass(frozen=True)
class Call:
    """How a model is called on the inputs of a batch, and where it predicts the targets.

    Attributes:
        place: Name of the submodule that is called; nothing for the model itself.
        how: With the inputs as one argument (``"whole"``), one argument for each (``"spread"``), or
            one for each by its name (``"named"``).
        names: Which of the fields of a batch are handed over; ``None`` where inputs have no names.
        takes_targets: Whether the inputs of a pair are handed over together with the targets.
        follows: Whether a label belongs to the outputs at the token before it.
        prompt: Number of tokens that a learned prompt adds in front of a sequence.
    """

    place: str = ""
    how: Literal["whole", "spread", "named"] = "whole"
    names: tuple[str, ...] | None = None
    takes_targets: bool = False
    follows: bool = False
    prompt: int = 0

    def read(self, parts: Parts) -> Pair:
        """Return what the model is called with, and the targets where the outputs predict them."""
        targets = parts.targets
        if self.prompt:
            targets = pad(targets, (self.prompt, 0), value=IGNORED)
        if self.follows:
            targets = pad(targets, (0, 1), value=IGNORED)[:, 1:]
        return self.inputs_of(parts), targets

    def inputs_of(self, parts: Parts) -> Any:
        """Return what the model is called with."""
        if self.takes_targets:
            return parts.inputs, parts.targets
        return parts.inputs if self.names is None else self._picked(parts.fields)

    def _picked(self, fields: Mapping[str, Any]) -> "Fields":
        return Fields({name: fields[name] for name in self.names or ()})

    def __call__(self, model: nn.Module, inputs: Any) -> Tensor:
        """Run the model and return its logits."""
        module = model.get_submodule(self.place)
        if isinstance(inputs, Mapping):
            inputs = self._picked(inputs)
        if self.how == "named":
            return logits_of(module(**inputs))
        if self.how == "whole":
            return logits_of(module(inputs))
        each = inputs.values() if isinstance(inputs, Mapping) else inputs
        return logits_of(module(*each))


class Fields(dict[str, Any]):
    """A dict whose values are attributes too, as those of a ``BatchEncoding`` or a dataclass."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


known_calls: WeakKeyDictionary[nn.Module, dict[Any, Call]] = WeakKeyDictionary()


def kind_of(inputs: Any) -> Any:
    return tuple(inputs) if isinstance(inputs, Mapping) else type(inputs)


def logits_of(result: Any) -> Tensor:
    """Return the logits among a model's outputs.

    They are a field or attribute ``logits``, or a tensor, or the only one of these in a tuple, as in
    ``(loss, logits)``; what is called ``logits`` goes before what has no name. A tensor is one of
    real numbers with an axis of samples.

    Raises:
        NoLogitsError: If there is no such thing.

    Example:
        >>> logits_of((torch.tensor(0.7), torch.zeros(2, 3))).shape
        torch.Size([2, 3])
    """
    several = isinstance(result, list | tuple) and not hasattr(result, "logits")
    parts = result if several else [result]
    named = [_logits_field(part) for part in parts]
    found = [*filter(_may_be_logits, named)] or [*filter(_may_be_logits, parts)]
    if len(found) == 1:
        return found[0]
    raise NoLogitsError(
        f"the model must return a tensor of outputs, or something with `logits`, got {described(result)}; set "
        "`forward_fn` to a function of (model, inputs) that picks the outputs."
    )


def _logits_field(result: Any) -> Any:
    """Return the field or attribute ``logits`` of what a model returned; ``None`` if there is none."""
    if isinstance(result, Mapping):
        return result.get("logits")
    return getattr(result, "logits", None)


def _may_be_logits(x: Any) -> bool:
    return isinstance(x, Tensor) and x.ndim > 0 and x.is_floating_point()


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
    known = known_calls.setdefault(model, {})
    kind = kind_of(inputs)
    if kind not in known:
        if isinstance(inputs, Tensor) and inner_model(model) in (None, model):
            known[kind] = Call()
        else:
            few = pick(inputs, slice(FEW))
            known[kind], _ = settle_call(model, Parts(few, None, few))
    return known[kind]


def settle_call(
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
    first_error = None
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
            ran = isinstance(error, NoLogitsError)
            if ran or isinstance(first_error, NotImplementedError | None):  # of no `forward`
                first_error = error
        else:
            known_calls.setdefault(model, {})[kind_of(inputs)] = call
            return call, outputs
    assert first_error is not None  # there is a first way
    raise first_error


def _candidates(
    model: nn.Module,
    few: Parts,
) -> Iterator[Call]:
    """Yield the ways to call a model, the most natural one first."""
    inner = inner_model(model)
    for place, module in model.named_modules():
        if place and module is not inner:
            continue
        if isinstance(few.fields, Mapping):
            yield from _named_calls(module, place, few, inner)
            continue
        yield Call(place)
        if isinstance(few.inputs, list | tuple):
            yield Call(place, "spread")
        if not place and few.targets is not None:
            yield Call(how="spread", takes_targets=True)  # a model that returns its loss as well


def _named_calls(
    module: nn.Module,
    place: str,
    few: Parts,
    inner: nn.Module | None,
) -> Iterator[Call]:
    choices = [tuple(few.fields)]
    config = getattr(inner, "config", None)
    if not getattr(config, "is_encoder_decoder", False):  # which feeds the labels to its decoder
        choices.insert(0, tuple(name for name in few.fields if name != few.target))
    takes = inspect.signature(module.forward).parameters
    takes_others = any(p.kind is p.VAR_KEYWORD for p in takes.values())
    for names in choices:
        known = tuple(name for name in names if takes_others or name in takes)
        if known:
            yield Call(place, "named", known)
        if len(names) == 1:
            yield Call(place, "spread", names)
        yield Call(place, "whole", names)
        if takes_others and inner is not None:  # and may hand on what the inner model does not take
            inner_takes = inspect.signature(inner.forward).parameters
            yield Call(place, "named", tuple(name for name in names if name in inner_takes))


def inner_model(model: nn.Module) -> nn.Module | None:
    """Return the Hugging Face model in a module, adapters included; none if there is no one, or several are trained.

    Args:
        model: Any module, e.g. a LightningModule that holds the model as an attribute.
    """
    found = [module for module in model.modules() if _is_hugging_face(type(module))]
    parts = {part for module in found for part in module.modules() if part is not module}
    outermost = [module for module in found if module not in parts]
    if len(outermost) > 1:  # beside a teacher, say
        outermost = [each for each in outermost if any(p.requires_grad for p in each.parameters())]
    return outermost[0] if len(outermost) == 1 else None


def _is_hugging_face(kind: type) -> bool:
    """Whether a class is one of models of transformers, or of peft."""
    return hasattr(kind, "main_input_name") or hasattr(kind, "get_base_model")
