"""Everything that makes a certificate invalid is seen and named; what is handled stays valid."""

import math
from copy import deepcopy

import pytest
import torch
from torch import nn

from lightning_taskinfo.certificates import Prior, certify
from lightning_taskinfo.certificates.prior import assumptions, reasons_against
from lightning_taskinfo.distributions import diagonal_curvature
from tests.certificates.conftest import fit

QUICK = {"draws": 20, "betas": (1.0,)}


def certified(model, data, prior, **options):
    return certify(model, data, prior, **{**QUICK, **options})


def test_a_centre_of_unknown_origin(trained, data, start):
    certificate = certified(trained, data, Prior(start))
    assert not certificate.valid
    assert "the prior's centre is not known to be independent of the data" in certificate.reasons[0]
    assert "NO: the prior's centre" in str(certificate)
    assert not [
        line for line in certificate.assumptions if "centre" in line
    ]  # nobody has given a word to trust


@pytest.mark.parametrize("origin", [None, "random initialisation"])
def test_a_centre_at_another_network_is_refused(trained, data, origin):
    for other in (nn.Sequential(nn.Flatten(), nn.Linear(2, 2)), nn.Sequential(nn.Linear(5, 7)), {}):
        with pytest.raises(ValueError, match="`center` must"):
            certified(trained, data, Prior(other, origin=origin))


def test_the_origin_is_repeated(trained, data, start):
    certificate = certified(trained, data, Prior(start, origin="trained on other people's digits"))
    assert certificate.valid
    assert "trained on other people's digits" in certificate.assumptions[0]
    assert "trained on other people's digits" in str(certificate)


@pytest.mark.parametrize(
    "alias", [lambda m: m, lambda m: m.state_dict(), lambda m: dict(m.named_parameters())]
)
def test_a_centre_that_was_trained_along(start, data, alias):
    """``w0 = model.state_dict()`` before training is not a copy: afterwards it is the trained network."""
    model = deepcopy(start)
    center = alias(model)
    certificate = certified(fit(model, data), data, Prior(center, origin="random initialisation"))
    assert not certificate.valid
    assert "the centre of `0.weight` shares memory with the network" in certificate.reasons[0]


def test_a_centre_equal_to_the_network_but_trained_elsewhere(start, data):
    certificate = certified(
        deepcopy(start), data, Prior(deepcopy(start), origin="trained on the other half")
    )
    assert certificate.valid
    assert "the network is the prior's centre itself" in certificate.assumptions[1]


def test_a_parametrized_layer(data):
    torch.manual_seed(0)
    start = nn.Sequential(
        nn.utils.parametrizations.weight_norm(nn.Linear(4, 8)), nn.ReLU(), nn.Linear(8, 2)
    )
    certificate = certified(
        fit(deepcopy(start), data), data, Prior(start, "random initialisation"), structure="neuron"
    )
    assert certificate.valid
    assert "0.parametrizations.weight" in certificate.prior_std


def normalised():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))


def test_batch_norm_statistics_that_moved(data):
    start = normalised()
    model = fit(deepcopy(start), data)
    certificate = certified(model, data, Prior(start, origin="random initialisation"))
    assert not certificate.valid
    assert certificate.reasons[0].startswith(
        "BatchNorm statistic `1.running_mean`, like 2 more, is outside the KL and "
    )


def test_statistics_that_are_not_a_copy(data):
    """Where only the weights were copied, equal statistics say nothing: they are the same tensor."""
    model = normalised()
    center = {
        **model.state_dict(),
        **{name: p.detach().clone() for name, p in model.named_parameters()},
    }
    certificate = certified(fit(model, data), data, Prior(center, origin="random initialisation"))
    assert certificate.reasons[0].startswith("the centre of `1.running_mean` shares memory")


def test_batch_norm_statistics_that_stayed(data):
    start = normalised()
    with torch.no_grad():
        start[1].running_mean.fill_(0.3)  # from other data
    model = fit(deepcopy(start).eval(), data)
    assert certified(model, data, Prior(start, origin="pretrained on other data")).valid


def test_batch_norm_without_statistics_lets_samples_influence_each_other(data):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(4, 8), nn.BatchNorm1d(8, track_running_stats=False), nn.ReLU(), nn.Linear(8, 2)
    )
    start = deepcopy(model)
    curvature = diagonal_curvature(
        {name: torch.ones_like(p) for name, p in model.named_parameters()}
    )
    certificate = certified(model, data, Prior(start, origin="other data"), structure=curvature)
    assert certificate.reasons == (
        "the output for a sample depends on the other samples of its batch, so their losses are not independent",
    )


@pytest.mark.parametrize(
    ("origin", "valid"),
    [("random initialisation", False), ("Initial weights", False), ("the other half", True)],
)
def test_an_initialisation_that_is_the_trained_network(start, data, origin, valid):
    certificate = certified(start, data, Prior(deepcopy(start), origin=origin))
    assert certificate.valid == valid
    assert valid or "equals the trained weights, or nearly: it was copied" in certificate.reasons[0]
    assert valid == any(
        "it has learned nothing from these samples" in line for line in certificate.assumptions
    )


@pytest.mark.parametrize(("step", "valid"), [(1e-6, False), (5e-4, False), (5e-3, True)])
def test_an_initialisation_that_is_nearly_the_trained_network(trained, data, step, valid):
    """Copied after training and rounded, say: no training moves weights by so little."""
    g = torch.Generator().manual_seed(0)
    center = {}
    for name, p in trained.named_parameters():
        noise = torch.randn(p.shape, generator=g)
        center[name] = p.detach() + step * p.norm() * noise / noise.norm()
    certificate = certified(trained, data, Prior(center, origin="random initialisation"))
    assert certificate.valid == valid
    if not valid:
        assert "equals the trained weights" in certificate.reasons[0]
    elsewhere = certified(trained, data, Prior(center, origin="trained on the other half"))
    assert elsewhere.valid
    told = [line for line in elsewhere.assumptions if "the network is the prior's centre" in line]
    assert len(told) == (not valid)


def test_a_layer_that_did_not_move_hides_nothing_of_one_that_did(start, data):
    """A large layer that has not learned is no reason to call the other one unmoved."""
    center = deepcopy(start)
    with torch.no_grad():
        center[0].weight.mul_(1e6)
    model = deepcopy(center)
    with torch.no_grad():
        model[2].bias.add_(0.1)
    assert not reasons_against(model, Prior(center, "random initialisation"), data[0][:4], model)


def test_a_buffer_that_moved_is_called_a_buffer(start, data):
    start = deepcopy(start)
    start.register_buffer("scale", torch.ones(1))
    model = deepcopy(start)
    model.scale.mul_(2)
    (reason,) = reasons_against(model, Prior(start, "other data"), data[0][:4], model)
    assert reason == "buffer `scale` is outside the KL and differs from the prior's centre"


def test_tensors_without_values_share_no_memory(start, data):
    start = deepcopy(start)
    start.register_buffer("none", torch.empty(0))
    start.register_parameter("nothing", nn.Parameter(torch.empty(0)))
    assert reasons_against(deepcopy(start), Prior(start, "other data"), data[0][:4], start) == []


@pytest.mark.parametrize(("share", "influenced"), [(1e-5, False), (1e-2, True)])
def test_outputs_that_differ_by_rounding_are_no_influence(start, data, share, influenced):
    def outputs(x):
        return start(x) * (1 + share * len(x))  # a little like sums in another order

    found = reasons_against(start, Prior(deepcopy(start), "other data"), data[0][:4], outputs)
    assert ["depends on the other samples of its batch" in reason for reason in found] == [
        True
    ] * influenced


def test_what_is_taken_on_trust_is_told_with_the_number_of_scales_and_where_the_centre_is_from(
    start,
):
    trusted = assumptions(start, Prior(stds=(0.1, 0.2)))
    assert len(trusted) == 2
    assert trusted[0].startswith(
        "architecture, preprocessing and the 2 prior scales were fixed before"
    )
    model = deepcopy(start)
    nn.init.ones_(model[0].bias)  # one of several
    assert assumptions(model, Prior(start, "random", stds=(0.1, 0.2))) == [
        "the prior's centre does not depend on the samples: random",
        *trusted,
    ]


def test_a_frozen_layer_that_stayed_costs_nothing(start, data):
    start = deepcopy(start)
    start[0].requires_grad_(False)
    certificate = certified(
        fit(deepcopy(start), data), data, Prior(start, origin="random initialisation")
    )
    assert certificate.valid
    assert list(certificate.post.mean) == ["2.weight", "2.bias"]


def test_a_frozen_layer_that_moved(trained, start, data):
    model = deepcopy(trained)
    model[0].requires_grad_(
        False
    )  # trained first, frozen for the certificate: its information is not paid for
    certificate = certified(model, data, Prior(start, origin="random initialisation"))
    assert not certificate.valid
    assert (
        "frozen parameter `0.weight`, like 1 more, is outside the KL and differs"
        in certificate.reasons[0]
    )


def test_a_frozen_layer_that_the_centre_does_not_hold(trained, start, data):
    model = deepcopy(trained)
    model[0].requires_grad_(False)
    center = {name: p for name, p in start.state_dict().items() if name.startswith("2")}
    certificate = certified(model, data, Prior(center, origin="random initialisation"))
    assert (
        "frozen parameter `0.weight`, like 1 more, is outside the KL and not part of the prior's centre"
        in certificate.reasons[0]
    )


def test_a_centre_at_zero_says_nothing_about_buffers(data):
    assert not certified(normalised(), data, None).valid


def test_tied_weights_count_once(data):
    torch.manual_seed(0)
    start = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 2))
    start[2].weight = start[0].weight
    model = fit(deepcopy(start), data)
    for structure in ("diagonal", "neuron"):
        certificate = certified(
            model, data, Prior(start, origin="random initialisation"), structure=structure
        )
        assert certificate.valid
        assert sum(mean.numel() for mean in certificate.post.mean.values()) == 16 + 4 + 4 + 8 + 2


def test_a_loss_outside_the_unit_interval(trained, data, prior):
    def cross_entropy(outputs, targets):
        return nn.functional.cross_entropy(20 * outputs, targets, reduction="none")

    certificate = certified(trained, data, prior, loss_fn=cross_entropy)
    assert not certificate.valid
    assert "the loss must lie in [0, 1], got" in certificate.reasons[0]


def test_a_bounded_loss_of_ones_own(trained, data, prior):
    def brier(outputs, targets):
        return 1 - outputs.softmax(1).gather(1, targets[:, None])[:, 0]

    assert certified(trained, data, prior, loss_fn=brier).valid


def test_dropout_is_measured_in_eval_mode(data):
    torch.manual_seed(0)
    start = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.9), nn.Linear(8, 2))
    assert certified(
        fit(deepcopy(start), data), data, Prior(start, origin="random initialisation")
    ).valid


@pytest.mark.parametrize("odd", [math.nan, math.inf])
@pytest.mark.parametrize("influenced", [False, True])
def test_outputs_that_are_not_finite_hide_no_influence(start, data, odd, influenced):
    def outputs(x):
        y = start(x) * (len(x) if influenced else 1)
        return y.index_fill(1, torch.tensor([0]), odd)

    found = reasons_against(start, Prior(deepcopy(start), "other data"), data[0][:4], outputs)
    assert ["depends on the other samples of its batch" in reason for reason in found] == [
        True
    ] * influenced
