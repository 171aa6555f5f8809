"""A mistyped argument is blamed on the class that was written, and the nearest one is named."""

import inspect
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import nn

import lightning_taskinfo as lt
from lightning_taskinfo import data, fisher, regularizers, transfer
from lightning_taskinfo._arguments import checked_arguments
from lightning_taskinfo.callbacks import FisherTrace, PACBayesCertificate
from lightning_taskinfo.tasks.training import Training
from lightning_taskinfo.transfer import Stages, TransferDataModule
from tests.callbacks.runs import PROBES

ALL = {**PROBES, "PACBayesCertificate": PACBayesCertificate}
all_callbacks = pytest.mark.parametrize("callback", ALL.values(), ids=ALL)


@all_callbacks
@pytest.mark.parametrize(
    ("wrong", "right"), [("every_n_epoch", "every_n_epochs"), ("max_sample", "max_samples")]
)
def test_names_the_class_the_argument_and_the_nearest(callback, wrong, right):
    message = f"^{callback.__name__} has no argument `{wrong}`; did you mean `{right}`\\?$"
    with pytest.raises(TypeError, match=message):
        callback(**{wrong: 5})


@all_callbacks
def test_lists_the_arguments_where_none_is_near(callback):
    with pytest.raises(
        TypeError,
        match=r"has no argument `zzz`; it takes .*max_samples, .*forward_fn(, group_fn)?\.$",
    ):
        callback(zzz=1)


class Mine(FisherTrace):
    """Takes something out of its keyword arguments by itself."""

    def __init__(self, **options):
        self.mine = options.pop("mine", None)
        super().__init__(**options)


def test_a_class_of_ones_own_is_named_and_keeps_its_own_arguments():
    assert Mine(mine=3, max_samples=2).mine == 3
    with pytest.raises(
        TypeError, match=r"^Mine has no argument `mc_sample`; did you mean `mc_samples`\?"
    ):
        Mine(mc_sample=2)


class Other:
    def __init__(self, *, each):
        self.each = each


class Failing(FisherTrace):
    def __init__(self, *, every, **options):
        super().__init__(**options)
        Other(every=every)


class Misspelling(FisherTrace):
    def __init__(self, *, seed):
        super().__init__(sed=seed)


def test_other_errors_are_left_alone():
    with pytest.raises(TypeError, match=r"__init__\(\) got an unexpected keyword argument 'sed'"):
        Misspelling(seed=2)  # not what was written here
    with pytest.raises(
        TypeError, match=r"^Other.__init__\(\) got an unexpected keyword argument 'every'"
    ):
        Failing(every=2)
    with pytest.raises(TypeError, match="missing 1 required keyword-only argument: 'prior_origin'"):
        PACBayesCertificate()


@all_callbacks
def test_signatures_are_those_of_init(callback):
    own = [*inspect.signature(callback.__init__).parameters.values()][1:]
    assert [*inspect.signature(callback).parameters.values()] == own
    assert own


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


def test_what_is_handed_to_a_base_is_checked_too():
    with pytest.raises(TypeError, match=r"^`seed` must be a whole number, got 'a'\.$"):
        Mine(seed="a")


class Redefined(FisherTrace):
    """Its own argument of a name that the base has is checked by its own annotation."""

    def __init__(self, *, seed: str, **options: Any) -> None:
        super().__init__(seed=int(seed), **options)


def test_an_annotation_of_ones_own_comes_first():
    assert Redefined(seed="3").seed == 3
    with pytest.raises(TypeError, match="`seed` must be a string, got 3"):
        Redefined(seed=3)


class Quoted(FisherTrace):
    def __init__(self, *, seed: "str", **options: Any) -> None:
        super().__init__(**options)


def test_an_annotation_in_quotes_is_not_read():
    Quoted(seed=3)


@checked_arguments
def takes_others(number: int, *values: int, **others: int):
    return number, values, others


def test_other_arguments_are_handed_on_as_they_are():
    handed_on = {"values": "a", "others": None, "numbr": 2}
    assert takes_others(1, "b", **handed_on) == (1, ("b",), handed_on)
    with pytest.raises(TypeError, match="`number` must be a whole number, got '1'"):
        takes_others("1", numbr=2)


def test_hyperparameters_of_a_data_module_are_collected(tmp_path):
    """Lightning collects them from the frames of the call, which ours is one of."""

    class Data(TransferDataModule):
        def __init__(self, source: str = "digits", extra: int = 1, **options: Any) -> None:
            super().__init__(source, **options)
            self.save_hyperparameters()

    assert dict(Data(extra=2, labels=20).hparams) == {"source": "digits", "extra": 2, "labels": 20}


NET = nn.Linear(2, 2)
X = torch.zeros(4, 2)
CALLS = {  # what a user might write, and what is said to it
    "`model` must be a Module, got 'net'": lambda: lt.add_weight_noise("net"),
    "`std` must be a number, got '0.1'": lambda: lt.add_weight_noise(NET, std="0.1"),
    "add_weight_noise has no argument `stds`; did you mean `std`?": lambda: lt.add_weight_noise(
        NET, stds=0.1
    ),
    "`per_layer` must be True or False, got 'no'": lambda: FisherTrace(per_layer="no"),
    "`every_n_steps` must be a whole number or None, got True": lambda: FisherTrace(
        every_n_steps=True
    ),
    "`name` must be a string or None, got 3": lambda: FisherTrace(name=3),
    "`widths` must be a sequence of numbers or None, got 2.0": lambda: lt.MultiKernelMMD(
        widths=2.0
    ),
    "`feature_dim` must be a whole number, got '16'": lambda: lt.MutualInformation((1, 8, 8), "16"),
    "WeightSchedule has no argument `starts`; did you mean `start`?": lambda: lt.WeightSchedule(
        1.0, starts=1
    ),
    "fisher_trace has no argument `label`; did you mean `labels`?": lambda: fisher.fisher_trace(
        NET, X, label="exact"
    ),
    "`chunk_size` must be a whole number or None, got 2.0": lambda: fisher.fisher_diagonal(
        NET, X, chunk_size=2.0
    ),
    "`model` must be a Module, got a Tensor of shape (4, 2)": lambda: fisher.gradient_gram(X, NET),
    "FisherInformation has no argument `quantities`; did you mean `quantity`?": lambda: (
        lt.FisherInformation(quantities="trace")
    ),
    "`mc_samples` must be a whole number, got 1.5": lambda: lt.FisherInformation(mc_samples=1.5),
    "`prior` must be a Prior or None, got 0.1": lambda: lt.certify(NET, (X, X), 0.1),
    "`stds` must be a sequence of numbers, got 0.1": lambda: lt.Prior(stds=0.1),
    "Stages has no argument `pretrain`; did you mean `pretrain_epochs`?": lambda: transfer.Stages(
        pretrain=1
    ),
    "`pretrain_epochs` must be a whole number, got 1.5": lambda: transfer.Stages(
        pretrain_epochs=1.5
    ),
    "TransferDataModule has no argument `label`; did you mean `labels`?": lambda: (
        TransferDataModule(label=5)
    ),
    "TransferClassifier has no argument `methods`; did you mean `method`?": lambda: (
        lt.TransferClassifier("mlp", 2, (1, 8, 8), methods="lautum")
    ),
    "`image_shape` must be a sequence of 3 whole numbers, got 8": lambda: lt.TransferClassifier(
        "mlp", 2, 8
    ),
    "`data` must be a TransferDataModule where there are no `starts`, got a str": lambda: (
        transfer.transfer("small_cnn", "digits")
    ),
    "transfer has no argument `method`; did you mean `methods`?": lambda: transfer.transfer(
        "mlp", TransferDataModule(), method="lautum"
    ),
    "`weights` must be a mapping to numbers or None, got 0.1": lambda: transfer.transfer(
        "mlp", TransferDataModule(), weights=0.1
    ),
    "`seeds` must be a sequence of whole numbers or a whole number, got '3'": lambda: (
        transfer.transfer("mlp", TransferDataModule(), seeds="3")
    ),
    "`stages` must be a Stages or None, got {'pretrain_epochs': 1}": lambda: transfer.transfer(
        "mlp", TransferDataModule(), stages={"pretrain_epochs": 1}
    ),
    "Training has no argument `step`; did you mean `steps`?": lambda: lt.Training(step=3),
    "`steps` must be a whole number, got 1000.0": lambda: lt.Training(steps=1e3),
    "`trunk_fn` must be a function, got 3": lambda: lt.task_distance({}, 1.0, trunk_fn=3),
    "`max_samples` must be a whole number, got '5'": lambda: lt.Task2Vec(NET, max_samples="5"),
    "`size` must be a whole number, got '8'": lambda: data.load_dataset("digits", size="8"),
    "`folds` must be a whole number, got 2.5": lambda: lt.feature_overlap(NET, [(X, X)], folds=2.5),
}


def test_a_prior_std_is_a_number_or_one_word():
    with pytest.raises(ValueError, match="`prior_std` must be a positive number or 'auto', got"):
        lt.InformationInWeights(prior_std="0.1")


@pytest.mark.parametrize("message", CALLS)
def test_says_what_an_argument_must_be(message):
    with pytest.raises(TypeError, match=f"^{re.escape(message)}"):
        CALLS[message]()


PUBLIC = [getattr(lt, name) for name in lt.__all__ if name != "__version__"]
ONE_MODEL = {
    "observing",
    "trainable_parameters",
    "weight_kl",
    "frozen_batchnorm_statistics",
}  # nothing to mistype


@pytest.mark.parametrize(
    "public", [f for f in PUBLIC if inspect.isfunction(f)], ids=lambda f: f.__name__
)
def test_every_public_function_checks_its_arguments(public):
    if public.__name__ not in ONE_MODEL:
        with pytest.raises(
            TypeError, match=rf"^{public.__name__} has no argument `zzz`; it takes "
        ):
            public(zzz=1)


def test_nan_and_infinity_are_refused_wherever_a_number_is_asked_for():
    @checked_arguments
    def call(
        one: float = 0.0,
        many: Sequence[float] | None = None,
        named: Mapping[str, float] | None = None,
    ): ...

    call(1e300, [0.5, 1], {"a": 2.0})
    for bad in (math.nan, math.inf, -math.inf):
        for arguments in ({"one": bad}, {"many": [0.1, bad]}, {"named": {"a": bad}}):
            with pytest.raises(ValueError, match=f"`{next(iter(arguments))}` must be finite"):
                call(**arguments)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize(
    ("make", "argument"),
    [
        (Stages, "learning_rate"),
        (Stages, "fine_tune_learning_rate"),
        (Stages, "weight_decay"),
        (Training, "learning_rate"),
        (Training, "log_variance_learning_rate"),
        (lt.FisherTrace, "every_n_steps"),
        (lt.InformationInWeights, "prior_std"),
        (
            lambda **given: lt.PACBayesCertificate(**{k: [0.1, v] for k, v in given.items()}),
            "prior_stds",
        ),
        (lt.InformationInWeights, "beta"),
    ],
)
def test_settings_that_are_no_numbers_are_refused_at_once(make, argument, bad):
    with pytest.raises((ValueError, TypeError), match=f"`{argument}` must be"):
        make(**{argument: bad})


@pytest.mark.parametrize("seed", [2**70, -(2**64)])
def test_a_seed_that_torch_does_not_take_is_refused(seed):
    with pytest.raises(ValueError, match=f"`seed` must .*, got {seed}"):
        lt.FisherTrace(seed=seed)
    lt.FisherTrace(seed=2**64 - 1)
