"""Two callbacks of one class need two names, and whoever forgets it is told so."""

import pytest

from lightning_taskinfo._lightning import NAMESPACES
from lightning_taskinfo.callbacks import FisherTrace, InformationInWeights
from tests.callbacks.runs import make_trainer


@pytest.mark.parametrize("name", [None, "mine"])
def test_two_of_a_kind_with_one_name_are_refused_with_the_argument(tmp_path, name):
    message = (
        f"`name` must be another one for each FisherTrace of a Trainer, got {name!r} twice; give one of them its own"
    )
    with pytest.raises(ValueError, match=message):
        make_trainer(tmp_path, FisherTrace(name=name), FisherTrace(every_n_steps=7, name=name))


@pytest.mark.parametrize("namespace", NAMESPACES)
def test_in_both_namespaces(namespace):
    pl = pytest.importorskip(namespace)
    with pytest.raises(ValueError, match="`name` must be another one for each FisherTrace"):
        pl.Trainer(callbacks=[FisherTrace(), FisherTrace()], logger=False)


def test_names_and_kinds_apart_are_fine(tmp_path):
    make_trainer(tmp_path, FisherTrace(), FisherTrace(name="other"), InformationInWeights())
    assert FisherTrace().state_key == FisherTrace().state_key  # outside of a Trainer nobody minds
