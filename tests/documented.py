"""What the readers of a page already have, and what would take too long: the set-up of ``test_code_blocks.py``."""

PRELUDE = """
import logging
import pytorch_lightning as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

for _name in ("pytorch_lightning", "lightning.pytorch"):
    logging.getLogger(_name).setLevel(logging.WARNING)
torch.manual_seed(0)


class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return nn.functional.cross_entropy(self(x), y)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


class Data(pl.LightningDataModule):
    def train_dataloader(self):
        return DataLoader(train_set, batch_size=16)


inputs, targets = torch.randn(64, 4), torch.randint(3, (64,))
train_set = TensorDataset(inputs, targets)
model, datamodule, loader = Model(), Data(), Data().train_dataloader()
"""
"""A module and data of the reader's own, on every page."""

PRELUDES = {
    "README.md": """
class Classifier(Model):
    def test_step(self, batch, batch_idx):
        x, y = batch
        self.log("test_error", (self(x).argmax(1) != y).float().mean())


state_dict = Classifier().state_dict()
torch.save({"state_dict": state_dict, "pytorch-lightning_version": "2.0.0", "hyper_parameters": {}}, "photos.ckpt")
other = Classifier()
target = {"train": (torch.randn(240, 4), torch.arange(240) % 3), "test": (torch.randn(60, 4), torch.arange(60) % 3)}


def tiny_bert():
    from transformers import DistilBertConfig, DistilBertForSequenceClassification

    config = DistilBertConfig(vocab_size=20, dim=8, n_heads=2, n_layers=1, hidden_dim=16)
    return DistilBertForSequenceClassification(config)


def tiny_tokenizer(texts, return_tensors):
    return {"input_ids": torch.ones(len(texts), 3, dtype=torch.long), "attention_mask": torch.ones(len(texts), 3)}
"""
}
"""More of it, by page."""

FAST_TRANSFER = {
    'TransferDataModule("digits", "letters", labels=50)': (
        'TransferDataModule("digits", "letters", labels=50, max_source=200, max_unlabeled=200)'
    ),
    "seeds=3": "seeds=1",
}
SHORT_TRAINING = "training=Training(pretrain_steps=2, steps=2)"
SHORTER = {  # by page: what is written -> what is run instead
    "README.md": {
        "AutoModelForSequenceClassification.from_pretrained(name)": "tiny_bert()",
        "AutoTokenizer.from_pretrained(name)": "tiny_tokenizer",
        "seeds=5": "seeds=1",
        "certify(model, train_set, prior)": "certify(model, train_set, prior, draws=50)",
        '"max_steps": 300': '"max_steps": 3',
    },
    "docs/tutorials/what-is-in-the-weights.md": {
        "epochs=100": "epochs=2",
        "max_epochs=20": "max_epochs=2",
    },
    "docs/tutorials/will-it-transfer.md": {
        "epochs=10": "epochs=1",
        "seeds=5": "seeds=1",
        '"max_steps": 200': '"max_steps": 3',
    },
    "docs/tutorials/what-can-be-proved.md": {
        "steps=300": "steps=20",
        "held_out=digits.test()[:]": "held_out=digits.test()[:], draws=50, structure='isotropic'",
    },
    "docs/getting-started.md": {
        **FAST_TRANSFER,
        "stages=Stages(5, 20)": "stages=Stages(1, 1)",
        '"small_cnn"': '"mlp"',
    },
    "docs/how-to/regularise.md": {"torch.randn(500, 1, 8, 8)": "torch.randn(160, 1, 8, 8)"},
    "docs/tasks.md": {
        "max_samples=1000": "max_samples=40",
        "max_samples=280": "max_samples=40",
        "[10, 3, 1, 0.3, 0.1]": f"[10, 1], {SHORT_TRAINING}",
        'folder="runs/distance"': f'folder="runs/distance", workers=0, seeds=[0], {SHORT_TRAINING}',
    },
}
