"""Whether the labels of a sequence are those of the next token, as for causal language models."""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lightning_taskinfo._fields import Parts
from lightning_taskinfo._nested import IGNORED, tensors
from lightning_taskinfo._observe import observing


def follows(
    inner: nn.Module | None,
    parts: Parts,
    few: Parts,
) -> bool:
    """Whether the labels ``[N, T]`` of a sequence are predicted by the outputs at the token before.

    The dataset may have shifted them; otherwise the model's own loss is asked.

    Args:
        inner: The Hugging Face model, if there is one.
        parts: The batch.
        few: A few of its samples, on which the model is asked.

    Raises:
        ValueError: If there is no such loss, and labels are copies of the tokens: those of the next
            one for a causal model, and those of the same one for others.
    """
    labels = parts.targets
    tokens = parts.inputs
    if isinstance(parts.fields, Mapping):
        tokens = parts.fields.get("input_ids", tokens)
    alike = []
    for x in tensors(tokens):
        if x.shape == labels.shape and not x.is_floating_point():
            alike.append(x)
    copies = any(_agree(labels, ids) for ids in alike)
    if not copies and any(_agree(labels[:, :-1], ids[:, 1:]) for ids in alike):
        return False
    shifts = None if inner is None else _loss_shifts(inner, few)
    if shifts is not None:
        return shifts
    if copies and (inner is not None or parts.target is not None):  # else a pair says what it means
        raise ValueError(
            "the labels are copies of the tokens, and no loss of the model says whether they belong to the outputs "
            "at the same token or at the one before: set `batch_fn` to a function of the batch that returns "
            "(inputs, targets) with the targets at the places of the outputs, and -100 where there is none."
        )
    return False


def _agree(labels: Tensor, tokens: Tensor) -> bool:
    """Whether all labels that count are the tokens."""
    counted = labels != IGNORED
    equal = labels == tokens
    return bool(counted.any()) and bool(equal[counted].all())


def _loss_shifts(model: Any, few: Parts) -> bool | None:
    """Whether the model's own loss compares the outputs at a token with the label of the next one.

    The model itself is asked, about a single label: the one at the end of the first text. It is
    given in turn the two values whose log-likelihoods differ most between the outputs at its place
    and those at the token before. ``None`` where that does not decide, such as without a loss.

    Args:
        model: A Hugging Face model.
        few: Samples with labels ``[N, T]``.
    """
    takes = inspect.signature(model.forward).parameters
    arguments = {}
    if isinstance(few.fields, Mapping):
        for name, value in few.fields.items():
            if name in takes and name != few.target:
                arguments[name] = value
    if "inputs_embeds" not in arguments:
        main = getattr(model, "main_input_name", "input_ids")  # adapters wrap networks without one
        arguments.setdefault(main, next(tensors(few.inputs)))  # whatever its name is
    labels = torch.full_like(few.targets, IGNORED)

    def asked(label: int) -> Any:
        labels[0, place] = label
        with observing(model), torch.no_grad():
            return model(**arguments, labels=labels)

    counted = (few.targets[0] != IGNORED).nonzero().flatten().tolist()
    place = counted[-1] if counted else labels.shape[1] - 1  # any place tells
    try:
        logits = asked(0).logits[0].float()  # [T, C], a learned prompt in front
        own = len(logits) - labels.shape[1] + place
        earlier, here = logits[own - 1 : own + 1].log_softmax(-1)
        gap = here - earlier
        high, low = int(gap.argmax()), int(gap.argmin())
        found = float(asked(low).loss - asked(high).loss)
    except Exception:  # whatever a model does without a loss of its own
        return None

    def off(outputs: Tensor) -> float:
        return abs(found - float(outputs[high] - outputs[low]))

    return off(earlier) < off(here) if high != low else None
