"""Which files each use of the package goes through, in order: the maps in CONTRIBUTING.md, made by running them.

python docs/walks.py            # prints the maps
python docs/walks.py --write    # puts them into CONTRIBUTING.md
"""

import argparse
import ast
import logging
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from pytorch_lightning import Callback, LightningModule, Trainer
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import lightning_taskinfo as taskinfo

PACKAGE = Path(taskinfo.__file__).parent
CONTRIBUTING = PACKAGE.parent / "CONTRIBUTING.md"
BEGIN, END = "<!-- walks: written by docs/walks.py -->\n", "<!-- end of walks -->\n"


class Walk:
    """Notes the files of the package whose functions are called, in the order of their first call.

    Files at the top whose names begin with an underscore are left out: any other may use them.
    """

    def __init__(self) -> None:
        self.files: list[Path] = []
        self._seen: set[CodeType] = set()

    def __enter__(self) -> "Walk":
        sys.setprofile(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event != "call" or code in self._seen:
            return
        self._seen.add(code)
        if code.co_name.startswith("<"):  # an import, or a part of a function
            return
        path = Path(code.co_filename)
        if path not in self.files and PACKAGE in path.parents and not _helper(path):
            self.files.append(path)

    def __str__(self) -> str:
        rows = [(str(path.relative_to(PACKAGE)), path) for path in self.files]
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:{width}}  {_first_sentence(path)}" for name, path in rows)


def _helper(path: Path) -> bool:
    """Whether a file is one that any other may use, such as ``_ranges.py``."""
    return path.parent == PACKAGE and path.name.startswith("_")


def _first_sentence(path: Path) -> str:
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    return text.partition("\n")[0].partition(": ")[0].rstrip(".")


class Net(LightningModule):
    """What the walks are made with."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return cross_entropy(self(batch[0]), batch[1])

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_error", (self(batch[0]).argmax(-1) != batch[1]).float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Regularised(taskinfo.MutualInformationMixin, Net):
    """The same, with a penalty; one step of it is followed."""

    def __init__(self, walk: Walk) -> None:
        super().__init__()
        self.walk = walk
        self.mutual_information = taskinfo.MutualInformation((4,), feature_dim=2)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if batch_idx == 0:  # in which everything is new
            return self._loss(batch)
        with self.walk:
            return self._loss(batch)

    def _loss(self, batch: Any) -> torch.Tensor:
        x, y = batch
        features = self(x)
        penalty = self.mutual_information_penalty(x, features)
        return self.penalised(cross_entropy(features, y), mutual_information=penalty)


class Begin(Callback):
    """Begins a walk before the callbacks behind it measure after the last batch."""

    def __init__(self, walk: Walk) -> None:
        self.walk = walk

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.is_last_batch:
            self.walk.__enter__()

    def on_train_epoch_end(self, *_: Any) -> None:
        self.walk.__exit__()


def data() -> TensorDataset:
    """Two classes on two sides."""
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, (x[:, 0] > 0).long())


def fit(module: LightningModule, *callbacks: Callback) -> None:
    """Train for one epoch of two steps."""
    trainer = Trainer(
        max_epochs=1,
        accelerator="cpu",
        callbacks=[*callbacks],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(data(), batch_size=32))


def watch(walk: Walk) -> None:
    """One measurement of `FisherTrace`, not the first."""
    fit(Net(), Begin(walk), taskinfo.FisherTrace(every_n_steps=1))


def regularise(walk: Walk) -> None:
    """One training step with `MutualInformationMixin`."""
    fit(Regularised(walk))


def transfer(walk: Walk) -> None:
    """`print(transfer(…))` of a module, from one start and from scratch."""
    whole = data()
    with tempfile.TemporaryDirectory() as folder, walk:
        report = taskinfo.transfer(
            Net,
            {"train": whole, "test": whole},
            starts={"start": Net().state_dict()},
            labels=8,
            seeds=2,
            trainer={"max_steps": 2},
            folder=folder,
            progress=False,
        )
        str(report)


def certify(walk: Walk) -> None:
    """`certify()` of a network, with the prior at its start."""
    model = Net().net
    prior = taskinfo.Prior.of(model)
    with walk:
        taskinfo.certify(
            model, data(), prior, structure="diagonal", betas=(1.0,), draws=100, progress=False
        )


WALKS: tuple[Callable[[Walk], None], ...] = (watch, regularise, transfer, certify)


def section() -> str:
    """Return the maps of all walks in Markdown."""
    parts = []
    for follow in WALKS:
        follow(Walk())  # what is imported on the way is no part of it
        walk = Walk()
        follow(walk)
        parts.append(f"**{follow.__name__.capitalize()}**: {follow.__doc__}\n\n```\n{walk}\n```\n")
    return "\n".join(parts)


def main() -> None:
    """Print the maps, or write them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="put the maps into CONTRIBUTING.md")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    maps = section()
    if not arguments.write:
        print(maps)
        return
    before, begin, rest = CONTRIBUTING.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    CONTRIBUTING.write_text(before + begin + maps + end + after)


if __name__ == "__main__":
    main()
