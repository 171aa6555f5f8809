"""``TASKINFO_CALLBACKS`` adds callbacks to every Trainer of either namespace, through Lightning's entry points."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader, default_collate

import lightning_taskinfo
from lightning_taskinfo import FisherTrace, TaskInfoWarning, callbacks
from lightning_taskinfo._autoload import callbacks_factory
from lightning_taskinfo._lightning import NAMESPACES
from tests.callbacks.runs import digits
from tests.test_lightning import make_module, namespaces, quiet

PYPROJECT = Path(__file__).parents[1] / "pyproject.toml"


@pytest.fixture(autouse=True)
def _installed(tmp_path_factory, monkeypatch):
    """Lightning finds the entry points of ``pyproject.toml``, also where the package was installed without them."""
    lines = re.findall(
        r'^\[project\.entry-points\."(.+)"\]\n(\w+) = "(.+)"', PYPROJECT.read_text(), re.MULTILINE
    )
    assert {group for group, *_ in lines} == {
        f"{namespace}.callbacks_factory" for namespace in NAMESPACES
    }
    folder = tmp_path_factory.mktemp("site") / "lightning_taskinfo-0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: lightning-taskinfo\nVersion: 0\n"
    )
    (folder / "entry_points.txt").write_text(
        "".join(f"[{group}]\n{name} = {target}\n" for group, name, target in lines)
    )
    monkeypatch.syspath_prepend(folder.parent)


def make_trainer(namespace, folder, **arguments):
    return NAMESPACES[namespace].Trainer(**quiet(folder), logger=False, **arguments)


def ours(trainer):
    return [callback for callback in trainer.callbacks if isinstance(callback, FisherTrace)]


@namespaces
def test_nothing_without_the_variable(tmp_path, namespace, monkeypatch):
    monkeypatch.delenv("TASKINFO_CALLBACKS", raising=False)
    assert ours(make_trainer(namespace, tmp_path)) == []
    monkeypatch.setenv("TASKINFO_CALLBACKS", " , ")
    assert ours(make_trainer(namespace, tmp_path)) == []


@namespaces
def test_watches_a_run_whose_code_stays_as_it_is(tmp_path, namespace, monkeypatch):
    monkeypatch.setenv("TASKINFO_CALLBACKS", "FisherTrace, FisherTrace")
    trainer = make_trainer(namespace, tmp_path)
    (callback,) = ours(trainer)
    callback.every_n_steps = 2
    trainer.fit(make_module(namespace)())
    assert [row["step"] for row in callback.history] == [0, 2, 4]
    (path,) = tmp_path.rglob("*.ckpt")
    states = torch.load(path, weights_only=False)["callbacks"]
    assert states["FisherTrace of TASKINFO_CALLBACKS"]["history"] == callback.history


@namespaces
def test_switches_itself_off_beside_one_of_its_class(tmp_path, namespace, monkeypatch):
    monkeypatch.setenv("TASKINFO_CALLBACKS", "FisherTrace")
    mine = FisherTrace(every_n_steps=2)
    trainer = make_trainer(namespace, tmp_path, callbacks=[mine])
    assert len(ours(trainer)) == 2, "made with the Trainer, which cannot know yet"
    trainer.fit(make_module(namespace)())
    assert ours(trainer) == [mine]
    assert [row["step"] for row in mine.history] == [0, 2, 4]


@namespaces
def test_steps_back_where_batches_are_not_understood(tmp_path, namespace, monkeypatch):
    class Odd(make_module(namespace)):
        def train_dataloader(self):
            return DataLoader(
                digits(), batch_size=8, collate_fn=lambda samples: [default_collate(samples)]
            )

        def training_step(self, batch, batch_idx):
            return super().training_step(batch[0], batch_idx)

    monkeypatch.setenv("TASKINFO_CALLBACKS", "FisherTrace, InformationInWeights")
    trainer = make_trainer(namespace, tmp_path)
    with pytest.warns(TaskInfoWarning, match="is switched off") as caught:
        trainer.fit(Odd())
    assert trainer.global_step == 4
    assert len([w for w in caught if "is switched off" in str(w.message)]) == 2
    assert all(callback.history == [] for callback in ours(trainer))


def test_what_fails_later_does_not_stop_a_script(monkeypatch):
    monkeypatch.setenv("TASKINFO_CALLBACKS", "FisherTrace")
    (callback,) = callbacks_factory()
    with pytest.warns(TaskInfoWarning, match="FisherTrace.* is switched off"):
        callback.on_train_end(SimpleNamespace(world_size=1), None)
    callback.on_train_end(SimpleNamespace(world_size=1), None)  # and does nothing more


@pytest.mark.parametrize(
    "name", ["FisherTraces", "observing", "FisherInformation", "PACBayesCertificate"]
)
def test_refuses_other_names(monkeypatch, name):
    monkeypatch.setenv("TASKINFO_CALLBACKS", name)
    with pytest.raises(
        ValueError, match=rf"must name callbacks .*\(.*FisherTrace, .*\).* got '{name}'"
    ):
        callbacks_factory()


def test_names_only_callbacks_that_go_alone(monkeypatch):
    monkeypatch.setenv("TASKINFO_CALLBACKS", "x")
    public = [name for name in callbacks.__all__ if name in lightning_taskinfo.__all__]
    with pytest.raises(ValueError, match="need no argument") as refused:
        callbacks_factory()
    named = str(refused.value).partition("(")[2].partition(")")[0].split(", ")
    for name in public:
        try:
            getattr(callbacks, name)()
            alone = issubclass(getattr(callbacks, name), pl.Callback)
        except TypeError:  # it needs an argument
            alone = False
        advice = f"{name} belongs into ALONE of _autoload.py if it needs no argument, and only then"
        assert (name in named) == alone, advice
    assert set(named) <= set(public)
