"""``TrainStepNorms`` on Hugging Face models, against a loop over the samples of the very step."""

import pytest
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

from lightning_taskinfo import TrainStepNorms
from tests.callbacks.runs import fit

transformers = pytest.importorskip("transformers")
SAMPLES, LENGTH, CLASSES = 12, 7, 3
SIZE = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
}


def bert(kind="Bert", **options):
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=50, max_position_embeddings=20, num_labels=CLASSES, **SIZE, **options
    )
    return getattr(transformers, f"{kind}ForSequenceClassification")(config)


def vit():
    config = transformers.ViTConfig(image_size=8, patch_size=4, num_labels=CLASSES, **SIZE)
    return transformers.ViTForImageClassification(config)


def checkpointed(use_reentrant):
    model = bert()
    model.gradient_checkpointing_enable(
        gradient_checkpointing_kwargs={"use_reentrant": use_reentrant}
    )
    return model


def lora():
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(
        bert(), peft.LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query", "value"])
    )


def samples():
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(5, 50, (SAMPLES, LENGTH), generator=generator)
    mask = (
        torch.arange(LENGTH) < torch.randint(3, LENGTH + 1, (SAMPLES, 1), generator=generator)
    ).long()
    images = torch.randn(SAMPLES, 3, 8, 8, generator=generator)
    return words, mask, images, torch.randint(CLASSES, (SAMPLES,), generator=generator)


def data(kind):
    words, mask, images, labels = samples()
    if kind == "images":
        return [{"pixel_values": x, "labels": y} for x, y in zip(images, labels, strict=True)]
    return [
        {"input_ids": x, "attention_mask": m, "labels": y}
        for x, m, y in zip(words, mask, labels, strict=True)
    ]


class Module(pl.LightningModule):
    """As the documentation of transformers has it, and a loop over the samples of each step."""

    def __init__(self, model):
        super().__init__()
        self.model = model
        self.rows = []

    def training_step(self, batch, batch_idx):
        state = torch.get_rng_state()
        loss = self.model(**batch).loss
        self.rows.append(
            (state, {name: part.clone() for name, part in batch.items()}, weights(self.model))
        )
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], 1e-3)


def weights(model):
    return {name: p.detach().clone() for name, p in model.state_dict().items()}


def looped(module):
    """Return each sample's losses and squared norms by step; every sample is seen once an epoch, in order."""
    losses, norms = torch.zeros(SAMPLES), torch.zeros(SAMPLES)
    model, labels = module.model.train(), samples()[3]
    trained = [p for p in model.parameters() if p.requires_grad]
    for step, (state, batch, kept) in enumerate(module.rows):
        model.load_state_dict(kept)
        for i in range(len(batch["labels"])):
            torch.set_rng_state(state)
            loss = F.cross_entropy(model(**batch).logits, batch["labels"], reduction="none")[i]
            n = (step % 3) * 4 + i
            assert batch["labels"][i] == labels[n]
            losses[n] += loss.item()
            model.zero_grad()
            loss.backward()
            norms[n] += sum(p.grad.square().sum().item() for p in trained if p.grad is not None)
    return losses / 2, norms / 2


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (bert, "words"),
        (lambda: bert("Roberta"), "words"),
        (lambda: bert("Electra", embedding_size=8), "words"),
        (lora, "words"),
        (vit, "images"),
        (lambda: bert("Albert", embedding_size=8), "words"),
        (lambda: bert("Llama", num_key_value_heads=2, pad_token_id=0), "words"),
    ],
    ids=["bert", "roberta", "electra", "lora", "vit", "albert", "llama"],
)
def test_losses_and_norms_are_those_of_a_loop(tmp_path, make, kind):
    torch.manual_seed(0)
    module, callback = Module(make()), TrainStepNorms(rank_by="squared_norm")
    fit(tmp_path, callback, model=module, loader=DataLoader(data(kind), batch_size=4), max_epochs=2)
    losses, norms = looped(module)
    torch.testing.assert_close(callback.samples.loss, losses, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(callback.samples.squared_norm, norms, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: checkpointed(False), "in the backward pass, as by checkpointing"),
        (lambda: checkpointed(True), "was not used with gradients"),
    ],
    ids=["checkpointing", "reentrant checkpointing"],
)
def test_what_cannot_be_read_is_said_at_the_first_step_and_losses_can(tmp_path, make, message):
    torch.manual_seed(0)
    module, loader = Module(make()), DataLoader(data("words"), batch_size=4)
    with pytest.raises(ValueError, match=f"{message}.*norms=False"):
        fit(tmp_path, TrainStepNorms(), model=module, loader=loader)
    module.rows.clear()
    callback = TrainStepNorms(norms=False)
    fit(tmp_path, callback, model=module, loader=loader, max_epochs=2)
    torch.testing.assert_close(callback.samples.loss, looped(module)[0], rtol=1e-4, atol=1e-5)


class LanguageModel(Module):
    def training_step(self, batch, batch_idx):
        return self.model(input_ids=batch["input_ids"], labels=batch["labels"]).loss


def test_a_language_model_with_a_tied_head_has_means_over_its_tokens(tmp_path):
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=50, n_embd=16, n_layer=1, n_head=2, n_positions=20, bos_token_id=0, eos_token_id=0,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    module, words = LanguageModel(transformers.GPT2LMHeadModel(config)), samples()[0]
    module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), 0.0)
    loader = DataLoader([{"input_ids": x, "labels": x} for x in words], batch_size=4)
    callback = TrainStepNorms(rank_by="squared_norm")
    fit(tmp_path, callback, model=module, loader=loader, max_epochs=1)
    losses = [module.model(input_ids=x[None], labels=x[None]).loss for x in words]
    close = {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(callback.samples.loss, torch.stack(losses), **close)
    gradients = [torch.autograd.grad(loss, [*module.parameters()]) for loss in losses]
    norms = torch.stack([sum(g.square().sum() for g in each) for each in gradients])
    torch.testing.assert_close(callback.samples.squared_norm, norms, **close)
