"""Batches of any structure are taken apart and joined; modules as people write them are called as they call them."""

from collections import namedtuple
from dataclasses import dataclass
from functools import wraps
from operator import itemgetter
from types import SimpleNamespace

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import default_collate

from lightning_taskinfo._batches import (
    Reader,
    joined,
    labeled_part,
    outputs_of,
    read_batch,
    sample_count,
    take,
    tensors,
)
from tests.callbacks.hugging_face import MODELS, Sentences, gpt2

Pair = namedtuple("Pair", ["x", "y"])
X, Y = torch.arange(6.0).view(6, 1), torch.arange(6)


@pytest.mark.parametrize(
    "batch", [X, (X, Y), [X, {"y": Y}], Pair(X, (Y, Y)), {"x": X, "pair": Pair(X, Y)}]
)
def test_the_parts_of_a_batch_make_the_batch(batch):
    parts = [take(batch, itemgetter(slice(start, start + 4))) for start in (0, 4)]
    whole = joined(parts)
    assert type(whole) is type(batch)
    assert sample_count(whole) == 6
    assert all(torch.equal(a, b) for a, b in zip(tensors(whole), tensors(batch), strict=True))


# Modules as people write them, around a model that has its own loss


def module(forward=None, model=gpt2):
    """A LightningModule with a model and this ``forward``, or none."""

    class Plain(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = model()

    class Calling(Plain):
        pass

    if forward is not None:
        Calling.forward = forward
    torch.manual_seed(0)
    return Calling().eval()


def takes_keywords(self, **batch):
    return self.net(**batch)


def takes_the_batch(self, batch):
    return self.net(**batch)


def takes_attributes(self, batch):
    return self.net(input_ids=batch.input_ids, attention_mask=batch.attention_mask)


def returns_the_loss(self, batch):
    return self.net(**batch).loss


def returns_loss_and_logits(self, input_ids, attention_mask, labels=None):
    outputs = self.net(input_ids, attention_mask=attention_mask, labels=labels)
    return outputs.loss, outputs.logits


def needs_labels(self, input_ids, attention_mask, labels):
    outputs = self.net(input_ids, attention_mask=attention_mask, labels=labels)
    return outputs.loss, outputs.logits


def returns_a_dict(self, input_ids, attention_mask):
    return {"logits": self.net(input_ids, attention_mask=attention_mask).logits}


def returns_an_object(self, input_ids, attention_mask):
    return SimpleNamespace(
        logits=self.net(input_ids, attention_mask=attention_mask).logits, loss=None
    )


def returns_a_tuple(self, **batch):
    return self.net(**batch, return_dict=False)


def generates(self, input_ids, **options):
    return self.net.generate(input_ids, max_new_tokens=2, pad_token_id=0)


def takes_text(self, text):
    return self.net(self.tokenizer(text))


STYLES = [
    None,
    takes_keywords,
    takes_the_batch,
    takes_attributes,
    returns_the_loss,
    returns_loss_and_logits,
    needs_labels,
    returns_a_dict,
    returns_an_object,
    returns_a_tuple,
    generates,
    takes_text,
]


def own_loss(net, batch):
    with torch.no_grad():
        return net(**batch).loss


def our_loss(model, batch, reader=None):
    reader = reader or Reader()
    inputs, targets = reader.read(model, batch)
    with torch.no_grad():
        outputs = reader.outputs(model, inputs)
    return cross_entropy(outputs.flatten(0, -2), targets.flatten())


@pytest.mark.parametrize(
    "forward", STYLES, ids=lambda style: getattr(style, "__name__", "no forward")
)
@pytest.mark.parametrize("kind", ["GPT-2", "T5", "token classifier"])
def test_a_module_is_called_as_its_author_calls_it(kind, forward):
    model, batch = module(forward, MODELS[kind]), default_collate([*Sentences(kind, 5)])
    if kind == "T5" and forward in (takes_attributes, returns_a_dict, returns_an_object):
        pytest.skip("an encoder–decoder model needs labels, or inputs of its decoder")
    torch.testing.assert_close(our_loss(model, batch), own_loss(model.net, batch))


@dataclass
class Batch:
    input_ids: Tensor
    attention_mask: Tensor
    labels: Tensor
    texts: list[str]


def batches():
    """One batch in every form, by name."""
    from transformers import BatchEncoding

    batch = default_collate([*Sentences("GPT-2", 5)])
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    number = torch.arange(5)
    return {
        "dict": batch,
        "BatchEncoding": BatchEncoding(batch),
        "dataclass": Batch(**batch, texts=["a"] * 5),
        "named tuple": namedtuple("Tokens", batch)(**batch),
        "pair of dict and labels": (inputs, batch["labels"]),
        "with numbers of samples": (batch, number),
        "with more than the model takes": {**batch, "index": number, "text": ["a"] * 5},
        "labelled part": {"labeled": batch, "unlabeled": inputs},
        "part with labels": {"a": inputs, "b": batch},
    }


@pytest.mark.parametrize("name", batches())
@pytest.mark.parametrize("forward", [takes_keywords, returns_loss_and_logits, needs_labels, None])
def test_a_batch_may_have_any_form(name, forward):
    if name == "pair of dict and labels" and forward is needs_labels:
        pytest.skip("which has no name for its labels")
    model = module(forward)
    expected = own_loss(model.net, default_collate([*Sentences("GPT-2", 5)]))
    torch.testing.assert_close(our_loss(model, batches()[name]), expected)


@pytest.mark.parametrize(
    "forward", [lambda self, ids, labels=None: self.net(ids, labels=labels), needs_labels]
)
def test_pairs_of_tokens_and_labels_are_shifted_as_the_model_does_it(forward):
    if forward is needs_labels:

        def forward(self, ids, labels):
            return self.net(ids, labels=labels)

    model, tokens = module(forward), torch.randint(3, 20, (5, 6))
    expected = own_loss(model.net, {"input_ids": tokens, "labels": tokens})
    torch.testing.assert_close(our_loss(model, (tokens, tokens)), expected)


@pytest.mark.parametrize("named", [True, False])
def test_labels_that_are_shifted_already_stay(named):
    model = module(lambda self, input_ids: self.net(input_ids).logits)
    tokens = torch.randint(3, 20, (5, 6))
    x, y = tokens[:, :-1], tokens[:, 1:]
    batch = {"input_ids": x, "labels": y} if named else (x, y)
    assert torch.equal(Reader().read(model, batch)[1], y)


@pytest.mark.parametrize(("kind", "shifted"), [("GPT-2", True), ("T5", False)])
def test_of_a_model_without_a_loss_copies_of_the_tokens_are_shifted(kind, shifted):
    model, batch = MODELS[kind]().eval(), default_collate([*Sentences(kind, 5)])
    batch["labels"] = batch["input_ids"]
    forward = model.forward

    @wraps(forward)
    def without_loss(**arguments):
        return SimpleNamespace(logits=forward(**arguments).logits, loss=None)

    model.forward = without_loss
    _, targets = Reader().read(model, batch)
    expected = batch["labels"]
    if shifted:
        expected = nn.functional.pad(expected, (0, 1), value=-100)[:, 1:]
    assert torch.equal(targets, expected)


def test_a_causal_model_of_ones_own_has_labels_of_the_next_token():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.head = nn.Embedding(20, 4), nn.Linear(4, 20)

        def forward(self, input_ids):
            return self.head(self.embedding(input_ids))

    tokens = torch.randint(20, (5, 6))
    _, targets = Reader().read(Own(), {"input_ids": tokens, "labels": tokens})
    assert torch.equal(targets[:, :-1], tokens[:, 1:])
    assert (targets[:, -1] == -100).all()
    classes = torch.randint(20, (5, 6))
    assert torch.equal(Reader().read(Own(), {"input_ids": tokens, "labels": classes})[1], classes)
    assert torch.equal(Reader().read(Own(), (tokens, tokens))[1], tokens), (
        "a pair says what it means"
    )


@pytest.mark.parametrize("kind", ["PromptTuning", "PrefixTuning"])
def test_learned_prompts_are_in_front_of_the_labels(kind):
    import peft

    config = getattr(peft, f"{kind}Config")(task_type="CAUSAL_LM", num_virtual_tokens=3)
    model = module(takes_keywords, lambda: peft.get_peft_model(gpt2(), config))
    batch = default_collate([*Sentences("GPT-2", 5)])
    torch.testing.assert_close(our_loss(model, batch), own_loss(model.net, batch))


def test_of_two_models_the_trained_one_is_called():
    class Student(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.teacher, self.student = gpt2().requires_grad_(False), gpt2()

    model, batch = Student().eval(), default_collate([*Sentences("GPT-2", 5)])
    torch.testing.assert_close(our_loss(model, batch), own_loss(model.student, batch))


def test_a_forward_fn_gets_labels_that_are_shifted_too():
    model, batch = module(), default_collate([*Sentences("GPT-2", 5)])
    reader = Reader(forward_fn=lambda module, inputs: module.net(**inputs))
    torch.testing.assert_close(our_loss(model, batch, reader), own_loss(model.net, batch))


def test_a_batch_fn_says_everything_itself():
    model, batch = module(takes_keywords), default_collate([*Sentences("GPT-2", 5)])
    pick = Reader(batch_fn=lambda batch: ({"input_ids": batch["input_ids"]}, batch["labels"]))
    inputs, targets = pick.read(model, batch)
    assert torch.equal(targets, batch["labels"])
    assert outputs_of(model, inputs).shape == (5, 6, 20)


def test_several_inputs_are_taken_by_name_or_place():
    class Two(nn.Module):
        def forward(self, left, right):
            return left + 2 * right

    a, b = torch.ones(3, 2), torch.zeros(3, 2)
    for batch in ({"right": b, "left": a, "y": Y[:3]}, ((a, b), Y[:3])):
        inputs, _ = Reader().read(Two(), batch)
        assert torch.equal(outputs_of(Two(), inputs), a)


@pytest.mark.parametrize(
    ("forward", "message"),
    [
        (lambda self, x: x.argmax(-1), "int64.*`forward_fn`"),
        (lambda self, x: (x, x), "tuple of Tensor, Tensor; set `forward_fn`"),
        (lambda self, x: x.sum(), r"shape \[\]; set `forward_fn`"),
        (lambda self, x: {"scores": x}, "dict with scores; set `forward_fn`"),
        (lambda self, x: None, "NoneType; set `forward_fn`"),
        (lambda self, x: x.missing, "AttributeError.*`forward_fn`.*`batch_fn`"),
    ],
)
def test_a_model_without_logits_is_told_in_one_sentence(forward, message):
    with pytest.raises(ValueError, match=message) as refused:
        Reader().read(module(forward, nn.Identity), (X, Y))
    assert "\n" not in str(refused.value)


def test_the_labelled_part_is_the_only_one_with_labels_or_the_one_that_is_called_so():
    assert labeled_part({"labeled": (X, Y), "other": (X, Y)}) == (X, Y)
    assert labeled_part({"a": X, "b": (X, Y)}) == (X, Y)
    with pytest.raises(ValueError, match="got dict with a, b; set `batch_fn`"):
        read_batch({"a": (X, Y), "b": (X, Y)})


PAD = 9


def text(lengths: list[int], *, padded: bool) -> dict[str, Tensor]:
    """Texts, padded with a token of the network's own, or all of one length."""
    rows = [torch.arange(1, n + 1) for n in lengths]
    ids = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD)
    assert padded == bool((ids == PAD).any())
    return {"input_ids": ids, "attention_mask": (ids != PAD).long(), "token_type_ids": ids * 0}


class WithToken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(pad_token_id=PAD)


@pytest.mark.parametrize("padded", [True, False])
def test_texts_are_padded_with_the_token_of_the_batches_or_of_the_model(padded):
    """Some networks find the end of a text by that token, and not by the mask."""
    first = text([2, 3] if padded else [3, 3], padded=padded)
    model = None if padded else nn.Sequential(WithToken())
    whole = joined([first, text([5], padded=False)], model)
    assert whole["input_ids"][1].tolist() == [1, 2, 3, PAD, PAD]
    assert whole["attention_mask"][1].tolist() == [1, 1, 1, 0, 0]
    assert whole["token_type_ids"][1].tolist() == [0] * 5


def test_a_list_of_one_input_stays_a_list():
    class Views(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(3, 2)

        def forward(self, views):
            return self.net(views[0])

    x, y = torch.randn(6, 3), torch.randint(2, (6,))
    model = Views()
    inputs, _ = read_batch(([x], y), model)
    assert torch.equal(outputs_of(model, inputs), model([x]))


@pytest.mark.parametrize("fields", [{"tokens", "mask"}, {"tokens"}])
def test_labels_of_a_causal_model_in_a_module_with_names_of_its_own_are_shifted(fields):
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = gpt2()

        def forward(self, tokens, mask=None):
            return self.model(input_ids=tokens, attention_mask=mask)

    ids = torch.randint(1, 20, (4, 6))
    batch = {"tokens": ids, "mask": torch.ones_like(ids), "labels": ids.clone()}
    batch = {name: x for name, x in batch.items() if name in fields | {"labels"}}
    _, targets = read_batch(batch, Own())
    assert torch.equal(targets[:, :-1], ids[:, 1:])
    assert bool((targets[:, -1] == -100).all())
