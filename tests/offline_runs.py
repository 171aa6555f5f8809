"""Offline runs of Weights & Biases, as its own terminal tool reads them."""

import json
import os
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from tests.ranks import forked


def inspect(run: Path, *options: str) -> str:
    """Return what ``wandb leet inspect --json`` prints of a run."""
    if Version(version("wandb")) < Version("0.31"):
        pytest.skip("`wandb leet inspect --json`, with which the run is read, came with wandb 0.31")
    import wandb.cli.cli  # noqa: F401  # here, so that a forked process does not import it anew

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "printed")
        process = forked(_print_into, path, ["leet", "inspect", "--json", *options, str(run)])
        process.join()
        printed = path.read_text()
    assert process.exitcode == 0, printed
    return printed


def records_of(run: Path) -> list[dict[str, Any]]:
    """Return what stands in the file of a run, one record after another."""
    return [json.loads(line) for line in inspect(run).splitlines()]


def _print_into(path: Path, words: list[str]) -> None:
    from wandb.cli.cli import cli

    with path.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    cli(words)
