"""Any batch and any module around a model: the loss as we read it is the model's own."""

from collections import namedtuple
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import default_collate

from lightning_taskinfo._batches import Reader, read_batch
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


def segformer():
    from transformers import SegformerConfig, SegformerForSemanticSegmentation

    config = SegformerConfig(
        num_encoder_blocks=2,
        depths=[1, 1],
        sr_ratios=[1, 1],
        hidden_sizes=[8, 8],
        num_attention_heads=[1, 1],
        patch_sizes=[7, 3],
        strides=[4, 2],
        decoder_hidden_size=8,
        num_labels=16,
    )
    return SegformerForSemanticSegmentation(config)


@pytest.mark.parametrize("forward", [None, takes_keywords])
def test_classes_on_the_second_axis_are_refused_whatever_the_shape_of_the_labels(forward):
    """Outputs are ``[2, 16, 8, 8]``: labels of 16 rows and 8 columns look like theirs, read on the wrong axis."""
    model = module(forward, segformer)
    batch = {"pixel_values": torch.randn(2, 3, 32, 32), "labels": torch.randint(8, (2, 16, 8))}
    with pytest.raises(ValueError, match=r"\[2, 16, 8, 8\].*classes on axis 1.*`forward_fn`"):
        Reader().read(model, batch)
    moved = Reader(forward_fn=lambda module, inputs: module.net(inputs).logits.movedim(1, -1))
    inputs, _ = moved.read(model, batch)
    assert moved.outputs(model, inputs).shape == (2, 8, 8, 16)


def test_labels_of_tokens_in_several_choices_are_refused():
    from transformers import GPT2DoubleHeadsModel

    batch = {"input_ids": torch.randint(3, 20, (4, 2, 6)), "mc_token_ids": torch.zeros(4, 2).long()}
    batch["labels"] = batch["input_ids"]
    model = GPT2DoubleHeadsModel(gpt2().config)
    with pytest.raises(ValueError, match=r"GPT2DoubleHeadsModel.*`batch_fn`"):
        Reader().read(model, batch)


def test_targets_that_are_no_tensor_are_refused():
    batch = {"x": torch.ones(2, 3), "labels": [{"boxes": torch.ones(2, 4)}]}
    with pytest.raises(ValueError, match=r"got dict with x, labels; set `batch_fn`"):
        Reader().read(torch.nn.Linear(3, 2), batch)


class Tempered(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(3, 2)

    def forward(self, x, temperature=0.5):
        return self.net(x) / temperature


def test_a_number_that_forward_takes_is_refused_and_others_are_left_out():
    batch = {"x": torch.ones(4, 3), "y": torch.zeros(4, dtype=torch.long)}
    with pytest.raises(ValueError, match="the field 'temperature' of a batch is a number"):
        read_batch({**batch, "temperature": 1.0}, Tempered())
    assert read_batch({**batch, "epoch": 3}, Tempered())[1] is batch["y"]
