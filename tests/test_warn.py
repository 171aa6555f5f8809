"""A warning of the package points to the line of the user's that led to it, whatever stands between."""

import contextlib
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

import lightning_taskinfo
from lightning_taskinfo import FisherInformation, FisherTrace, Lautum, TaskInfoWarning
from lightning_taskinfo._warn import warn
from lightning_taskinfo.data import load_npz
from lightning_taskinfo.fisher import fisher_trace, layer_traces
from lightning_taskinfo.functional.minima import local_minimum_summary
from tests.callbacks.runs import Classifier, digits, make_trainer

PACKAGE = Path(lightning_taskinfo.__file__).parent


class Checkpointed(nn.Module):
    """Its graph does not show the weights of the cell."""

    def __init__(self):
        super().__init__()
        self.first, self.cell, self.head = (
            nn.Linear(2, 2),
            nn.GRU(2, 3, batch_first=True),
            nn.Linear(3, 2),
        )

    def forward(self, x):
        return self.head(checkpoint(self.cell, self.first(x), use_reentrant=True)[0][:, -1])


def measured_by_torchmetrics():
    metric = FisherInformation()
    metric.update(Checkpointed(), torch.randn(4, 5, 2))


def few_for_lautum():
    Lautum(input_shape=(6,), num_outputs=2).fit_inputs([torch.randn(10, 6)])


def too_short():
    trainer = make_trainer(Path("."), FisherTrace(every_n_steps=1000), max_epochs=1)
    trainer.fit(Classifier(), DataLoader(digits(), batch_size=8))


def classes_left_out(folder):
    x = np.zeros((2, 4, 4), dtype=np.uint8)
    np.savez(
        folder / "some.npz", x_train=x, y_train=np.array([1, 2]), x_test=x, y_test=np.array([1, 2])
    )
    load_npz(folder / "some.npz")


CALLS = {  # what is called, how the warning begins, and what stands in the line it points to
    "graph": (
        lambda _: fisher_trace(Checkpointed(), torch.randn(4, 5, 2)),
        "The graph does not show",
        " fisher_trace(",
    ),
    "by layer": (
        lambda _: layer_traces(Checkpointed(), torch.randn(4, 5, 2)),
        "The graph does not show",
        " layer_traces(",
    ),
    "torchmetrics": (
        lambda _: measured_by_torchmetrics(),
        "The graph does not show",
        "metric.update(",
    ),
    "Lautum": (lambda _: few_for_lautum(), "10 samples for . directions", ".fit_inputs("),
    "trainer": (lambda _: too_short(), "FisherTrace has measured nothing", "trainer.fit("),
    "Gram": (
        lambda _: local_minimum_summary(torch.ones(4, 4), subset_size=3),
        "The gradi",
        " local_minimum_summary(",
    ),
    "data": (classes_left_out, "`y_train` of 'some' has no training", "    load_npz("),
}


@pytest.mark.filterwarnings(
    "ignore:.*workers", "ignore:.*LeafSpec", "ignore:.*logging interval", "ignore:.*eval mode"
)
@pytest.mark.parametrize("name", CALLS)
def test_points_to_the_users_call(tmp_path, name, monkeypatch):
    monkeypatch.chdir(tmp_path)
    call, message, line = CALLS[name]
    with pytest.warns(TaskInfoWarning, match=message) as caught:
        call(tmp_path)
    (told,) = (w for w in caught if issubclass(w.category, TaskInfoWarning))
    assert told.filename == __file__
    assert line in Path(__file__).read_text().splitlines()[told.lineno - 1]


def test_frames_of_the_standard_library_between_are_passed_over():
    ours = {"__name__": "lightning_taskinfo.somewhere", "warn": warn}
    exec("def inside():\n    warn('here')\n    yield", ours)
    with (
        pytest.warns(TaskInfoWarning, match="here") as caught,
        contextlib.contextmanager(ours["inside"])(),
    ):
        pass
    assert caught[0].filename == __file__


def test_a_second_warning_of_one_line_is_not_shown_by_default():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(3):
            warn("again")
    assert len(caught) == 1


def test_nothing_in_the_package_warns_otherwise():
    left = [
        p.name
        for p in PACKAGE.rglob("*.py")
        if "warnings.warn" in p.read_text() and p.name != "_warn.py"
    ]
    assert left == []


@pytest.mark.parametrize("how", ["-c", "-", "interactive"])
def test_warns_where_there_is_no_file(how):
    code = "from lightning_taskinfo._warn import warn\n"
    code += "ours = {'__name__': 'lightning_taskinfo.somewhere', 'warn': warn}\n"
    code += "exec('def call(): warn(\\'here\\')', ours)\nours['call']()\nprint('went on')\n"
    words = {"-c": ["-c", code], "-": ["-"], "interactive": ["-i", "-q"]}[how]
    given = None if how == "-c" else code
    done = subprocess.run(
        [sys.executable, *words], input=given, capture_output=True, text=True, timeout=120
    )
    assert "went on" in done.stdout, done.stderr
    assert "TaskInfoWarning: here" in done.stderr
    assert "Error" not in done.stderr


def test_an_import_between_is_passed_over(tmp_path, monkeypatch):
    (tmp_path / "asks_at_import.py").write_text(
        "__name__ = 'lightning_taskinfo.asked'\nfrom lightning_taskinfo._warn import warn\nwarn('at import')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.warns(TaskInfoWarning, match="at import") as caught:
        import asks_at_import  # noqa: F401
    assert caught[0].filename == __file__
