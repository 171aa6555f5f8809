"""Whether the labels of a sequence are those of the next token, as for causal language models."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lightning_taskinfo._fields import Parts
from lightning_taskinfo._nested import IGNORED, take, tensors
from lightning_taskinfo._observe import observing


def follows(
    inner: nn.Module | None,
    parts: Parts,
    few: Parts,
    reads_ahead: Callable[[Tensor], bool],
) -> bool:
    """Whether the labels ``[N, T]`` of a sequence are predicted by the outputs at the token before.

    The dataset may have shifted them; then the model's own loss is asked. Where there is none,
    labels that are copies of the tokens are those of the next one, unless the model sees that token
    already: see :func:`reads_ahead`.

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
    shifts = None if inner is None else _loss_shifts(inner, few)
    if shifts is not None:
        return shifts
    meant = inner is not None or parts.target is not None  # a pair of one's own says what it means
    return meant and bool(copies) and not reads_ahead(copies[0])


def reads_ahead(
    run: Callable[[Any], Tensor],
    inputs: Any,
    tokens: Tensor,
    mask: Tensor,
) -> bool:
    """Whether outputs at a token depend on later tokens, as those of BERT do, and those of GPT do not.

    All tokens of the first text are changed but its first, and the outputs at that one are compared.

    Args:
        run: Returns the outputs of inputs, ``[N, T, C]``.
        inputs: What the model is called with.
        tokens: The tokens among them, ``[N, T]``.
        mask: Which tokens are no padding, ``[N, T]``.
    """
    first, *later = mask[0].nonzero().flatten().tolist()
    if not later:
        return False
    others = torch.where(tokens == tokens.min(), tokens.max(), tokens.min())
    changed = tokens.clone()
    changed[0, later] = others[0, later]

    def replaced(x: Tensor) -> Tensor:
        is_tokens = x.shape == tokens.shape and torch.equal(x, tokens)
        return changed if is_tokens else x

    before = run(inputs)
    after = run(take(inputs, replaced))
    change = (after - before).abs().amax(-1)[0, -tokens.shape[1] :]  # behind a learned prompt
    return bool(change[first] > 1e-4 * change[later].max())


def _agree(labels: Tensor, tokens: Tensor) -> bool:
    """Whether all labels that count are the tokens."""
    counted = labels != IGNORED
    equal = labels == tokens
    return bool(counted.any()) and bool(equal[counted].all())


def _loss_shifts(model: nn.Module, few: Parts) -> bool | None:
    """Whether the model's own loss compares the outputs at a token with the label of the next one.

    The model itself is asked, about a single label: the one at the end of the first text. It is
    given in turn the two values whose log-likelihoods differ most between the outputs at its place
    and those at the token before. ``None`` where that does not decide, such as without a loss.

    Args:
        model: A Hugging Face model.
        few: Samples with labels ``[N, T]``, of which the first has some that count.
    """
    fields = few.fields
    if not isinstance(fields, Mapping):
        fields = {model.main_input_name: fields}
    arguments = {name: value for name, value in fields.items() if name != few.target}
    labels = torch.full_like(few.targets, IGNORED)

    def asked(label: int) -> Any:
        labels[0, place] = label
        with observing(model), torch.no_grad():
            return model(**arguments, labels=labels)

    try:
        place = int((few.targets[0] != IGNORED).nonzero()[-1])
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
