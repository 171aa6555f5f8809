"""Numbers that are negative, infinite or undefined are refused where they are given, by the argument's name."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from lightning_taskinfo import (
    InformationInWeights,
    LocalMinimumRegularizer,
    PACBayesCertificate,
    Task2Vec,
    Training,
    add_weight_noise,
    certify,
)
from lightning_taskinfo._ranges import check_counts, check_not_negative, check_positive, check_seed
from lightning_taskinfo.certificates import Prior
from lightning_taskinfo.distributions import IsotropicGaussian
from lightning_taskinfo.functional.discrepancy import mk_mmd
from lightning_taskinfo.functional.information import information_in_weights, post_variance
from lightning_taskinfo.functional.likelihood import Gaussian
from lightning_taskinfo.transfer.ready import Stages

ONE = torch.ones(1)
NOT_POSITIVE = (0.0, -1.0, math.nan, math.inf)
SCALARS = {
    "InformationInWeights prior_std": ("prior_std", lambda x: InformationInWeights(prior_std=x)),
    "InformationInWeights beta": ("beta", lambda x: InformationInWeights(beta=x)),
    "information_in_weights": (
        "prior_std",
        lambda x: information_in_weights(ONE, ONE, prior_std=x),
    ),
    "post_variance": ("beta", lambda x: post_variance(ONE, prior_std=1.0, beta=x)),
    "IsotropicGaussian": ("prior_std", lambda x: IsotropicGaussian({"w": ONE}, prior_std=x)),
    "Gaussian": ("std", lambda x: Gaussian(std=x)),
    "Stages": ("learning_rate", lambda x: Stages(learning_rate=x)),
    "Stages, fine-tuning": ("fine_tune_learning_rate", lambda x: Stages(fine_tune_learning_rate=x)),
    "Training": ("learning_rate", lambda x: Training(learning_rate=x)),
    "Training, log-variances": (
        "log_variance_learning_rate",
        lambda x: Training(log_variance_learning_rate=x),
    ),
    "Task2Vec": ("weight_decay", lambda x: Task2Vec(weight_decay=x)),
    "add_weight_noise": ("prior_std", lambda x: add_weight_noise(nn.Linear(1, 1), prior_std=x)),
    "LocalMinimumRegularizer": ("step_size", lambda x: LocalMinimumRegularizer(step_size=x)),
}
SEVERAL = {
    "PACBayesCertificate betas": (
        "betas",
        lambda xs: PACBayesCertificate(prior_origin="random", betas=xs),
    ),
    "certify": (
        "betas",
        lambda xs: certify(nn.Linear(1, 2), (torch.ones(9, 1), torch.zeros(9).long()), betas=xs),
    ),
    "Prior": ("stds", lambda xs: Prior(stds=xs)),
    "mk_mmd": ("widths", lambda xs: mk_mmd(torch.ones(2, 1), torch.ones(2, 1), widths=xs)),
}


@pytest.mark.parametrize("value", NOT_POSITIVE)
@pytest.mark.parametrize(("argument", "make"), SCALARS.values(), ids=SCALARS)
def test_refuses_a_number_that_is_not_positive_and_finite(argument, make, value):
    with pytest.raises(ValueError, match=f"`{argument}` must .*{value}"):
        make(value)


@pytest.mark.parametrize("value", NOT_POSITIVE)
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize(("argument", "make"), SEVERAL.values(), ids=SEVERAL)
def test_refuses_one_such_number_among_others(argument, make, value, first):
    values = [value, 0.1] if first else [0.1, value]
    with pytest.raises(ValueError, match=f"`{argument}` must .*{value}"):
        make(values)


@pytest.mark.parametrize(("argument", "make"), SEVERAL.values(), ids=SEVERAL)
def test_refuses_none_at_all(argument, make):
    with pytest.raises(ValueError, match=f"`{argument}` must"):
        make([])


@pytest.mark.parametrize("value", [-1e-9, math.nan, math.inf])
def test_refuses_a_number_that_is_negative_or_not_finite(value):
    with pytest.raises(ValueError, match=f"`weight_decay` must .*{value}"):
        check_not_negative(weight_decay=value)


def test_takes_what_is_in_range():
    check_positive(a=1e-300, b=[1, 2.5], c=None, d=torch.tensor([0.5]))
    check_not_negative(a=0, b=1e300, c=None)
    check_counts(a=1, b=np.int64(2), c=None)
    for seed in (0, -(2**63), 2**64 - 1):
        check_seed(seed)


@pytest.mark.parametrize("value", [2.0, math.nan, math.inf, "3", True], ids=repr)
def test_refuses_a_count_that_is_no_whole_number(value):
    with pytest.raises(TypeError, match=f"`size` must be a whole number, got {value!r}"):
        check_counts(size=value)


@pytest.mark.parametrize("value", [0, -1])
def test_refuses_a_count_below_one(value):
    with pytest.raises(ValueError, match=f"`size` must be at least 1, got {value}"):
        check_counts(size=value)


@pytest.mark.parametrize("seed", [2**70, 2**64, -(2**63) - 1])
def test_refuses_a_seed_that_torch_does_not_take(seed):
    with pytest.raises(ValueError, match=f"`seed` must .*, got {seed}"):
        InformationInWeights(seed=seed)


def test_refuses_a_seed_that_is_no_whole_number():
    with pytest.raises(TypeError, match="`seed` must be a whole number, got 'a'"):
        InformationInWeights(seed="a")


def test_a_prior_std_is_a_number_or_one_word():
    with pytest.raises(ValueError, match="`prior_std` must be a positive number or 'auto', got"):
        InformationInWeights(prior_std="0.1")


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize(
    ("argument", "make"),
    [("prior_center", lambda center: InformationInWeights(prior_center=center)), ("center", Prior)],
    ids=["InformationInWeights", "Prior"],
)
def test_refuses_a_centre_that_is_not_finite(argument, make, value):
    with pytest.raises(ValueError, match=f"`{argument}` must .*'layer.weight'"):
        make({"layer.bias": torch.zeros(2), "layer.weight": torch.tensor([0.0, value])})


def test_the_values_of_a_dict_are_numbers_too():
    check_positive(stds={"a": 1.0, "b": 2.0}.values())
    with pytest.raises(ValueError, match=r"`stds` must be positive, got -2\.0"):
        check_positive(stds={"a": 1.0, "b": -2.0}.values())
    with pytest.raises(ValueError, match=r"`stds` must be positive, got \[\]"):
        check_positive(stds={}.values())
