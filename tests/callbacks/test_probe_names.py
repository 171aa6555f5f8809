"""Two callbacks of one class need two names."""

import pytest

from lightning_taskinfo.callbacks import FisherTrace, InformationInWeights
from tests.callbacks.runs import make_trainer


@pytest.mark.parametrize("name", [None, "mine"])
def test_two_of_a_kind_with_one_name_are_refused_by_lightning(tmp_path, name):
    with pytest.raises(RuntimeError, match="more than one stateful callback of type `FisherTrace`"):
        make_trainer(tmp_path, FisherTrace(name=name), FisherTrace(every_n_steps=7, name=name))


def test_names_and_kinds_apart_are_fine(tmp_path):
    make_trainer(tmp_path, FisherTrace(), FisherTrace(name="other"), InformationInWeights())
