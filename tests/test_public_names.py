"""Every public name says what it takes, and shows it: in a doctest, an example or the documentation."""

import importlib
import inspect
import re
from functools import cache
from pathlib import Path
from typing import get_args

import lightning_taskinfo
from lightning_taskinfo.fisher import fisher_trace
from tests.test_docs import load

ROOT = Path(__file__).parents[1]
SHOWN = "".join(
    p.read_text()
    for p in [*ROOT.glob("examples/*.py"), ROOT / "README.md", *ROOT.glob("docs/**/*.md")]
)
SAME = re.compile(
    r"arguments of\s+:func:`fisher_trace`|:func:`fisher_trace`, which explains the arguments"
)


def public_names():
    """Return the functions and classes that the package and the API page offer, each once, by where they are found."""
    found = {}
    for module in map(
        importlib.import_module, ["lightning_taskinfo", *load("hooks").public_modules()]
    ):
        own = [
            name
            for name, thing in vars(module).items()
            if getattr(thing, "__module__", None) == module.__name__
        ]
        for name in getattr(module, "__all__", own):
            thing = getattr(module, name)
            if (inspect.isfunction(thing) or inspect.isclass(thing)) and not name.startswith("_"):
                found.setdefault(
                    thing, f"{module.__name__}.{name}".removeprefix("lightning_taskinfo.")
                )
    return {where: thing for thing, where in found.items()}


NAMES = public_names()


def parameters(thing):
    """Return the names of what a function or class is called with; a mixin or a warning is not called."""
    if thing.__name__.endswith(("Mixin", "Warning")):
        return set()
    return {p.name for p in inspect.signature(thing).parameters.values()} - {"args", "kwargs"}


def documented(text):
    """Return the names in the sections of arguments."""
    sections = re.findall(
        r"^(?:Args|Attributes):\n((?: {4}.*\n|\n)+)", f"{inspect.cleandoc(text)}\n", re.M
    )
    return {name for section in sections for name in re.findall(r"^ {4}\**(\w+):", section, re.M)}


def test_the_parts_are_found():
    some = {
        "FisherTrace",
        "certify",
        "fisher.fisher_trace",
        "data.load_npz",
        "Stages",
        "callbacks.Probe",
    }
    some |= {
        "tasks.plot_phase_map",
        "functional.gaussian.gaussian_kl_diag",
        "plotting.plot_ranking",
    }
    assert some <= set(NAMES)


def test_all_have_docstrings_of_their_own_that_name_every_argument_and_no_other():
    for name, thing in NAMES.items():
        assert thing.__doc__, name  # not `getdoc`, which takes a parent's
        named, taken = documented(thing.__doc__), parameters(thing)
        refers = SAME.search(thing.__doc__)
        if refers:
            named |= documented(fisher_trace.__doc__)
        assert taken <= named, name
        if inspect.isfunction(thing) and not refers:  # classes tell of attributes too
            assert named <= taken, name


@cache
def shows_itself(thing):
    text = thing.__doc__ or ""
    return ">>>" in text or "Example::" in text or re.search(rf"\b{thing.__name__}\b", SHOWN)


@cache
def returned():
    """Return what functions that are shown, and methods of classes that are, give back."""
    shown = [thing for thing in NAMES.values() if shows_itself(thing)]
    methods = [
        f
        for thing in shown
        if inspect.isclass(thing)
        for f in vars(thing).values()
        if inspect.isfunction(f)
    ]
    kinds = [
        inspect.signature(f).return_annotation
        for f in [*filter(inspect.isfunction, shown), *methods]
    ]
    return [part for kind in kinds for part in (kind, *get_args(kind))]


def test_all_have_an_example():
    """Their own, one in the documentation, or that of what returns them."""
    without = [name for name, thing in NAMES.items() if not shows_itself(thing)]
    assert [name for name in without if NAMES[name] not in returned()] == []


def test_the_api_page_lists_what_can_be_imported_from_the_package_itself():
    page = (ROOT / "docs/api.md").read_text()
    rows = re.findall(r"^\| (Watch|Regularise|Transfer|Ask).*$", page, re.M)
    assert len(rows) == 4
    table = "".join(line for line in page.splitlines() if line.startswith("| "))
    listed = re.findall(r"`(\w+)`", table.partition("| Look")[0])
    names = [*lightning_taskinfo._EXPORTS, "lightning_taskinfo", "transfer"]
    assert not {*names} - {*listed}, "list these in the first table of docs/api.md"
    assert sorted(listed) == sorted(names), "the first table of docs/api.md has too many"


def test_the_width_of_the_logits_has_one_name():
    """``num_classes`` is a number of classes: of data, of labels, and of a classifier made for them."""
    of_logits = {name for name, thing in NAMES.items() if "num_outputs" in parameters(thing)}
    of_classes = {name for name, thing in NAMES.items() if "num_classes" in parameters(thing)}
    assert of_logits == {"Lautum", "TemporalEnsembling"}
    assert of_classes == {
        "data.ArrayData",
        "TransferClassifier",
        "tasks.PreparedTask",
        "tasks.TaskEmbedding",
    }
