"""How a model is called on the inputs of a batch, and which of its outputs are the logits.

What is special about models of transformers and peft is here as well; neither is imported.
"""

import inspect
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad

from lightning_taskinfo._batches.structure import IGNORED, described
from lightning_taskinfo._observe import observing

CAUSAL = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
FRAMEWORKS = (
    "torch.nn.modules.module",
    "lightning.pytorch.core.module",
    "pytorch_lightning.core.module",
)
"""Where a ``forward`` is defined that is none."""

# Which call a model takes: found once, by trying, and remembered as long as the model lives.
_settled: "WeakKeyDictionary[nn.Module, dict[Any, Call]]" = WeakKeyDictionary()


def inner_model(model: nn.Module) -> nn.Module | None:
    """Return the Hugging Face model in a module, adapters included; none if there is no one, or several are trained.

    Args:
        model: Any module, e.g. a LightningModule that holds the model as an attribute.
    """
    kinds = []
    for package, name in (("transformers", "PreTrainedModel"), ("peft", "PeftModel")):
        if package in sys.modules:  # otherwise nothing can be one
            kinds.append(getattr(sys.modules[package], name))
    if not kinds:
        return None
    found = {}
    for each in _outermost(model, tuple(kinds)):
        found[id(each)] = each
    models = [*found.values()]
    if len(models) > 1:  # beside a teacher, say
        models = [each for each in models if _is_trained(each)]
    return models[0] if len(models) == 1 else None


def _is_trained(model: nn.Module) -> bool:
    return any(p.requires_grad for p in model.parameters())


def _outermost(module: nn.Module, kinds: tuple[type, ...]) -> Iterator[nn.Module]:
    """Yield the modules of some kinds that are not inside another one of them."""
    if isinstance(module, kinds):
        yield module
        return
    for child in module.children():
        yield from _outermost(child, kinds)


def is_encoder_decoder(model: nn.Module | None) -> bool:
    """Whether a Hugging Face model makes the inputs of its decoder from the labels."""
    config = getattr(model, "config", None)
    return bool(getattr(config, "is_encoder_decoder", False))


def shifted(labels: Tensor) -> Tensor:
    """Return labels ``[N, T]`` of which each stands where it is predicted: one place earlier.

    Example:
        >>> shifted(torch.tensor([[5, 6, 7]]))
        tensor([[   6,    7, -100]])
    """
    return pad(labels, (0, 1), value=IGNORED)[..., 1:]


def predicts_the_next(model: nn.Module, arguments: Mapping[str, Any], labels: Tensor) -> bool:
    """Whether the model's own loss compares the outputs at a token with the label of the next one.

    The model itself is asked: its loss on a few samples is compared with the losses of both
    readings. Where that does not decide (a loss with label smoothing, or none), the name of its
    class does.

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
        return _named_causal(model)
    prompt = logits.shape[1] - labels.shape[1]  # learned, before the tokens
    labels = pad(labels, (prompt, 0), value=IGNORED)

    def agrees(aligned: Tensor) -> bool:
        rows = logits.flatten(0, -2)
        other = float(cross_entropy(rows, aligned.flatten(), ignore_index=IGNORED))
        return abs(loss - other) <= 1e-3 * abs(loss)

    at_the_token = agrees(labels)
    at_the_next = agrees(shifted(labels))
    return _named_causal(model) if at_the_token == at_the_next else at_the_next


def _named_causal(model: nn.Module) -> bool:
    unwrapped: Any = getattr(model, "get_base_model", lambda: model)  # of adapters
    base = unwrapped()
    return type(base).__name__.endswith(CAUSAL) and not is_encoder_decoder(base)


class NoLogitsError(ValueError):
    """A model returned nothing that could be its logits."""


@dataclass(frozen=True)
class Call:
    """One way to call a model on a batch's inputs.

    Attributes:
        place: Name of the submodule that is called; nothing for the model itself.
        how: With the inputs as one argument (``"whole"``), one argument for each (``"spread"``), or
            one for each by its name (``"named"``).
        names: Which of the fields of a batch are handed over; ``None`` where inputs have no names.
    """

    place: str
    how: Literal["whole", "spread", "named"]
    names: tuple[str, ...] | None = None

    def inputs_of(self, fields: Mapping[str, Any]) -> Any:
        """Return the inputs among the fields of a batch: one by itself, or several by name."""
        if self.names is None:
            raise TypeError("the inputs of this call have no names.")
        if self.how == "spread":
            (name,) = self.names
            return fields[name]
        return {name: fields[name] for name in self.names}

    def __call__(self, model: nn.Module, inputs: Any) -> Tensor:
        """Run the model and return its logits."""
        module = model.get_submodule(self.place)
        if self.names is not None and isinstance(inputs, Mapping):
            inputs = self.inputs_of(inputs)
        if self.how == "named":
            result = module(**inputs)
        elif self.how == "spread" and isinstance(inputs, list | tuple):
            result = module(*inputs)
        elif isinstance(inputs, Mapping):
            result = module(Fields(inputs))
        else:
            result = module(inputs)
        return logits_of(result)


class Fields(dict[str, Any]):
    """A dict whose values are attributes too, as those of a ``BatchEncoding`` or a dataclass."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


def logits_of(result: Any) -> Tensor:
    """Return the logits among a model's outputs.

    They are a tensor, a field or attribute ``logits``, or the one tensor of a tuple that is no
    single number, as in ``(loss, logits)``.

    Raises:
        NoLogitsError: If there is no such thing.

    Example:
        >>> logits_of((torch.tensor(0.7), torch.zeros(2, 3))).shape
        torch.Size([2, 3])
    """
    found: Any = None
    if isinstance(result, Tensor):
        found = result
    elif isinstance(result, Mapping):
        found = result.get("logits")
    elif hasattr(result, "logits"):
        found = result.logits
    elif isinstance(result, list | tuple):
        named = []
        rows = []
        for part in result:
            if isinstance(part, Mapping) or hasattr(part, "logits"):
                named.append(part)
            if isinstance(part, Tensor) and part.ndim:
                rows.append(part)
        if len(named) == 1:
            found = logits_of(named[0])
        elif len(rows) == 1:
            found = rows[0]
    if isinstance(found, Tensor) and found.ndim and found.is_floating_point():
        return found
    raise NoLogitsError(
        f"the model must return a tensor of outputs, or something with `logits`, got {described(result)}; set "
        "`forward_fn` to a function of (model, inputs) that picks the outputs."
    )


def settled_call(model: nn.Module, inputs: Any) -> Call | None:
    """Return the call that was found for a model and inputs of this kind, if one was."""
    return _settled.get(model, {}).get(_kind(inputs))


def settle_call(model: nn.Module, fields: Any, target: str | None = None) -> tuple[Call, Any]:
    """Find out how a model is called, by calling it on a few samples and leaving no trace.

    Args:
        model: The model.
        fields: A few samples: the fields of a batch by name, or inputs without names.
        target: Which of the fields are the labels; they are handed over only if the model does not
            run without.

    Returns:
        The call, which :func:`settled_call` knows from now on, and its outputs.

    Raises:
        NoLogitsError: If it runs, and returns no logits.
        Exception: What the first and most natural way to call it raised, where none works.
    """
    first_error: Exception | None = None
    for call in _candidates(model, fields, target):
        inputs = fields if call.names is None else call.inputs_of(fields)
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
            known = _settled.setdefault(model, {})
            known[_kind(fields)] = call
            known[_kind(inputs)] = call
            return call, outputs
    raise first_error or TypeError(f"{type(model).__name__} has no `forward`")


def _kind(inputs: Any) -> Any:
    return tuple(inputs) if isinstance(inputs, Mapping) else type(inputs)


def _candidates(model: nn.Module, fields: Any, target: str | None) -> Iterator[Call]:
    """Yield the ways to call a model, the most natural one first."""
    inner = inner_model(model)
    places = [""] if has_forward(model) else []
    if inner is not None and inner is not model:
        for name, module in model.named_modules():
            if module is inner:
                places.append(name)
                break
    for place in places:
        forward = _Signature(model.get_submodule(place))
        if not isinstance(fields, Mapping):
            yield from forward.unnamed(place, fields)
            continue
        others = tuple(name for name in fields if name != target)
        every = tuple(fields)
        ways = [others]
        if target is not None:
            ways = [others, every]
            decoder = {"decoder_input_ids", "decoder_inputs_embeds"}
            decodes_labels = is_encoder_decoder(inner) and not decoder & fields.keys()
            if target in forward.required or decodes_labels:
                ways = [every]
        for names in ways:
            yield from forward.named(place, names)
            # And may hand on what the inner model does not take.
            if forward.takes_others and inner is not None:
                known = _Signature(inner).names
                taken = tuple(name for name in names if name in known)
                yield Call(place, "named", taken)


def has_forward(model: nn.Module) -> bool:
    """Whether a module has a ``forward`` of its own."""
    return getattr(model.forward, "__module__", "") not in FRAMEWORKS


def positional_names(model: nn.Module) -> list[str]:
    """Return the names of what a module's ``forward`` takes by position; none where it has no ``forward``."""
    return _Signature(model).positional if has_forward(model) else []


class _Signature:
    """What a module's ``forward`` takes."""

    def __init__(self, module: nn.Module) -> None:
        self.positional: list[str] = []
        self.names: list[str] = []
        self.required: list[str] = []  # of what is taken by position
        self.takes_others = False
        for p in inspect.signature(module.forward).parameters.values():
            if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD):
                self.positional.append(p.name)
                if p.default is p.empty:
                    self.required.append(p.name)
            if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD):
                self.names.append(p.name)
            if p.kind is p.VAR_KEYWORD:
                self.takes_others = True

    def named(self, place: str, names: tuple[str, ...]) -> Iterator[Call]:
        """Yield ways to call it on fields with names."""
        known = tuple(name for name in names if self.takes_others or name in self.names)
        if known:
            yield Call(place, "named", known)
        if len(names) == 1:
            yield Call(place, "spread", names)
        yield Call(place, "whole", names)

    def unnamed(self, place: str, inputs: Any) -> Iterator[Call]:
        """Yield ways to call it on inputs without names."""
        several = isinstance(inputs, list | tuple)
        if several and len(self.required) == len(inputs) > 1:
            yield Call(place, "spread")
        yield Call(place, "whole")
        if several:
            yield Call(place, "spread")
