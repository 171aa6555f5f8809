"""Any batch and any module around a model: the loss as we read it is the model's own."""

from collections import namedtuple
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import default_collate

from lightning_taskinfo._batches import Reader
from lightning_taskinfo._calls import outputs_of
from tests.callbacks.hugging_face import MODELS, Sentences, gpt2

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


def test_a_batch_fn_says_everything_itself():
    model, batch = module(takes_keywords), default_collate([*Sentences("GPT-2", 5)])
    pick = Reader(batch_fn=lambda batch: ({"input_ids": batch["input_ids"]}, batch["labels"]))
    inputs, targets = pick.read(model, batch)
    assert torch.equal(targets, batch["labels"])
    assert outputs_of(model, inputs).shape == (5, 6, 20)
