"""Whether the labels of a sequence are those of the next token, as for causal language models."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad

from lightning_taskinfo._calls import FEW, is_encoder_decoder, positional_parameters, shifted
from lightning_taskinfo._fields import Parts
from lightning_taskinfo._nested import IGNORED, first_samples, tensors
from lightning_taskinfo._observe import observing

CAUSAL = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")


def follows(
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
        arguments = {positional_parameters(inner)[0].name: arguments}
    arguments.pop(parts.target, None)
    shifts = _loss_shifts(inner, arguments, labels[:FEW])
    if shifts is not None:
        return shifts
    base: Any = getattr(inner, "get_base_model", lambda: inner)()  # of adapters
    named_so = type(base).__name__.endswith(CAUSAL)
    return (copied or named_so) and not is_encoder_decoder(base)


def _agree(labels: Tensor, tokens: Tensor) -> bool:
    """Whether all labels that count are the tokens."""
    counted = labels != IGNORED
    equal = labels == tokens
    return bool(counted.any()) and bool(equal[counted].all())


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

    at_the_next = agrees(shifted(labels))
    return None if at_the_next == agrees(labels) else at_the_next
