"""A certificate says what was proved, which proof is stronger and what would tighten the other one."""

from dataclasses import replace

import pytest

from lightning_taskinfo.certificates import Prior, TestSetBound, certify
from lightning_taskinfo.certificates.certificate import percent
from lightning_taskinfo.functional.tail_bounds import binomial_upper_bound
from tests.certificates.conftest import blobs


@pytest.fixture(scope="module")
def certificate(trained, data, start):
    prior = Prior(start, "random <initialisation>")
    options = {"draws": 20, "betas": (1.0,), "structure": "diagonal"}
    return certify(trained, data, prior, unlabelled=blobs(200, 5)[0], **options)


def with_test_set(certificate, bound):
    return replace(certificate, test_set=TestSetBound(100, 0.1, bound, 0.2, 0.95))


def test_percents_are_rounded_up():
    assert [percent(value) for value in (0.2, 0.20001, 1.0)] == ["20.0 %", "20.1 %", "100.0 %"]


def test_the_sentence_names_both_bounds(certificate):
    said = certificate.reading()
    assert percent(certificate.bound) in said
    assert percent(certificate.network.bound) in said
    assert percent(certificate.bound) in replace(certificate, network=None).reading()


def test_nothing_is_claimed_where_it_is_not_valid(certificate):
    said = replace(certificate, valid=False, reasons=("it saw the data",)).reading()
    assert "it saw the data" in said
    assert "%" not in said


def test_the_stronger_proof_is_named_and_the_weaker_one_gets_the_advice(certificate):
    strong, weak = with_test_set(certificate, 0.01), with_test_set(certificate, 1.0)
    assert strong.comparison().startswith("The test-set bound is stronger")
    assert weak.comparison().startswith("The bound for the network itself is stronger")
    assert "largest part of the certificate" in strong.advice()
    assert percent(binomial_upper_bound(40, 400, 0.05).item()) in weak.advice()


@pytest.mark.parametrize(
    ("change", "remedy"),
    [
        ({"stochastic_bound": 0.9, "risk_upper": 0.1}, "nearer to the trained weights"),
        ({"disagreement": 0.9, "disagreement_upper": 0.91}, "narrower"),
        ({"disagreement": 0.0, "disagreement_upper": 0.9}, "unlabelled inputs"),
        (
            {"risk": 0.9, "risk_upper": 0.91, "stochastic_bound": 0.92},
            "error of the stochastic network",
        ),
        ({"risk": 0.0, "risk_upper": 0.9, "stochastic_bound": 0.91}, "`draws`"),
    ],
)
def test_the_advice_is_about_the_largest_part(certificate, change, remedy):
    small = {
        "stochastic_bound": 0.1,
        "risk": 0.05,
        "risk_upper": 0.06,
        "disagreement": 0.01,
        "disagreement_upper": 0.02,
    }
    network = replace(certificate.network, **{**small, **change})
    assert remedy in replace(certificate, network=network).advice()


def test_without_held_out_labels_the_error_to_beat_is_told(certificate):
    assert f"{100 * certificate.test_set.break_even:.1f} %" in certificate.comparison()


def test_a_notebook_shows_the_same_escaped(certificate):
    shown = certificate._repr_html_()
    assert "random &lt;initialisation&gt;" in shown
    assert percent(certificate.network.bound) in shown
    assert certificate.reading() in str(certificate)
