"""Imports point downwards only. The table below *is* the architecture."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "lightning_taskinfo"
READER = {"_batches", "_hugging_face", "_model_calls"}
MATHS = READER | {"torch", "_layers", "_observe", "_warn", "_ranges", "functional"}
FILES = {"_files", "_cells"}
DATASETS = {"matplotlib", "mlxtend", "sklearn", "torchvision"}
STATE = MATHS | {"_progress", "torchmetrics", "backpack"}
STATE |= {"fisher", "distributions", "variational", "regularizers", "certificates"}
GLUE = STATE | {"_lightning", "_wandb", "callbacks", "mixins", "plotting", "data"}
TOP = GLUE | FILES | {"_tables", "numpy", "transfer", "tasks"}
ALLOWED = {  # layer -> the layers and frameworks it may import
    "_observe": {"torch"},
    "_batches": {"torch", "_hugging_face", "_model_calls", "_observe"},
    "_hugging_face": {"torch", "_observe"},
    "_model_calls": {"torch", "_hugging_face", "_observe"},
    "_wandb": {"matplotlib", "plotting", "wandb"},
    "_warn": set(),
    "_layers": set(),
    "_ranges": set(),
    "_tables": set(),
    "_progress": {"tqdm"},
    "_files": {"torch"},
    "_cells": {"torch", "_files"},
    "_lightning": {"lightning", "pytorch_lightning"},
    "functional": MATHS,
    "fisher": STATE,
    "distributions": STATE,
    "variational": STATE,
    "regularizers": STATE,
    "certificates": STATE | {"plotting"},
    "callbacks": GLUE | {"wandb"},
    "mixins": GLUE,
    "_autoload": {"_lightning", "_warn"},
    "transfer": TOP | {"matplotlib", "rich", "wandb"},
    "tasks": TOP | {"matplotlib", "rich", "wandb"},
    "cli": TOP | {"cli", "jsonargparse", "rich", "wandb"},
    "__main__": {"cli"},
    "plotting": {"matplotlib", "numpy", "torch"},
    "data": DATASETS | {"_ranges", "_files", "_warn", "data", "numpy", "torch"},
}
FRAMEWORKS = {
    "backpack", "jsonargparse", "lightning", "matplotlib", "mlxtend", "numpy", "pytorch_lightning", "rich", "scipy",
    "sklearn", "torch", "torchmetrics", "torchvision", "tqdm", "wandb",
}  # fmt: skip
LATE = {
    "backpack",
    "jsonargparse",
    "matplotlib",
    "mlxtend",
    "rich",
    "scipy",
    "sklearn",
    "torchvision",
    "tqdm",
    "wandb",
}  # optional, or slow to load


def names(nodes: list[ast.AST], path: Path) -> set[str]:
    """Frameworks and layers of the package that the import statements among ``nodes`` name."""
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import in {path}"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    layers = {name.split(".")[1] for name in found if name.startswith("lightning_taskinfo.")}
    return layers | {name.split(".")[0] for name in found} & FRAMEWORKS


def files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", files(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_downwards(path):
    layer = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    if layer != "__init__":
        assert names(list(ast.walk(ast.parse(path.read_text()))), path) <= ALLOWED[layer]


@pytest.mark.parametrize("path", files(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_optional_packages_are_imported_late(path):
    assert not names(ast.parse(path.read_text()).body, path) & LATE
