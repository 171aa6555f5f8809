"""What is special about models of transformers and peft, without importing either."""

import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad

from lightning_taskinfo._batches.structure import IGNORED
from lightning_taskinfo._observe import observing

CAUSAL = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")


def inner_model(model: nn.Module) -> nn.Module | None:
    """Return the Hugging Face model in a module, adapters included; none if there is no one, or several are trained.

    Args:
        model: Any module, e.g. a LightningModule that holds the model as an attribute.
    """
    kinds = tuple(
        getattr(sys.modules[package], name)
        for package, name in (("transformers", "PreTrainedModel"), ("peft", "PeftModel"))
        if package in sys.modules  # otherwise nothing can be one
    )
    found = {id(each): each for each in _outermost(model, kinds)} if kinds else {}
    models = [*found.values()]
    if len(models) > 1:  # beside a teacher, say
        models = [each for each in models if any(p.requires_grad for p in each.parameters())]
    return models[0] if len(models) == 1 else None


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
            loss, logits = float(result.loss), result.logits.float()
    except Exception:  # whatever a model does without a loss of its own
        return _named_causal(model)
    prompt = logits.shape[1] - labels.shape[1]  # learned, before the tokens
    labels = pad(labels, (prompt, 0), value=IGNORED)
    agree = []
    for aligned in (labels, shifted(labels)):
        rows = logits.flatten(0, -2)
        other = float(cross_entropy(rows, aligned.flatten(), ignore_index=IGNORED))
        agree.append(abs(loss - other) <= 1e-3 * abs(loss))
    return agree[1] if any(agree) and not all(agree) else _named_causal(model)


def _named_causal(model: nn.Module) -> bool:
    unwrapped: Any = getattr(model, "get_base_model", lambda: model)  # of adapters
    base = unwrapped()
    return type(base).__name__.endswith(CAUSAL) and not is_encoder_decoder(base)
