"""Three questions in a few minutes: what is in the weights, will it transfer, and what can be proved?

Small networks on digits of 8×8 pixels, several seeds each, on all cores. Run it with ``make demo``. The three answers
are printed, and drawn on one page. Finished parts are kept: run it again to see them or to continue.
"""

# %%
import argparse
import json
import logging
import os
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor, as_completed
from contextlib import contextmanager, nullcontext
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
import wandb
from demo_page import log_page, show, write_page
from pytorch_lightning.loggers import WandbLogger
from torch import Generator, Tensor, nn
from torch.nn.functional import adaptive_avg_pool2d, cross_entropy
from torch.utils.data import DataLoader, TensorDataset
from tqdm.auto import tqdm

from lightning_taskinfo import (
    FisherTrace,
    HardSamples,
    InformationInWeights,
    Prior,
    Stages,
    TransferDataModule,
    TransferReport,
    certify,
    rank_starts,
)
from lightning_taskinfo.data import ArrayData, load_dataset
from lightning_taskinfo.transfer import transfer

os.environ.setdefault("WANDB_SILENT", "true")
for namespace in ("lightning.pytorch", "pytorch_lightning"):
    logging.getLogger(namespace).setLevel(logging.ERROR)
warnings.filterwarnings("ignore", module="pytorch_lightning")
warnings.filterwarnings("ignore", message="InformationInWeights: networks drawn from the Gaussian")

STARTS = ("MNIST", "letters", "random-labels")
SETTINGS: dict[str, Any] = {
    "seeds": 5,
    "samples": 500,  # training images of a network in the first question
    "shares": [0.0, 0.25, 0.5, 1.0],  # of random labels
    "epochs": 150,
    "samples_with_wrong_labels": 1000,
    "epochs_with_wrong_labels": 20,
    "pretraining_epochs": 20,
    "labels": 20,  # of the target
    "seeds_of_starts": 10,
    "steps": 300,  # of a fine-tuning
    "source": 2000,  # images of MNIST beside unlabelled ones
    "unlabelled": 640,  # inputs of the target
    "pretraining_epochs_beside_unlabelled": 5,
    "gentle_epochs": 10,  # of a fine-tuning that stays near its start, for the proof
    "draws": 1000,  # of a certificate
}
FAST = {
    "seeds": 2,
    "samples": 128,
    "shares": [0.0, 1.0],
    "epochs": 4,
    "samples_with_wrong_labels": 200,
    "epochs_with_wrong_labels": 2,
    "pretraining_epochs": 1,
    "labels": 20,
    "seeds_of_starts": 2,
    "steps": 4,
    "source": 128,
    "unlabelled": 128,
    "pretraining_epochs_beside_unlabelled": 1,
    "gentle_epochs": 1,
    "draws": 50,
}


# %% An ordinary LightningModule
class Digits(pl.LightningModule):
    """A small network for images of 8×8 pixels and ten classes."""

    def __init__(self, lr: float = 1e-3) -> None:
        super().__init__()
        self.lr = lr
        self.body = nn.Sequential(
            nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU()
        )
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        loss = cross_entropy(self(x), y)
        self.log("train_loss", loss, on_step=False, on_epoch=True)
        return loss

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        x, y = batch
        self.log("test_error", (self(x).argmax(1) != y).float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def fit(model: Digits, x: Tensor, y: Tensor, **options: Any) -> Digits:
    """Train on these samples, as any Trainer does."""
    trainer = pl.Trainer(
        accelerator="cpu",
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
        **{"logger": False, **options},
    )
    trainer.fit(model, DataLoader(TensorDataset(x, y), batch_size=64, shuffle=True))
    return model.eval()


def accuracy(model: Digits, x: Tensor, y: Tensor) -> float:
    with torch.no_grad():
        return (model(x).argmax(1) == y).float().mean().item()


# %% Data: two kinds of handwritten digits, and letters
def mnist() -> ArrayData:
    """5,000 digits of MNIST, brought to 8×8 pixels."""
    data = load_dataset("digits", size=28)
    x_train, x_test = (
        adaptive_avg_pool2d(torch.from_numpy(x[..., 4:24, 4:24]).float(), 8).round().byte().numpy()
        for x in (data.x_train, data.x_test)
    )
    return ArrayData(x_train, data.y_train, x_test, data.y_test, name="MNIST 8×8", num_classes=10)


def target() -> ArrayData:
    """scikit-learn's 1,797 digits: other writers, another scanner."""
    return load_dataset("digits", size=8)


# %% 1. What is in the weights?
def memorise(share: float, seed: int, settings: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Train with a share of random labels, and watch."""
    generator = Generator().manual_seed(seed)
    data = mnist()
    x, y = data.train()[:]
    chosen = torch.randperm(len(y), generator=generator)[: settings["samples"]]
    x, y = x[chosen], y[chosen]
    redrawn = torch.randperm(len(y), generator=generator)[: round(share * len(y))]
    y[redrawn] = torch.randint(10, (len(redrawn),), generator=generator)

    pl.seed_everything(seed, verbose=False)
    moved = InformationInWeights(every_n_epochs=settings["epochs"] // 4)
    fisher = FisherTrace(every_n_steps=100, data="train", max_samples=250)
    options: dict[str, Any] = {"max_epochs": settings["epochs"], "callbacks": [moved, fisher]}
    if seed > 0:
        model = fit(Digits(lr=2e-3), x, y, **options)
    else:  # one run of each share is enough to see the curves in Weights & Biases
        with wandb.init(
            name=f"{share:.0%} random labels", project="demo", dir=folder, mode="offline"
        ) as run:
            model = fit(Digits(lr=2e-3), x, y, logger=WandbLogger(experiment=run), **options)
    return {
        "share": share,
        "seed": seed,
        "squared_displacement": moved.history[-1]["squared_displacement"],
        "largest_fisher_trace": max(row["fisher_trace"] for row in fisher.history),
        "train_accuracy": accuracy(model, x, y),
        "test_accuracy": accuracy(model, *data.test()[:]),
    }


def find_wrong_labels(seed: int, settings: dict[str, Any]) -> dict[str, Any]:
    """Give a tenth of the samples a wrong label, train, and look which samples were hardest to learn."""
    generator = Generator().manual_seed(seed)
    x, true = mnist().train()[:]
    chosen = torch.randperm(len(true), generator=generator)[: settings["samples_with_wrong_labels"]]
    x, true = x[chosen], true[chosen]
    k = len(true) // 10
    given = true.clone()
    given[:k] = (given[:k] + torch.randint(1, 10, (k,), generator=generator)) % 10

    pl.seed_everything(seed, verbose=False)
    samples = HardSamples()
    fit(Digits(), x, given, max_epochs=settings["epochs_with_wrong_labels"], callbacks=[samples])
    first = samples.samples.ranking()[:k]
    return {
        "precision": (given != true)[first].float().mean().item(),
        "k": k,
        "images": x[first[:18], 0].tolist(),
        "given": given[first[:18]].tolist(),
        "true": true[first[:18]].tolist(),
    }


# %% 2. Will it transfer?
def pretrain(name: str, path: Path, epochs: int) -> None:
    """Train on one source and keep the checkpoint: what you would have downloaded."""
    x, y = (load_dataset("letters", size=8) if name == "letters" else mnist()).train()[:]
    if name == "random-labels":
        y = y[torch.randperm(len(y), generator=Generator().manual_seed(0))]
    pl.seed_everything(0, verbose=False)
    weights = fit(Digits(), x, y, max_epochs=epochs).state_dict()
    if (
        name != "MNIST"
    ):  # a head for other classes would fit in size and mislead: the target gets a fresh one
        weights = {key: weight for key, weight in weights.items() if not key.startswith("head.")}
    torch.save(weights, path)


def start(path: Path | None) -> Digits:
    """Return the network with the weights of a checkpoint, or with fresh ones."""
    pl.seed_everything(0, verbose=False)
    model = Digits()
    if path is not None:
        model.load_state_dict(torch.load(path, weights_only=True), strict=False)
    return model


def rank(starts: dict[str, Path], settings: dict[str, Any], path: Path) -> dict[str, Any]:
    """Read the frozen features of each start on the labels at hand, without training."""
    x, y = target().train()[:]
    few = torch.cat([(y == c).nonzero().flatten()[: settings["labels"] // 10] for c in range(10)])
    begin = time.perf_counter()
    models = {name: start(path) for name, path in starts.items()}
    ranking = rank_starts(models, (x[few], y[few]), progress=False)
    seconds = time.perf_counter() - begin
    ranking.save(path)
    return {
        "first": ranking.best.name,
        "advice": ranking.reading(),
        "seconds": seconds,
        "file": str(path),
    }


def compare_starts(
    starts: dict[str, Path], settings: dict[str, Any], folder: Path, how: dict[str, Any]
) -> TransferReport:
    """Fine-tune every start on a few labels, and train from scratch beside it."""
    data = target()
    return transfer(
        Digits,
        {"train": data.train(), "test": data.test()},
        starts=starts,
        labels=settings["labels"],
        seeds=settings["seeds_of_starts"],
        metric="test_error",
        trainer={"max_steps": settings["steps"]},
        batch_size=5,
        folder=folder,
        name="MNIST, letters or random labels → digits",
        **how,
    )


def use_unlabelled(settings: dict[str, Any], folder: Path, how: dict[str, Any]) -> TransferReport:
    """Pretrain on MNIST beside unlabelled images of the target: plainly, with Lautum, with mutual information."""
    data = TransferDataModule(
        mnist(),
        target(),
        labels=settings["labels"],
        max_source=settings["source"],
        max_unlabeled=settings["unlabelled"],
    )
    steps_per_epoch = settings["unlabelled"] // data.batch_size
    stages = Stages(
        pretrain_epochs=settings["pretraining_epochs_beside_unlabelled"],
        fine_tune_epochs=max(1, settings["steps"] // steps_per_epoch),
    )
    return transfer(
        "mlp",
        data,
        methods=["standard", "lautum", "mutual_information"],
        seeds=settings["seeds"],
        stages=stages,
        folder=folder,
        **how,
    )


# %% 3. What can be proved?
def prove(name: str, path: Path | None, settings: dict[str, Any]) -> dict[str, Any]:
    """Train on all labels of the target, and bound the error on new digits.

    A pretrained network is fine-tuned gently: the nearer it stays to its start, the better the bound.
    """
    data = target()
    x, y = data.train()[:]
    model = start(path)
    if path is None:
        prior = Prior.of(model, origin="random initialisation")  # before training
        fit(model, x, y, max_epochs=3 * settings["gentle_epochs"])
    else:
        prior = Prior.of(model, origin=f"pretrained on {name}, which holds no image of the target")
        model.lr = 1e-4
        fit(model, x, y, max_epochs=settings["gentle_epochs"])
    certificate = certify(
        model, (x, y), prior, held_out=data.test()[:], draws=settings["draws"], progress=False
    )
    return {
        "start": name,
        **{key: value for key, value in certificate.to_dict().items() if key != "candidates"},
        "text": str(certificate),
        "test_error": 1 - accuracy(model, *data.test()[:]),
    }


# %% Run it, on all cores
def gather(
    pool: Executor | None, title: str, function: Callable[..., Any], arguments: Iterable[tuple]
) -> list[Any]:
    """Return ``function(*a)`` for all arguments, with a bar."""
    arguments = list(arguments)
    with bar(title, len(arguments)) as drawn:
        if pool is None:
            results = []
            for each in arguments:
                results.append(function(*each))
                drawn.update()
            return results
        futures = [pool.submit(function, *each) for each in arguments]
        for _ in as_completed(futures):
            drawn.update()
    return [future.result() for future in futures]


def bar(title: str, total: int) -> tqdm:
    """Draw a bar where standard error is a terminal; otherwise nothing."""
    return tqdm(total=total, desc=f"  {title}", leave=False, disable=None, dynamic_ncols=True)


@contextmanager
def followed(title: str) -> Iterator[Callable[[int, int, str], None]]:
    """Yield a function that draws the progress of a transfer."""
    with bar(title, 1) as drawn:

        def tell(done: int, total: int, label: str) -> None:
            drawn.total = total
            drawn.update(done - drawn.n)

        yield tell


def kept(path: Path, compute: Callable[[], Any]) -> Any:
    """Return what a finished run left in a file, or compute and keep it."""
    if not path.exists():
        result = compute()
        part = path.with_suffix(".part")
        part.write_text(json.dumps(result))
        part.replace(path)
    return json.loads(path.read_text())


def gains(report: TransferReport) -> list[dict[str, Any]]:
    """The report's gains in accuracy, in points, with intervals over seeds and a verdict."""
    return [
        {
            "method": row.method,
            "baseline": row.baseline,
            "points": [100 * value for value in (row.gain.low, row.gain.mean, row.gain.high)],
            "verdict": row.verdict,
        }
        for row in report.transferability()
        if row.measure == "accuracy" or row.measure.endswith("error")
    ]


def answer(folder: Path, settings: dict[str, Any], pool: Executor | None) -> dict[str, Any]:
    """Answer the three questions, one after the other; what is already there is read."""
    seeds = range(settings["seeds"])
    runs = [(share, seed, settings, folder) for seed in seeds for share in settings["shares"]]

    print("1/3 What is in the weights? Training networks on digits with right and random labels.")
    memorised = kept(
        folder / "memorised.json", lambda: gather(pool, "right and random labels", memorise, runs)
    )
    wrong = kept(
        folder / "wrong_labels.json",
        lambda: gather(
            pool, "a tenth wrong labels", find_wrong_labels, [(s, settings) for s in seeds]
        ),
    )

    labels = settings["labels"]
    print(
        f"2/3 Will it transfer? Fine-tuning on {labels} labels from three starts and from scratch."
    )
    starts = {name: folder / f"{name}.pt" for name in STARTS}
    missing = [
        (name, path, settings["pretraining_epochs"])
        for name, path in starts.items()
        if not path.exists()
    ]
    gather(pool, "pretraining", pretrain, missing)
    ranking = kept(folder / "ranked.json", lambda: rank(starts, settings, folder / "ranking.json"))
    reports = {}
    for name, run in {
        "starts": partial(compare_starts, starts),
        "unlabelled": use_unlabelled,
    }.items():
        with followed(name) as tell:
            how = {"workers": 0} if pool is None else {"executor": pool}
            reports[name] = run(settings, folder / name, {**how, "progress": tell})
        reports[name].save(folder / name / "report")

    found = gains(reports["starts"])
    best = max(found, key=lambda row: row["points"][1])["method"]
    print(f"3/3 What can be proved? Certifying the network that starts from {best}.")
    proofs = [(best, starts[best], settings), ("scratch", None, settings)]
    certificates = kept(
        folder / "certificates.json", lambda: gather(pool, "certificates", prove, proofs)
    )
    return {
        "settings": settings,
        "memorised": memorised,
        "wrong_labels": wrong,
        "ranking": ranking,
        "starts": found,
        "unlabelled": gains(reports["unlabelled"]),
        "tables": {name: report.table() for name, report in reports.items()},
        "certificates": certificates,
    }


# %% All of it
def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--fast", action="store_true", help="short trainings, to see that it runs")
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path("runs/demo"),
        help="folder for everything that is written",
    )
    arguments = parser.parse_args(argv)
    folder, settings = arguments.folder, FAST if arguments.fast else SETTINGS
    folder.mkdir(parents=True, exist_ok=True)
    if kept(folder / "settings.json", lambda: settings) != settings:
        raise SystemExit(
            f"{folder} holds results of other settings: delete it or choose another --folder."
        )
    if not (folder / "results.json").exists():
        with nullcontext() if arguments.fast else spawned() as pool:
            results = answer(folder, settings, pool)
        write_page(results, folder)
        log_page(results, folder)
        kept(folder / "results.json", lambda: results)
    show(json.loads((folder / "results.json").read_text()), folder)
    if arguments.fast:
        print("These trainings were too short to show anything: --fast is to see that it runs.")


def spawned() -> ProcessPoolExecutor:
    """One process for each core, one torch thread for each process."""
    return ProcessPoolExecutor(
        os.cpu_count(), get_context("spawn"), initializer=torch.set_num_threads, initargs=(1,)
    )


if __name__ == "__main__":
    main()
