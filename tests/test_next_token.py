"""Labels stand where the outputs predict them: those of the next token one place earlier, others where they are."""

from functools import wraps
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.data import default_collate

from lightning_taskinfo._batches import Reader, read_batch
from tests.callbacks.hugging_face import MODELS, Sentences, gpt2, masked_model
from tests.test_batches import module, needs_labels, our_loss, own_loss, takes_keywords


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


def test_a_forward_fn_gets_labels_that_are_shifted_too():
    model, batch = module(), default_collate([*Sentences("GPT-2", 5)])
    reader = Reader(forward_fn=lambda module, inputs: module.net(**inputs))
    torch.testing.assert_close(our_loss(model, batch, reader), own_loss(model.net, batch))


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


def headless(kind):
    """A Hugging Face model without a head, and with a head of one's own."""
    from transformers import BertModel

    body = {"BERT": lambda: BertModel(masked_model().config), "GPT-2": lambda: gpt2().transformer}

    class Headed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = body[kind](), nn.Linear(8, 20)

        def forward(self, input_ids, attention_mask=None):
            states = self.body(input_ids, attention_mask=attention_mask).last_hidden_state
            return self.head(states)

    return Headed().eval()


class Recurrent(nn.Module):
    """No model of Hugging Face, in one direction or in both."""

    def __init__(self, *, both: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 4)
        self.body = nn.GRU(4, 4, batch_first=True, bidirectional=both)
        self.head = nn.Linear(8 if both else 4, 20)

    def forward(self, input_ids, attention_mask=None):
        return self.head(self.body(self.embedding(input_ids))[0])


NETWORKS = {
    "GPT-2": (lambda: headless("GPT-2"), True),
    "BERT": (lambda: headless("BERT"), False),
    "one direction": (lambda: Recurrent(both=False), True),
    "both directions": (lambda: Recurrent(both=True), False),
}


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("padding", ["none", "right", "left", "counted"])
def test_copies_of_the_tokens_are_shifted_for_networks_that_do_not_see_the_next_one(name, padding):
    """The labels of an autoencoder or a masked model are copies too, and stand where they are."""
    make, shifted = NETWORKS[name]
    torch.manual_seed(0)
    ids = torch.randint(1, 20, (4, 6))
    mask = torch.ones_like(ids)
    if padding == "left":
        mask[:, :2] = 0
    elif padding != "none":
        mask[:, 3:] = 0
    ids = ids * mask
    labels = ids if padding == "counted" else ids.masked_fill(mask == 0, -100)
    batch = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    expected = labels
    if shifted:
        expected = torch.cat([labels[:, 1:], torch.full((4, 1), -100)], 1)
    assert torch.equal(read_batch(batch, make())[1], expected)


def test_a_model_is_asked_about_samples_whose_labels_count():
    """Here the first two have none: what the model does with them tells nothing."""
    model = masked_model().eval()
    tokens = torch.randint(3, 20, (5, 6))
    labels = tokens.clone()
    labels[:2] = -100
    batch = {"input_ids": tokens, "labels": labels}
    torch.testing.assert_close(our_loss(model, batch), own_loss(model, batch))


@pytest.mark.parametrize("labels", [4, 9])
def test_labels_of_sounds_are_no_labels_of_outputs(labels):
    from transformers import Wav2Vec2Config, Wav2Vec2ForCTC

    config = Wav2Vec2Config(
        vocab_size=8,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=8,
        conv_dim=(8,),
        conv_stride=(10,),
        conv_kernel=(10,),
        num_feat_extract_layers=1,
        num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2,
    )
    batch = {"input_values": torch.randn(3, 90), "labels": torch.randint(1, 8, (3, labels))}
    with pytest.raises(ValueError, match=r"`batch_fn`.*one target for each output"):
        read_batch(batch, Wav2Vec2ForCTC(config))
