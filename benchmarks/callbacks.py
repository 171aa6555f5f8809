"""What watching costs: the time of an epoch with a callback, as a ratio to the same epoch without it.

Variants take turns within every round, so that what else the machine does falls on all of them; medians of the
ratios go to a JSON file and a table. CPU time is given beside wall-clock time, since a busy machine disturbs it less.
"""

import argparse
import json
import logging
import platform
import statistics
import time
import warnings
from pathlib import Path

import pytorch_lightning as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_taskinfo import FisherTrace, InformationInWeights, LocalMinimum

warnings.filterwarnings("ignore")
for namespace in ("lightning.pytorch", "pytorch_lightning"):
    logging.getLogger(namespace).setLevel(logging.ERROR)


class Classifier(pl.LightningModule):
    def __init__(self, net: nn.Module):
        super().__init__()
        self.net = net

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 1e-3)


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(784, 300), nn.ReLU(), nn.Linear(300, 300), nn.ReLU(), nn.Linear(300, 10)
    )


def cnn() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(32 * 49, 64), nn.ReLU(), nn.Linear(64, 10)),
    )


def train_step(**arguments):
    return FisherTrace(data="train_step", labels="empirical", every_n_steps=1, **arguments)


NETWORKS = {"MLP 784-300-300-10": mlp, "CNN 16-32-64": cnn}
VARIANTS = {
    "FisherTrace()": lambda: [FisherTrace()],
    "InformationInWeights()": lambda: [InformationInWeights()],
    "LocalMinimum()": lambda: [LocalMinimum()],
    "all three": lambda: [FisherTrace(), InformationInWeights(), LocalMinimum()],
    "training step, every step": lambda: [train_step()],
    "training step, every step, whole batch": lambda: [train_step(max_samples=10_000)],
}


class Clock(pl.Callback):
    """Wall-clock and CPU time of the epoch, and of what is before and after it."""

    def __init__(self):
        self.marks = {}

    def mark(self, name):
        self.marks[name] = (time.perf_counter(), time.process_time())

    def on_train_epoch_start(self, *_):
        self.mark("start")

    def on_train_epoch_end(self, *_):
        self.mark("epoch")

    def on_train_end(self, *_):
        self.mark("end")

    def seconds(self, first, last):
        return [b - a for a, b in zip(self.marks[first], self.marks[last], strict=True)]


def run(make, callbacks, data, batch_size):
    torch.manual_seed(0)
    clock = Clock()
    trainer = pl.Trainer(
        max_epochs=1,
        accelerator="cpu",
        callbacks=[*callbacks, clock],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Classifier(make()), DataLoader(data, batch_size=batch_size, shuffle=True))
    return {"epoch": clock.seconds("start", "epoch"), "end": clock.seconds("epoch", "end")}


def measure(make, data, *, batch_size, repeats):
    """Return, by variant, the medians of time relative to the plain epoch of the same round."""
    ratios = {name: {"wall": [], "cpu": [], "end_wall": [], "end_cpu": []} for name in VARIANTS}
    plain_times = []
    run(make, [], data, batch_size)
    for _ in range(repeats):
        plain = run(make, [], data, batch_size)
        plain_times.append(plain["epoch"][0])
        for name, callbacks in VARIANTS.items():
            watched = run(make, callbacks(), data, batch_size)
            for i, kind in enumerate(("wall", "cpu")):
                ratios[name][kind].append(watched["epoch"][i] / plain["epoch"][i])
                ratios[name][f"end_{kind}"].append((watched["end"][i] - plain["end"][i]) / plain["epoch"][i])
    summary = {
        name: {kind: statistics.median(values) for kind, values in by_kind.items()}
        | {"wall_range": [min(by_kind["wall"]), max(by_kind["wall"])]}
        for name, by_kind in ratios.items()
    }
    return {"plain_epoch_seconds": statistics.median(plain_times), "ratios": summary}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=12_800)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/callbacks.json"))
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(arguments.samples, 1, 28, 28, generator=generator)
    data = TensorDataset(images, torch.randint(10, (arguments.samples,), generator=generator))
    options = {"batch_size": arguments.batch_size, "repeats": arguments.repeats}
    results = {name: measure(make, data, **options) for name, make in NETWORKS.items()}
    environment = {"torch": torch.__version__, "python": platform.python_version(), "cpu": platform.processor()}
    settings = {**options, "samples": arguments.samples, "threads": arguments.threads}
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    report = {"environment": environment, "settings": settings, "results": results}
    arguments.out.write_text(json.dumps(report, indent=2) + "\n")
    print("| network | variant | epoch, wall | epoch, CPU | end of fit, in epochs |\n|---|---|---|---|---|")
    for network, result in results.items():
        for name, r in result["ratios"].items():
            print(f"| {network} | {name} | {r['wall']:.3f} | {r['cpu']:.3f} | {r['end_wall']:.3f} |")


if __name__ == "__main__":
    main()
