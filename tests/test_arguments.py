"""A mistyped argument is blamed on the class that was written, and the nearest one is named."""

import inspect

import pytest

from lightning_taskinfo import regularizers
from lightning_taskinfo.callbacks import FisherTrace, PACBayesCertificate
from tests.callbacks.runs import PROBES

ALL = {**PROBES, "PACBayesCertificate": PACBayesCertificate}
all_callbacks = pytest.mark.parametrize("callback", ALL.values(), ids=ALL)


@all_callbacks
@pytest.mark.parametrize(("wrong", "right"), [("every_n_epoch", "every_n_epochs"), ("max_sample", "max_samples")])
def test_names_the_class_the_argument_and_the_nearest(callback, wrong, right):
    message = f"^{callback.__name__} has no argument `{wrong}`; did you mean `{right}`\\?$"
    with pytest.raises(TypeError, match=message):
        callback(**{wrong: 5})


@all_callbacks
def test_lists_the_arguments_where_none_is_near(callback):
    with pytest.raises(TypeError, match=r"has no argument `zzz`; it takes .*max_samples, .*forward_fn\.$"):
        callback(zzz=1)


class Mine(FisherTrace):
    """Takes something out of its keyword arguments by itself."""

    def __init__(self, **options):
        self.mine = options.pop("mine", None)
        super().__init__(**options)


def test_a_class_of_ones_own_is_named_and_keeps_its_own_arguments():
    assert Mine(mine=3, max_samples=2).mine == 3
    with pytest.raises(TypeError, match=r"^Mine has no argument `loss_reductions`; did you mean `loss_reduction`\?"):
        Mine(loss_reductions="sum")


class Other:
    def __init__(self, *, each):
        self.each = each


class Failing(FisherTrace):
    def __init__(self, *, every, **options):
        super().__init__(**options)
        Other(every=every)


def test_other_errors_are_left_alone():
    with pytest.raises(TypeError, match=r"^Other.__init__\(\) got an unexpected keyword argument 'every'"):
        Failing(every=2)
    with pytest.raises(TypeError, match="missing 1 required keyword-only argument: 'prior_origin'"):
        PACBayesCertificate()


@all_callbacks
def test_signatures_are_those_of_init(callback):
    own = [*inspect.signature(callback.__init__).parameters.values()][1:]
    assert [*inspect.signature(callback).parameters.values()] == own
    assert len(own) > 3


@pytest.mark.parametrize(
    ("regularizer", "wrong", "right"),
    [
        (regularizers.Lautum, "wieght", "weight"),
        (regularizers.MutualInformation, "critics", "critic"),
        (regularizers.TemporalEnsembling, "ramp_epoch", "ramp_epochs"),
    ],
)
def test_regularisers_do_the_same(regularizer, wrong, right):
    message = f"^{regularizer.__name__} has no argument `{wrong}`; did you mean `{right}`\\?$"
    with pytest.raises(TypeError, match=message):
        regularizer(**{wrong: 1})
