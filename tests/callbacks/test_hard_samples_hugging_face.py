"""``HardSamples`` on Hugging Face models, against a loop over samples."""

import copy

import pytest
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

from lightning_taskinfo import HardSamples
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


def checkpointed():
    model = bert()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
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
        self.losses, self.norms = torch.zeros(SAMPLES), torch.zeros(SAMPLES)

    def training_step(self, batch, batch_idx):
        state = torch.get_rng_state()
        loss = self.model(**batch).loss
        after = torch.get_rng_state()
        torch.set_rng_state(state)
        with torch.no_grad():
            logits = self.model(**batch).logits
        torch.set_rng_state(after)
        losses = F.cross_entropy(logits, batch["labels"], reduction="none")
        self.losses[4 * batch_idx : 4 * batch_idx + 4] += losses / 2
        return loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        twin = copy.deepcopy(self.model).eval()
        trained = [p for p in twin.parameters() if p.requires_grad]
        for i in range(4):
            one = {name: part[i : i + 1] for name, part in batch.items()}
            with torch.enable_grad():
                loss = F.cross_entropy(twin(**one).logits, one["labels"])
                gradients = torch.autograd.grad(loss, trained, allow_unused=True)
            squares = [g.square().sum() for g in gradients if g is not None]
            self.norms[4 * batch_idx + i] += sum(squares) / 2

    def configure_optimizers(self):
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], 1e-3)


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
        (checkpointed, "words"),
    ],
    ids=["bert", "roberta", "electra", "lora", "vit", "albert", "llama", "checkpointing"],
)
def test_losses_and_norms_are_those_of_a_loop(tmp_path, make, kind):
    torch.manual_seed(0)
    module, callback = Module(make()), HardSamples(rank_by="squared_norm")
    fit(tmp_path, callback, model=module, loader=DataLoader(data(kind), batch_size=4), max_epochs=2)
    torch.testing.assert_close(callback.samples.loss, module.losses, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(callback.samples.squared_norm, module.norms, rtol=1e-3, atol=1e-5)


class LanguageModel(Module):
    def training_step(self, batch, batch_idx):
        return self.model(input_ids=batch["input_ids"], labels=batch["labels"]).loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        pass


def test_a_language_model_has_mean_losses_and_norms_of_sums_over_its_tokens(tmp_path):
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=50, n_embd=16, n_layer=1, n_head=2, n_positions=20, bos_token_id=0, eos_token_id=0,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    module, words = LanguageModel(transformers.GPT2LMHeadModel(config)), samples()[0]
    module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), 0.0)
    loader = DataLoader([{"input_ids": x, "labels": x} for x in words], batch_size=4)
    callback = HardSamples(rank_by="squared_norm")
    fit(tmp_path, callback, model=module, loader=loader, max_epochs=1)
    losses = [module.model(input_ids=x[None], labels=x[None]).loss for x in words]
    close = {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(callback.samples.loss, torch.stack(losses), **close)
    gradients = [
        torch.autograd.grad((LENGTH - 1) * loss, [*module.parameters()]) for loss in losses
    ]
    norms = torch.stack([sum(g.square().sum() for g in each) for each in gradients])
    torch.testing.assert_close(callback.samples.squared_norm, norms, **close)
