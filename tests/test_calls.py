"""Models are called as people call them, and their logits are found among what they return."""

from types import SimpleNamespace

import pytest
import pytorch_lightning as pl
import torch
from torch import nn
from torch.utils.data import default_collate

from lightning_taskinfo._batches import Reader, read_batch
from lightning_taskinfo._calls import NoLogitsError, inner_model, logits_of, outputs_of
from tests.callbacks.hugging_face import MODELS, Sentences, gpt2
from tests.test_batches import module, our_loss, own_loss

X, Y = torch.arange(6.0).view(6, 1), torch.arange(6)


def test_of_two_models_the_trained_one_is_called():
    class Student(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.teacher, self.student = gpt2().requires_grad_(False), gpt2()

    model, batch = Student().eval(), default_collate([*Sentences("GPT-2", 5)])
    torch.testing.assert_close(our_loss(model, batch), own_loss(model.student, batch))


@pytest.mark.parametrize("kind", ["GPT-2", "LoRA GPT-2"])
def test_the_model_in_a_compiled_one_is_found(kind):
    """Its wrapper passes attributes on, and has another name."""
    model = MODELS[kind]()
    assert inner_model(nn.Sequential(torch.compile(model, backend="eager"))) is model


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


@pytest.mark.parametrize(
    "named", [lambda x: {"logits": x}, lambda x: SimpleNamespace(logits=x)], ids=["dict", "object"]
)
def test_named_logits_go_before_tensors_without_a_name(named):
    x, features = torch.ones(2, 3), torch.zeros(2, 5)
    assert logits_of((features, named(x))) is x
    with pytest.raises(NoLogitsError, match="tuple of"):
        logits_of((named(x), named(features)))
