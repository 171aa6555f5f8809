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


STUBS = {  # of packages that are slow to load, and load optional ones themselves
    "pytorch_lightning": "class Callback: ...\nclass Trainer: ...\n"
    "class LightningDataModule: ...\nclass LightningModule: ...",
    "torchmetrics": "class Metric: ...",
    "torchvision": f"raise RuntimeError({BROKEN!r})",
}
STEPS = {
    "package": """
import lightning_taskinfo
dir(lightning_taskinfo)
lightning_taskinfo.__version__
""",
    "maths": """
import torch
from lightning_taskinfo.fisher import fisher_trace
from lightning_taskinfo.functional import features, likelihood
net = torch.nn.Linear(2, 3)
with lightning_taskinfo.observing(net):
    assert fisher_trace(net, torch.ones(4, 2), labels="exact") > 0
""",
    "public names": """
sys.modules["lightning"] = None  # one namespace is enough
import lightning_taskinfo._autoload
for name in lightning_taskinfo._EXPORTS:
    getattr(lightning_taskinfo, name)
import pytorch_lightning, torchmetrics
assert not hasattr(pytorch_lightning, "__version__") and not hasattr(torchmetrics, "__version__")
""",
}


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """The frameworks that each step loads, all of them in a Python of its own."""
    folder = tmp_path_factory.mktemp("stubs")
    for name, code in STUBS.items():
        (folder / f"{name}.py").write_text(code)
    report = "print(json.dumps(sorted(sys.modules)))"
    code = "\n".join(["import json, sys", *(step + report for step in STEPS.values())])
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (folder, ROOT)))}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, env=env, check=False
    )
    assert done.returncode == 0, done.stderr
    packages = [{name.split(".")[0] for name in json.loads(x)} for x in done.stdout.splitlines()]
    return dict(zip(STEPS, packages, strict=True))


def test_help_on_transfer_tells_how_to_call_it():
    from lightning_taskinfo import transfer
    from lightning_taskinfo.transfer.run import transfer as function

    assert inspect.signature(transfer) == inspect.signature(function)
    assert function.__doc__.splitlines()[0] in pydoc.render_doc(transfer)


def test_type_checkers_see_what_users_can_import():
    tree = ast.parse((PACKAGE / "__init__.pyi").read_text())
    names = [alias for node in tree.body if hasattr(node, "names") for alias in node.names]
    assert {alias.asname for alias in names} == {*lightning_taskinfo._EXPORTS}, (
        "without `as`, a type checker takes the name for a private one"
    )


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


def test_importing_the_package_loads_no_framework(loaded):
    assert loaded["package"] & FRAMEWORKS == set()


def test_the_maths_needs_torch_alone(loaded):
    """Even beside a torchvision that cannot be loaded, which stops torchmetrics and Lightning themselves."""
    assert (loaded["maths"] & FRAMEWORKS) - {"tqdm"} == {"torch"}  # which loads tqdm by itself


def test_public_names_load_nothing_optional_beyond_lightning(loaded):
    assert (loaded["public names"] - loaded["maths"]) & LATE == set()
