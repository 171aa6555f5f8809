"""Importing is light: names are lazy, what is optional stays out, a torchvision that cannot be loaded does no harm."""

import ast
import inspect
import json
import os
import pydoc
import subprocess
import sys
from pathlib import Path

import pytest

import lightning_taskinfo
from tests.test_layers import LATE, PACKAGE

ROOT = Path(__file__).parents[1]
FRAMEWORKS = LATE | {"lightning", "pytorch_lightning", "torchmetrics", "torch"}
BROKEN = (
    "operator torchvision::nms does not exist"  # what it says beside a torch it was not built for
)


def run(code: str, *path: Path) -> str:
    """Run ``code`` in a Python of its own, with the folders of ``path`` before all others."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (*path, ROOT)))}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, env=env, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def loaded(code: str, after: str = "") -> set[str]:
    """Modules of frameworks that ``code`` loads beyond what ``after`` has loaded."""
    report = "import json, sys; print(json.dumps(sorted(sys.modules.keys() - before)))"
    lines = run(f"import sys\n{after}\nbefore = set(sys.modules)\n{code}\n{report}")
    return {name for name in json.loads(lines.splitlines()[-1]) if name.split(".")[0] in FRAMEWORKS}


@pytest.fixture
def broken_torchvision(tmp_path):
    (tmp_path / "torchvision").mkdir()
    (tmp_path / "torchvision" / "__init__.py").write_text(f"raise RuntimeError({BROKEN!r})")
    return tmp_path


def test_help_on_transfer_tells_how_to_call_it():
    from lightning_taskinfo import transfer
    from lightning_taskinfo.transfer.run import transfer as function

    assert inspect.signature(transfer) == inspect.signature(function)
    assert function.__doc__.splitlines()[0] in pydoc.render_doc(transfer)


def test_type_checkers_see_what_users_can_import():
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    assert ast.unparse(block.test) == "TYPE_CHECKING"
    seen = {
        alias.asname: f"{node.module}.{alias.name}"  # without `as`, a type checker takes the name for a private one
        for node in block.body
        for alias in node.names
    }
    assert seen == {
        name: f"lightning_taskinfo.{module}.{name}"
        for name, module in lightning_taskinfo._EXPORTS.items()
    }


def test_every_public_name_resolves():
    for name in lightning_taskinfo._EXPORTS:
        assert getattr(lightning_taskinfo, name).__name__ == name


def test_dir_lists_every_public_name():
    names = {path.stem for path in PACKAGE.iterdir() if not path.name.startswith("_")} - {
        "cli",
        "py",
    }
    assert names == set(lightning_taskinfo._MODULES)
    assert dir(lightning_taskinfo) == sorted(["__version__", *lightning_taskinfo._EXPORTS, *names])


def test_a_module_needs_no_import_of_its_own():
    for name in lightning_taskinfo._MODULES:
        assert lightning_taskinfo.__getattr__(name).__name__ == f"lightning_taskinfo.{name}"


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(
        AttributeError, match="module 'lightning_taskinfo' has no attribute 'Fisherman'"
    ):
        lightning_taskinfo.Fisherman  # noqa: B018


def test_importing_the_package_loads_no_framework():
    assert (
        loaded("import lightning_taskinfo; dir(lightning_taskinfo); lightning_taskinfo.__version__")
        == set()
    )


def test_the_maths_loads_torch_alone():
    code = "import lightning_taskinfo.fisher, lightning_taskinfo.functional.likelihood, lightning_taskinfo._observe"
    added = {name.split(".")[0] for name in loaded(code)}
    assert added - {"tqdm"} == {"torch"}  # which loads tqdm by itself


def test_public_names_load_nothing_optional_beyond_lightning():
    """Torchmetrics, and with it Lightning, loads matplotlib by itself where that is installed."""
    lightning = (
        "import contextlib, importlib\n"
        "for name in ('lightning.pytorch', 'pytorch_lightning'):\n"
        "    with contextlib.suppress(ModuleNotFoundError): importlib.import_module(name)"
    )
    ours = "import lightning_taskinfo as ti, lightning_taskinfo._autoload; [getattr(ti, name) for name in ti._EXPORTS]"
    assert {name for name in loaded(ours, after=lightning) if name.split(".")[0] in LATE} == set()


def test_a_torchvision_that_cannot_be_loaded_does_no_harm(broken_torchvision):
    """It stops torchmetrics and Lightning themselves; what needs neither still works."""
    code = """
import torch
import lightning_taskinfo
from lightning_taskinfo.functional import features, likelihood
from lightning_taskinfo.fisher import fisher_trace

net = torch.nn.Linear(2, 3)
with lightning_taskinfo.observing(net):
    print(fisher_trace(net, torch.ones(4, 2), labels="exact").item() > 0)
try:
    import torchvision
except RuntimeError as error:
    print(error)
"""
    assert run(code, broken_torchvision).splitlines() == ["True", BROKEN]
