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


UNKNOWN = r"copies of the tokens, and no loss of the model.*`batch_fn`"


@pytest.mark.parametrize("kind", ["GPT-2", "T5"])
def test_copies_of_the_tokens_are_refused_for_a_model_without_a_loss(kind):
    model, batch = MODELS[kind]().eval(), default_collate([*Sentences(kind, 5)])
    batch["labels"] = batch["input_ids"]
    forward = model.forward

    @wraps(forward)
    def without_loss(**arguments):
        return SimpleNamespace(logits=forward(**arguments).logits, loss=None)

    model.forward = without_loss
    with pytest.raises(ValueError, match=UNKNOWN):
        Reader().read(model, batch)


class Own(nn.Module):
    """No model of Hugging Face."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(20, 4), nn.Linear(4, 20)

    def forward(self, input_ids, attention_mask=None):
        return self.head(self.embedding(input_ids))


def test_a_model_of_ones_own_has_its_labels_where_they_are():
    tokens, classes = torch.randint(20, (5, 6)), torch.randint(20, (5, 6))
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


@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("make", [Own, lambda: headless("GPT-2"), lambda: headless("BERT")])
def test_copies_of_the_tokens_are_refused_for_networks_of_ones_own(make, padded):
    """They are labels of the next token for one network, and of the same for an autoencoder or a masked model."""
    ids = torch.randint(1, 20, (4, 6))
    mask = torch.ones_like(ids)
    mask[:, 3:] = 0 if padded else 1
    batch = {"input_ids": ids * mask, "attention_mask": mask}
    batch["labels"] = ids.masked_fill(mask == 0, -100)
    with pytest.raises(ValueError, match=UNKNOWN):
        read_batch(batch, make())


def test_a_pair_with_a_model_of_hugging_face_is_no_exception():
    ids = torch.randint(1, 20, (4, 6))
    with pytest.raises(ValueError, match=UNKNOWN):
        read_batch((ids, ids), headless("GPT-2"))


@pytest.mark.parametrize("constant", [0.0, 5.0])  # of another term of the loss
@pytest.mark.parametrize("kind", ["GPT-2", "masked"])
def test_the_loss_of_a_fresh_model_says_it_too(kind, constant):
    """Its outputs are nearly the same at all places, and so are the losses of both readings."""
    model, batch = MODELS[kind]().eval(), default_collate([*Sentences("GPT-2", 5)])
    batch["labels"] = torch.randint(3, 20, (5, 6))  # no copies
    head = model.get_output_embeddings().weight
    head.data.mul_(1e-3)
    expected = batch["labels"]
    if kind == "GPT-2":
        expected = nn.functional.pad(expected, (0, 1), value=-100)[:, 1:]
    forward = model.forward

    @wraps(forward)
    def with_another_term(**arguments):
        result = forward(**arguments)
        return SimpleNamespace(
            logits=result.logits, loss=None if result.loss is None else result.loss + constant
        )

    model.forward = with_another_term
    assert torch.equal(Reader().read(model, batch)[1], expected)


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


def test_a_causal_model_on_embeddings_is_shifted():
    model, tokens = gpt2().eval(), torch.randint(3, 20, (5, 6))
    batch = {"inputs_embeds": model.get_input_embeddings()(tokens).detach(), "labels": tokens}
    expected = model(**batch).loss.detach()
    torch.testing.assert_close(our_loss(model, batch), expected)


def test_a_first_batch_without_labels_does_not_decide_for_later_ones():
    model, tokens = gpt2().eval(), torch.randint(3, 20, (5, 6))
    read_batch({"input_ids": tokens, "labels": torch.full_like(tokens, -100)}, model)
    batch = {"input_ids": tokens, "labels": tokens}
    torch.testing.assert_close(our_loss(model, batch), own_loss(model, batch))


def test_adapters_on_a_network_of_ones_own_have_labels_where_they_are():
    peft = pytest.importorskip("peft")
    tagger = nn.Sequential(nn.Embedding(20, 4), nn.Linear(4, 3))
    model = peft.get_peft_model(tagger, peft.LoraConfig(target_modules=["1"]))
    tokens = torch.randint(3, 20, (5, 6))
    assert torch.equal(read_batch((tokens, tokens % 3), model)[1], tokens % 3)
