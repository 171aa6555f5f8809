"""Do wrong labels show in the training loss of a sample, or in its gradient?

    python benchmarks/wrong_labels.py --data-dir FOLDER [--seeds 5] [--quick]

Trainings that are in the stored result are not run again. Written down before the stored runs, after a quick look at
one seed with 10 % wrong labels and two epochs, which favoured the loss; samples and pixels were halved later, for cost:

- **Runs.** 1,000 samples each of handwritten digits, notMNIST letters, CIFAR-10 (the latter two from npz files in
  FOLDER; images are averaged to half their side) and sentences made here (words of four topics, see ``sentences``);
  10, 20 or 40 % of the labels are replaced by another class, chosen evenly; five seeds (samples, labels, initial
  weights, batches). A CNN for the images; for the sentences a BERT of two layers from Hugging Face's transformers, not
  pretrained, with its dropout. Adam, rate 1e-3, batches of 64, 20 epochs, no augmentation. 60 trainings.
- **Scores**, all by ``HardSamples``, for every sample of every batch: ``loss``, the mean training loss over all epochs;
  ``squared_norm``, the mean squared gradient norm over all epochs, measured after each step in eval mode; beside them
  ``last_loss``, the loss in the last epoch alone. (In a first run norms were those of the training step itself, with
  its dropout masks. Areas were the same to 0.01, and so was the decision.)
- **Measures.** The area under the ROC curve of a score for finding the replaced labels; the share of replaced labels
  among the tenth of the samples with the largest scores (its limit is 1 in all settings). After 5, 10 and 20 epochs;
  20 counts.
- **Decision.** ``rank_by`` has as default whichever of ``loss`` and ``squared_norm`` has the larger area, averaged
  over the 60 trainings. If the mean difference is within two standard errors of 0, taken over the twelve settings, the
  default is ``loss``, which costs nothing and can be read of more networks.

notMNIST and CIFAR-10 have some wrong labels of their own, which count as right here.
"""

import argparse
import json
import logging
import math
import statistics
import time
import warnings
from pathlib import Path

import pytorch_lightning as pl
import torch
from environment import environment
from torch import Generator, Tensor, nn
from torch.nn.functional import avg_pool2d, cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from lightning_taskinfo import HardSamples
from lightning_taskinfo.data import load_digits, load_npz

warnings.filterwarnings("ignore")
for namespace in ("lightning.pytorch", "pytorch_lightning"):
    logging.getLogger(namespace).setLevel(logging.ERROR)

DATA = ("digits", "notmnist", "cifar10", "sentences")
SHARES = (0.1, 0.2, 0.4)
SCORES = ("loss", "squared_norm", "last_loss")
SAMPLES = 1000
TEST = 1000
EPOCHS = (5, 10, 20)
BATCH = 64
RATE = 1e-3
TOPICS, KEYWORDS, WORDS, LENGTH = 4, 12, 200, 16


def sentences(generator: Generator, samples: int) -> tuple[Tensor, Tensor]:
    """Return token ids ``[samples, LENGTH]`` and topics.

    A word is one of the topic's own keywords with probability 0.2, one of another topic's with 0.1, or any other word.
    """
    topics = torch.randint(TOPICS, (samples,), generator=generator)
    shape = (samples, LENGTH)
    other = (topics[:, None] + torch.randint(1, TOPICS, shape, generator=generator)) % TOPICS
    own_word = topics[:, None] * KEYWORDS + torch.randint(KEYWORDS, shape, generator=generator)
    other_word = other * KEYWORDS + torch.randint(KEYWORDS, shape, generator=generator)
    any_word = torch.randint(TOPICS * KEYWORDS, WORDS, shape, generator=generator)
    draw = torch.rand(shape, generator=generator)
    words = torch.where(draw < 0.2, own_word, torch.where(draw < 0.3, other_word, any_word))
    return words + 1, topics  # 0 is padding


def images(name: str, folder: Path | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if name == "digits":
        data = load_digits(size=28)
    elif folder is None:
        raise SystemExit(f"--data-dir is needed for {name}")
    else:
        data = load_npz(folder / {"notmnist": "notmnist.npz", "cifar10": "cifar10_12k.npz"}[name])
    (x, y), (x_test, y_test) = data.train()[:], data.test()[:]
    x, x_test = avg_pool2d(x, 2), avg_pool2d(x_test, 2)
    mean, std = x.mean((0, 2, 3), keepdim=True), x.std((0, 2, 3), keepdim=True)
    return (x - mean) / std, y, (x_test - mean) / std, y_test


def load(name: str, seed: int, folder: Path | None) -> tuple[TensorDataset, TensorDataset, int]:
    """Return training samples with right labels, test samples, and the number of classes."""
    generator = Generator().manual_seed(1000 + seed)
    if name == "sentences":
        x, y = sentences(generator, SAMPLES + TEST)
        return (
            TensorDataset(x[:SAMPLES], y[:SAMPLES]),
            TensorDataset(x[SAMPLES:], y[SAMPLES:]),
            TOPICS,
        )
    x, y, x_test, y_test = images(name, folder)
    chosen = torch.randperm(len(y), generator=generator)[:SAMPLES]
    return TensorDataset(x[chosen], y[chosen]), TensorDataset(x_test[:TEST], y_test[:TEST]), 10


def mislabelled(y: Tensor, classes: int, share: float, seed: int) -> tuple[Tensor, Tensor]:
    """Return labels of which a share is replaced by other classes, and which those are."""
    generator = Generator().manual_seed(2000 + seed)
    chosen = torch.randperm(len(y), generator=generator)[: round(share * len(y))]
    labels = y.clone()
    labels[chosen] = (
        y[chosen] + torch.randint(1, classes, chosen.shape, generator=generator)
    ) % classes
    return labels, labels != y


def cnn(shape: torch.Size, classes: int) -> nn.Module:
    channels, height, width = shape
    return nn.Sequential(
        *(nn.Conv2d(channels, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(
            nn.Flatten(),
            nn.Linear(32 * (height // 4) * (width // 4), 64),
            nn.ReLU(),
            nn.Linear(64, classes),
        ),
    )


def bert(classes: int) -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    size = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 64,
    }
    config = BertConfig(
        vocab_size=WORDS + 1, max_position_embeddings=LENGTH, num_labels=classes, **size
    )
    return BertForSequenceClassification(config)


class Classifier(pl.LightningModule):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        outputs = self.net(x)
        return getattr(outputs, "logits", outputs)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), RATE)


class AtEpochs(pl.Callback):
    """Keeps what the samples' scores are after each epoch."""

    def __init__(self, norms: HardSamples) -> None:
        self.norms = norms
        self.after = {}

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.after[trainer.current_epoch + 1] = self.norms.samples


def area(scores: Tensor, positive: Tensor) -> float:
    """Return the area under the ROC curve: how often a positive is above a negative, ties counting half."""
    order = scores.double().sort().values
    below = torch.searchsorted(order, scores.double())
    up_to = torch.searchsorted(order, scores.double(), right=True)
    ranks = (below + up_to + 1) / 2  # mean rank among equals, from 1
    n, m = int(positive.sum()), int((~positive).sum())
    return ((ranks[positive].sum() - n * (n + 1) / 2) / (n * m)).item()


def precision(scores: Tensor, positive: Tensor) -> float:
    """Return the share of positives among the tenth with the largest scores."""
    return positive[scores.argsort(descending=True)[: len(scores) // 10]].double().mean().item()


def run(name: str, share: float, seed: int, folder: Path | None, epochs: tuple[int, ...]) -> dict:
    """Train once; return areas and precisions by score and epoch."""
    train, test, classes = load(name, seed, folder)
    x, y = train.tensors
    labels, wrong = mislabelled(y, classes, share, seed)
    torch.manual_seed(seed)
    model = Classifier(bert(classes) if name == "sentences" else cnn(x.shape[1:], classes))
    norms = HardSamples(max_samples=BATCH, rank_by="squared_norm")
    watch = AtEpochs(norms)
    trainer = pl.Trainer(
        max_epochs=max(epochs),
        accelerator="cpu",
        callbacks=[norms, watch],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    start = time.process_time()
    trainer.fit(model, DataLoader(TensorDataset(x, labels), batch_size=BATCH, shuffle=True))
    seconds = time.process_time() - start
    model.eval()
    with torch.no_grad():
        accuracy = (model(test.tensors[0]).argmax(1) == test.tensors[1]).double().mean().item()
        fitted = (model(x).argmax(1) == labels)[wrong].double().mean().item()
    results = {}
    for epoch in epochs:
        now, before = watch.after[epoch], watch.after[epoch - 1]
        scores = {
            "loss": now.loss,
            "squared_norm": now.squared_norm,
            "last_loss": now.loss * now.seen - before.loss * before.seen,
        }
        results[str(epoch)] = {
            key: {"area": area(values, wrong), "precision": precision(values, wrong)}
            for key, values in scores.items()
        }
    context = {"test_accuracy": accuracy, "wrong_labels_fitted": fitted, "cpu_seconds": seconds}
    return {"data": name, "share": share, "seed": seed, "results": results, **context}


def mean_and_error(values: list[float]) -> tuple[float, float]:
    return statistics.fmean(values), statistics.stdev(values) / math.sqrt(len(values)) if len(
        values
    ) > 1 else math.nan


def summarise(units: list[dict], epochs: tuple[int, ...]) -> dict:
    """Return rows of means over seeds, and the decision."""
    last = str(max(epochs))
    rows, differences = [], []
    for name in DATA:
        for share in SHARES:
            group = [unit for unit in units if unit["data"] == name and unit["share"] == share]
            if not group:
                continue
            row = {"data": name, "wrong labels": f"{share:.0%}", "trainings": len(group)}
            for measure in ("area", "precision"):
                for score in SCORES:
                    values = [unit["results"][last][score][measure] for unit in group]
                    mean, error = mean_and_error(values)
                    row[f"{measure}, {score}"] = f"{mean:.3f}" + (
                        f" ± {error:.3f}" if len(values) > 1 else ""
                    )
            for key, label in (
                ("test_accuracy", "test accuracy"),
                ("wrong_labels_fitted", "wrong labels fitted"),
            ):
                row[label] = round(statistics.fmean(unit[key] for unit in group), 3)
            rows.append(row)
            areas = {
                s: statistics.fmean(unit["results"][last][s]["area"] for unit in group)
                for s in SCORES
            }
            differences.append(areas["squared_norm"] - areas["loss"])
    mean, error = mean_and_error(differences)
    overall = {
        f"after {epoch} epochs, {score}, {measure}": statistics.fmean(
            unit["results"][str(epoch)][score][measure] for unit in units
        )
        for epoch in epochs
        for score in SCORES
        for measure in ("area", "precision")
    }
    decided = "squared_norm" if mean > 2 * error else "loss"
    return {
        "rows": rows,
        "overall": overall,
        "area of squared_norm minus area of loss": {"mean": mean, "standard_error": error},
        "rank_by": decided,
    }


def draw(units: list[dict], epochs: tuple[int, ...], path: Path) -> None:
    """Draw areas and precisions by setting, a dot a training."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    names = {"area": "area under the ROC curve", "precision": "right among the first tenth"}
    settings = [(name, share) for name in DATA for share in SHARES]
    for ax, (measure, label) in zip(figure.subplots(1, 2), names.items(), strict=True):
        for i, score in enumerate(("loss", "squared_norm")):
            for j, (name, share) in enumerate(settings):
                group = [u for u in units if u["data"] == name and u["share"] == share]
                values = [u["results"][str(max(epochs))][score][measure] for u in group]
                label_of = score.replace("_", " ") if j == 0 else None
                ax.plot(
                    [j + 0.3 * i - 0.15] * len(values),
                    values,
                    ".",
                    color=f"C{i}",
                    alpha=0.7,
                    label=label_of,
                )
        ax.set_xticks(
            range(len(settings)), [f"{name} {share:.0%}" for name, share in settings], rotation=90
        )
        ax.set(ylabel=label, ylim=(None, 1.005))
        ax.spines[["top", "right"]].set_visible(False)
        ax.legend(frameon=False, title="samples ranked by")
    figure.savefig(path, dpi=150)


def store(units: list[dict], epochs: tuple[int, ...], path: Path) -> None:
    report = {"environment": environment(), **summarise(units, epochs), "units": units}
    path.write_text(json.dumps(report, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--data", nargs="+", choices=DATA, default=DATA)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="two epochs, one seed, one share")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/wrong_labels.json"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    epochs = (2,) if arguments.quick else EPOCHS
    stored = json.loads(arguments.out.read_text()) if arguments.out.exists() else {"units": []}
    units = stored["units"]
    done = {(unit["data"], unit["share"], unit["seed"]) for unit in units}
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    for seed in range(1 if arguments.quick else arguments.seeds):
        for name in arguments.data:
            for share in SHARES[:1] if arguments.quick else SHARES:
                if (name, share, seed) in done:
                    continue
                units.append(run(name, share, seed, arguments.data_dir, epochs))
                last = units[-1]["results"][str(max(epochs))]
                print(name, share, seed, {score: last[score] for score in SCORES}, flush=True)
                store(units, epochs, arguments.out)
    if units:
        store(units, epochs, arguments.out)
        draw(units, epochs, arguments.out.with_suffix(".png"))
        print(json.dumps(summarise(units, epochs)["overall"], indent=1))


if __name__ == "__main__":
    main()
