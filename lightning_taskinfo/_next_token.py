"""Whether the labels of a sequence are those of the next token, as for causal language models."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad

from lightning_taskinfo._calls import is_encoder_decoder, positional_parameters, shifted
from lightning_taskinfo._fields import Parts
from lightning_taskinfo._nested import IGNORED, take, tensors
from lightning_taskinfo._observe import observing

CAUSAL = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")


def follows(
    inner: nn.Module | None,
    parts: Parts,
    few: Parts,
    reads_ahead: Callable[[Tensor], bool],
) -> bool:
    """Whether the labels ``[N, T]`` of a sequence are predicted by the outputs at the token before.

    The dataset may have shifted them; then the model's own loss is asked. Where that does not
    decide, labels that are copies of the tokens are those of the next one, unless the model sees
    that token already: see :func:`reads_ahead`.

    Args:
        inner: The Hugging Face model, if there is one.
        parts: The batch.
        few: A few of its samples, on which the model is asked.
        reads_ahead: Whether outputs for these depend on later ones of the batch's tokens, ``[N, T]``.
    """
    labels = parts.targets
    tokens = parts.inputs
    if isinstance(parts.fields, Mapping):
        tokens = parts.fields.get("input_ids", tokens)
    alike = []
    for x in tensors(tokens):
        if x.shape == labels.shape and not x.is_floating_point():
            alike.append(x)
    copies = [ids for ids in alike if _agree(labels, ids)]
    if not copies and any(_agree(labels[:, :-1], ids[:, 1:]) for ids in alike):
        return False
    if inner is None:
        return bool(copies) and parts.target is not None and not reads_ahead(copies[0])
    arguments = few.fields
    if not isinstance(arguments, Mapping):
        arguments = {positional_parameters(inner)[0].name: arguments}
    arguments = {name: value for name, value in arguments.items() if name != parts.target}
    shifts = _loss_shifts(inner, arguments, few.targets)
    if shifts is not None:
        return shifts
    base: Any = getattr(inner, "get_base_model", lambda: inner)()  # of adapters
    if is_encoder_decoder(base):
        return False
    if copies:
        return not reads_ahead(copies[0])
    return type(base).__name__.endswith(CAUSAL)


def reads_ahead(
    run: Callable[[Any], Tensor],
    inputs: Any,
    tokens: Tensor,
    counted: Tensor,
) -> bool:
    """Whether outputs at a token depend on later tokens, as those of BERT do, and those of GPT do not.

    All tokens that count are changed but the first of each text, and the outputs at the first are
    compared.

    Args:
        run: Returns the outputs of inputs, ``[N, T, C]``.
        inputs: What the model is called with.
        tokens: The tokens among them, ``[N, T]``.
        counted: Which tokens are no padding, ``[N, T]``.
    """
    first = counted & (counted.cumsum(1) == 1)
    later = counted & ~first
    others = torch.where(tokens == tokens.min(), tokens.max(), tokens.min())
    changed = torch.where(later, others, tokens)

    def replaced(x: Tensor) -> Tensor:
        is_tokens = x.shape == tokens.shape and torch.equal(x, tokens)
        return changed if is_tokens else x

    before = run(inputs)
    after = run(take(inputs, replaced))
    change = (after - before).abs().amax(-1)[:, -tokens.shape[1] :]  # behind a learned prompt
    if not first.any() or not later.any():
        return False
    return bool(change[first].max() > 1e-4 * change[later].max())


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
