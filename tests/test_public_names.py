"""Every public name says what it takes, and shows it: in a doctest, an example or the documentation."""

import importlib
import inspect
import pkgutil
import re
from pathlib import Path

import pytest

import lightning_taskinfo
from lightning_taskinfo.fisher import fisher_trace

ROOT = Path(__file__).parents[1]
SHOWN = "".join(p.read_text() for p in [*ROOT.glob("examples/*.py"), ROOT / "README.md", *ROOT.glob("docs/**/*.md")])
SAME = re.compile(r"arguments of\s+:func:`fisher_trace`|:func:`fisher_trace`, which explains the arguments")


def public_names():
    """Return the functions and classes that the package and its parts offer, each once, by where they are found."""
    parts = [m.name for m in pkgutil.iter_modules(lightning_taskinfo.__path__) if m.ispkg and m.name[0] != "_"]
    modules = [lightning_taskinfo, *(importlib.import_module(f"lightning_taskinfo.{part}") for part in parts)]
    found = {}
    for module in modules:
        for name in getattr(module, "__all__", ()):
            if callable(thing := getattr(module, name)):
                found.setdefault(thing, f"{module.__name__}.{name}".removeprefix("lightning_taskinfo."))
    return {where: thing for thing, where in found.items()}


NAMES = public_names()


def parameters(thing):
    """Return the names of what a function or class is called with; a mixin or a warning is not called."""
    if thing.__name__.endswith(("Mixin", "Warning")):
        return set()
    return {p.name for p in inspect.signature(thing).parameters.values()} - {"args", "kwargs"}


def documented(text):
    """Return the names in the sections of arguments."""
    sections = re.findall(r"^(?:Args|Attributes):\n((?: {4}.*\n|\n)+)", f"{inspect.cleandoc(text)}\n", re.M)
    return {name for section in sections for name in re.findall(r"^ {4}\**(\w+):", section, re.M)}


def test_the_parts_are_found():
    assert {"FisherTrace", "certify", "fisher.fisher_trace", "data.load_npz", "transfer.Stages"} <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_has_a_docstring_of_its_own_that_names_every_argument_and_no_other(name):
    thing = NAMES[name]
    assert thing.__doc__  # not `getdoc`, which takes a parent's
    named, taken = documented(thing.__doc__), parameters(thing)
    if SAME.search(thing.__doc__):
        named |= documented(fisher_trace.__doc__)
    assert taken <= named
    if inspect.isfunction(thing) and not SAME.search(thing.__doc__):  # classes tell of attributes too
        assert named <= taken


@pytest.mark.parametrize("name", NAMES)
def test_has_an_example(name):
    text = NAMES[name].__doc__ or ""
    assert ">>>" in text or "Example::" in text or re.search(rf"\b{name.rpartition('.')[2]}\b", SHOWN)


def test_the_width_of_the_logits_has_one_name():
    """``num_classes`` is a number of classes: of data, of labels, and of a classifier made for them."""
    of_logits = {name for name, thing in NAMES.items() if "num_outputs" in parameters(thing)}
    of_classes = {name for name, thing in NAMES.items() if "num_classes" in parameters(thing)}
    assert of_logits == {"Lautum", "TemporalEnsembling"}
    assert of_classes == {"TaskEmbedding", "TransferClassifier", "data.ArrayData", "data.load_idx", "data.load_npz"}
