"""Modules and data of a user's own, at the top of a module for other processes."""

import copy

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, mse_loss
from torch.utils.data import DataLoader, Dataset, SubsetRandomSampler, random_split


def clusters(
    n: int, classes: int, *, seed: int = 0, width: int = 6, noise: float = 2.0
) -> tuple[Tensor, Tensor]:
    """Points around a centre for each class; the centres are the same for all seeds."""
    centres = 3 * torch.randn(classes, width, generator=torch.Generator().manual_seed(7))
    labels = torch.arange(n) % classes
    return centres[labels] + noise * torch.randn(
        n, width, generator=torch.Generator().manual_seed(seed)
    ), labels


class Net(pl.LightningModule):
    """A body and a head, with dropout and batch normalisation, and its own optimizer and test metric."""

    def __init__(self, classes: int = 3, width: int = 6) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.body = nn.Sequential(
            nn.Linear(width, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 8)
        )
        self.head = nn.Linear(8, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).relu())

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = cross_entropy(self(x), y)
        self.log("train_loss", loss, on_step=False, on_epoch=True)
        return loss

    def test_step(self, batch, batch_idx):
        x, y = batch
        self.log("test_error", (self(x).argmax(1) != y).float().mean())

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.02)


class Diverging(Net):
    """Has no finite weights after the first step."""

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e30)


class Normalised(Net):
    """Changes batches before it sees them."""

    def on_after_batch_transfer(self, batch, dataloader_idx):
        x, y = batch
        return -x, y


class Percent(Net):
    """Logs its accuracy in percent."""

    def test_step(self, batch, batch_idx):
        x, y = batch
        self.log("accuracy", 100 * (self(x).argmax(1) == y).float().mean())


class Slower(Net):
    """Learns at another rate."""

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.001)


class Decaying(Net):
    """Learns at half the rate in each following epoch."""

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


class Validated(Net):
    """Validates while it trains."""

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_error", (self(x).argmax(1) != y).float().mean())


class Waiting(Validated):
    """Lowers its rate where a loss stays, and has a rate for each part that is not frozen."""

    monitor = "train_loss"

    def configure_optimizers(self):
        parts = [
            [*filter(lambda p: p.requires_grad, part.parameters())]
            for part in (self.body, self.head)
        ]
        optimizer = torch.optim.Adam([{"params": part} for part in parts if part], lr=0.02)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "monitor": self.monitor},
        }


class WaitingForValidation(Waiting):
    """Looks at the error of validation."""

    monitor = "val_error"


class Averaged(Net):
    """Is tested with an average of its weights, which it keeps in checkpoints beside all others."""

    def on_fit_start(self):
        self.average = copy.deepcopy(self.state_dict())

    def on_train_batch_end(self, *_):
        for name, tensor in self.state_dict().items():
            self.average[name] = 0.9 * self.average[name] + 0.1 * tensor

    def on_save_checkpoint(self, checkpoint):
        checkpoint["average"] = self.average

    def on_train_end(self):
        self.load_state_dict(self.average)


class Averaging(pl.Callback):
    """Looks for all weights in a checkpoint, as Lightning's own averaging does."""

    def on_load_checkpoint(self, trainer, pl_module, checkpoint):
        assert {*checkpoint["state_dict"]} == {*pl_module.state_dict()}


class Pair(Net):
    """Returns its features beside its scores."""

    def forward(self, x):
        return super().forward(x), self.body(x)

    def training_step(self, batch, batch_idx):
        return cross_entropy(self(batch[0])[0], batch[1])


class Lazy(Net):
    """Makes its head when it is run."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.LazyLinear(3)


class Late(pl.LightningModule):
    """Has no weights before it is trained."""

    def configure_model(self):
        self.net = nn.Linear(6, 3)


class Silent(Net):
    """Has no dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.body[3] = nn.Identity()


class YesOrNo(Net):
    """Says yes or no by one logit, of targets that are whole numbers."""

    def __init__(self) -> None:
        super().__init__(classes=1)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return binary_cross_entropy_with_logits(self(x)[:, 0], y.float())

    def test_step(self, batch, batch_idx):
        x, y = batch
        self.log("test_error", ((self(x)[:, 0] > 0) != y.bool()).float().mean())


class Places(pl.LightningModule):
    """Three classes at each place, on the axis that it is told; it puts out what it gets."""

    def __init__(self, axis: int = 1) -> None:
        super().__init__()
        self.axis = axis
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.scale * x.view(len(x), -1, 3)
        return scores.movedim(-1, self.axis)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return cross_entropy(self(x).movedim(self.axis, 1), y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class Deep(Net):
    """Has but one layer in common with :class:`Net`."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(6, 20), nn.BatchNorm1d(20), nn.ReLU(), nn.Dropout(0.1), nn.Linear(20, 8)
        )


class Other(pl.LightningModule):
    """Another architecture."""

    def __init__(self) -> None:
        super().__init__()
        self.only = nn.Linear(6, 3)

    def forward(self, x):
        return self.only(x)

    training_step = Net.training_step
    test_step = Net.test_step
    configure_optimizers = Net.configure_optimizers


class Twins(Net):
    """Has two networks of one kind inside."""

    def __init__(self) -> None:
        super().__init__()
        del self.body, self.head
        self.student, self.teacher = Net(), Net()

    def forward(self, x):
        return self.student(x) + self.teacher(x)


class Rows(Dataset):
    """Samples as dicts."""

    def __init__(self, n: int, seed: int = 0) -> None:
        self.x, self.y = clusters(n, 3, seed=seed)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, row: int):
        jitter = 0.1 * torch.randn(6)  # an augmentation
        return {"features": self.x[row] + jitter, "label": self.y[row]}


class DictData(pl.LightningDataModule):
    """A data module with dict batches."""

    def train_dataloader(self):
        return DataLoader(Rows(90), batch_size=16, shuffle=True)

    def test_dataloader(self):
        return DataLoader(Rows(60, seed=1), batch_size=20)


class Split(DictData):
    """Splits samples at random, without a seed."""

    def setup(self, stage):
        self.parts = random_split(Rows(150), [90, 60])

    def train_dataloader(self):
        return DataLoader(self.parts[0], batch_size=16)

    def test_dataloader(self):
        return DataLoader(self.parts[1], batch_size=16)


class Unbatched(DictData):
    """Has a dataset of batches."""

    def test_dataloader(self):
        return DataLoader(Rows(60, seed=1), batch_size=None)


class SomeSamples(DictData):
    """Tests on some samples of a dataset."""

    def test_dataloader(self):
        return DataLoader(Rows(60, seed=1), sampler=SubsetRandomSampler(range(10)))


class Hooked(DictData):
    """Changes batches where only a Trainer that knows it would call it."""

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return batch


class DictNet(Net):
    """Takes dict batches."""

    def training_step(self, batch, batch_idx):
        loss = cross_entropy(self(batch["features"]), batch["label"])
        self.log("train_loss", loss, on_step=False, on_epoch=True)
        return loss

    def test_step(self, batch, batch_idx):
        self.log("test_error", (self(batch["features"]).argmax(1) != batch["label"]).float().mean())


class Regression(pl.LightningModule):
    """Predicts a real number, and logs nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 8), nn.Linear(8, 1)

    def forward(self, x):
        return self.head(self.body(x).tanh())[:, 0]

    def training_step(self, batch, batch_idx):
        x, y = batch
        return mse_loss(self(x), y)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


WORDS = ("good", "fine", "great", "bad", "poor", "awful", "film", "plot", "the", "a")


def reviews(n: int, seed: int) -> tuple[list[str], list[int]]:
    """Sentences of different lengths with words for or against."""
    generator = torch.Generator().manual_seed(seed)
    texts, labels = [], []
    for number in range(n):
        label = number % 2
        count = int(torch.randint(2, 7, (), generator=generator))
        fill = [WORDS[i] for i in torch.randint(6, 10, (count,), generator=generator).tolist()]
        said = [
            WORDS[3 * (1 - label) + i]
            for i in torch.randint(0, 3, (2,), generator=generator).tolist()
        ]
        texts.append(" ".join(fill + said))
        labels.append(label)
    return texts, labels


class Reviews(Dataset):
    """Texts and their labels."""

    def __init__(self, n: int, seed: int) -> None:
        self.texts, self.labels = reviews(n, seed)

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, row: int):
        return self.texts[row], self.labels[row]


def padded(samples):
    """Tokens as a Hugging Face tokenizer pads them."""
    rows = [[1 + WORDS.index(word) for word in text.split()] for text, _ in samples]
    longest = max(map(len, rows))
    tokens = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
    labels = torch.tensor([label for _, label in samples])
    return {"input_ids": tokens, "attention_mask": (tokens > 0).long(), "labels": labels}


class TextData(pl.LightningDataModule):
    """Reviews in batches of padded tokens."""

    def train_dataloader(self):
        return DataLoader(Reviews(60, 0), batch_size=8, collate_fn=padded, shuffle=True)

    def test_dataloader(self):
        return DataLoader(Reviews(40, 1), batch_size=8, collate_fn=padded)


class TextNet(pl.LightningModule):
    """A bag of words with attention mask, and linear layers that adapters can go into."""

    def __init__(self, classes: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, 8)
        self.dense = nn.Linear(8, 8)
        self.classifier = nn.Linear(8, classes)

    def forward(self, input_ids, attention_mask):
        mask = attention_mask[..., None].float()
        pooled = (self.embedding(input_ids) * mask).sum(1) / mask.sum(1)
        return self.classifier(self.dense(pooled).tanh())

    def training_step(self, batch, batch_idx):
        return cross_entropy(self(batch["input_ids"], batch["attention_mask"]), batch["labels"])

    def configure_optimizers(self):
        return torch.optim.Adam((p for p in self.parameters() if p.requires_grad), lr=0.05)


def freeze_first(module) -> None:
    """A way to adapt of one's own."""
    module.body[0].requires_grad_(False)
