"""Imports point downwards only. The table below *is* the architecture."""

import ast
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "lightning_taskinfo"
MATHS = {
    "torch",
    "_batches",
    "_calls",
    "_fields",
    "_nested",
    "_observe",
    "_random",
    "_ranges",
    "_sharded",
    "_warn",
    "functional",
}
FILES = {"_files", "_parallel"}
DATASETS = {"matplotlib", "mlxtend", "sklearn", "torchvision"}
STATE = MATHS | {"_files", "_progress", "torchmetrics", "backpack"}
STATE |= {"fisher", "distributions", "variational", "regularizers", "certificates"}
GLUE = STATE | {"_lightning", "_wandb", "callbacks", "mixins", "plotting", "data"}
TOP = GLUE | FILES | {"_tables", "numpy", "transfer", "tasks"}
ALLOWED = {  # layer -> the layers and frameworks it may import
    "_random": {"torch"},
    "_observe": {"torch", "_random"},
    "_sharded": {"torch", "_observe"},
    "_nested": {"torch"},
    "_fields": {"torch", "_nested"},
    "_calls": {"torch", "_fields", "_nested", "_observe"},
    "_next_token": {"torch", "_calls", "_fields", "_nested", "_observe"},
    "_batches": {"torch", "_calls", "_fields", "_nested", "_next_token", "_observe"},
    "_wandb": {"matplotlib", "plotting", "wandb"},
    "_warn": set(),
    "_ranges": {"torch"},
    "_tables": {"_wandb"},
    "_progress": {"tqdm"},
    "_files": {"torch"},
    "_parallel": {"_warn", "torch", "_files"},
    "_lightning": {"lightning", "pytorch_lightning"},
    "functional": MATHS,
    "fisher": STATE,
    "distributions": STATE,
    "variational": STATE,
    "regularizers": STATE,
    "certificates": STATE | {"_tables", "plotting"},
    "callbacks": GLUE | {"wandb"},
    "mixins": GLUE,
    "_autoload": {"_lightning", "_warn"},
    "transfer": TOP | {"matplotlib", "wandb"},
    "tasks": TOP | {"matplotlib", "wandb"},
    "cli": TOP | {"cli", "jsonargparse", "wandb"},
    "__main__": {"cli"},
    "plotting": {"matplotlib", "numpy", "torch"},
    "data": DATASETS | {"_files", "_random", "_warn", "data", "numpy", "torch"},
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


def test_imports_point_downwards():
    wrong = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        layer = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        imported = names(list(ast.walk(ast.parse(path.read_text()))), path)
        if layer != "__init__" and not imported <= ALLOWED[layer]:
            wrong[path] = imported - ALLOWED[layer]
    assert wrong == {}


def test_optional_packages_are_imported_late():
    early = {path: names(ast.parse(path.read_text()).body, path) for path in PACKAGE.rglob("*.py")}
    assert {path: found & LATE for path, found in early.items() if found & LATE} == {}
