"""What goes wrong without an error is looked for at the first call, and at no later one."""

import copy
import warnings

import pytest
import torch
from torch import Tensor

from lightning_taskinfo import TaskInfoWarning
from lightning_taskinfo.regularizers import Lautum, TemporalEnsembling, lautum

SCALE = "`inputs` must be on the scale of what `fit_inputs` was given, got .* times its variance"
LOGITS = "`outputs` should be logits, got what looks like probabilities"


def images(N: int = 64) -> Tensor:
    """Bytes, as a dataset stores them."""
    return torch.randint(
        256, (N, 1, 4, 4), generator=torch.Generator().manual_seed(0), dtype=torch.uint8
    )


def outputs(N: int = 64) -> Tensor:
    return torch.randn(N, 3, generator=torch.Generator().manual_seed(1))


def warned(regularizer, *arguments, **options) -> list[str]:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        regularizer(*arguments, **options)
    return [str(w.message) for w in seen if issubclass(w.category, TaskInfoWarning)]


@pytest.mark.parametrize("components", [16, 8])  # all directions, or the leading ones
@pytest.mark.parametrize(("fitted", "trained"), [(1, 255), (255, 1)])
def test_inputs_on_another_scale_than_the_fit_are_warned_about_once(components, fitted, trained):
    regularizer = Lautum((1, 4, 4), 3, components=components).fit_inputs([images() / fitted])
    with pytest.warns(TaskInfoWarning, match=SCALE):
        regularizer(images() / trained, outputs())
    assert warned(regularizer, images() / trained, outputs()) == []


def test_bytes_may_be_fitted_where_bytes_are_trained_on():
    assert warned(Lautum((1, 4, 4), 3).fit_inputs([images()]), images(), outputs()) == []


@pytest.mark.parametrize("factor", [0.2, 5.0])
def test_a_moderate_scale_and_any_shift_are_not_warned_about(factor):
    regularizer = Lautum((1, 4, 4), 3).fit_inputs([images()])
    assert warned(regularizer, factor * images() + 1e4, outputs()) == []


@pytest.mark.parametrize(
    "x", [images(7) / 255, (images(1) / 255).expand(64, -1, -1, -1)], ids=["few", "copies"]
)
def test_a_batch_that_says_nothing_of_the_scale_is_not_warned_about(x):
    assert warned(Lautum((1, 4, 4), 3).fit_inputs([images()]), x, outputs(len(x))) == []


def test_constant_inputs_have_no_scale():
    regularizer = Lautum((1, 4, 4), 3).fit_inputs([torch.zeros(64, 1, 4, 4)])
    assert warned(regularizer, images(), outputs()) == []


def test_a_new_fit_is_looked_at_anew():
    regularizer = Lautum((1, 4, 4), 3).fit_inputs([images()])
    regularizer(images(), outputs())
    regularizer.fit_inputs([images() / 255])
    with pytest.warns(TaskInfoWarning, match=SCALE):
        regularizer(images(), outputs())


def test_later_steps_do_not_look_and_checkpoints_do_not_know(monkeypatch):
    regularizer = Lautum((1, 4, 4), 3).fit_inputs([images()])
    keys = [*regularizer.state_dict()]
    looks = []
    monkeypatch.setattr(lautum, "_warn_of_scale", lambda *arguments: looks.append(arguments))
    for _ in range(3):
        regularizer(images(), outputs())
    assert len(looks) == 1
    assert [*regularizer.state_dict()] == keys
    resumed = Lautum((1, 4, 4), 3)
    resumed.load_state_dict(copy.deepcopy(regularizer.state_dict()))
    assert torch.equal(resumed(images(), outputs()), regularizer(images(), outputs()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_probabilities_in_place_of_logits_are_warned_about_once(dtype):
    p = outputs().softmax(-1).to(dtype)
    ensembling, regularizer = (
        TemporalEnsembling(64, 3, weight=1.0),
        Lautum((1, 4, 4), 3).fit_inputs([images()]),
    )
    with pytest.warns(TaskInfoWarning, match=LOGITS):
        ensembling(p, torch.arange(64), epoch=0)
    with pytest.warns(TaskInfoWarning, match=LOGITS):
        regularizer(images(), p)
    assert (
        warned(ensembling, p, torch.arange(64), epoch=1) == warned(regularizer, images(), p) == []
    )


@pytest.mark.parametrize(
    "logits",
    [
        outputs().log_softmax(-1),
        outputs()
        - outputs().mean(1, keepdim=True)
        + 1 / 3,  # rows sum to 1, and some values are negative
        outputs().abs() + 1,
        torch.zeros(64, 3),
        torch.full((64, 3), torch.nan),
    ],
    ids=["logarithms", "sum to 1", "positive", "zero", "not finite"],
)
def test_logits_are_not_taken_for_probabilities(logits):
    assert warned(TemporalEnsembling(64, 3, weight=1.0), logits, torch.arange(64), epoch=0) == []


def test_a_single_logit_is_no_probability():
    assert (
        warned(TemporalEnsembling(64, 1, weight=1.0), torch.ones(64, 1), torch.arange(64), epoch=0)
        == []
    )
