"""Power laws against least squares, and where they cross."""

import math

import pytest
import torch

from lightning_taskinfo.functional.features import fit_power_law, transfer_onset


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_power_law_is_recovered_and_crossed_where_predicted():
    n = torch.tensor([10, 30, 100, 1000])
    amplitude, exponent = fit_power_law(n, 3.0 * n.double() ** -0.8)
    assert amplitude.item() == pytest.approx(3.0)
    assert exponent.item() == pytest.approx(0.8)
    onset = transfer_onset(torch.tensor([0.0, 0.01, 5.0], dtype=torch.float64), amplitude, exponent)
    assert onset[0] == math.inf
    torch.testing.assert_close(
        3.0 * onset[1:] ** -0.8, torch.tensor([0.01, 5.0], dtype=torch.float64)
    )


def test_power_law_is_least_squares_between_logarithms():
    n, risk = torch.tensor([2.0, 5.0, 9.0, 20.0], dtype=torch.float64), randn(3, 4).exp()
    design = torch.stack([torch.ones(4, dtype=torch.float64), -n.log()], -1)
    solution = torch.linalg.lstsq(design, risk.log().T).solution
    amplitude, exponent = fit_power_law(n, risk)
    torch.testing.assert_close(amplitude, solution[0].exp())
    torch.testing.assert_close(exponent, solution[1])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: fit_power_law(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 0.0])),
            "`risk` must be positive, got 0.0",
        ),
        (
            lambda: fit_power_law(torch.tensor([0.0, 2.0]), torch.ones(2)),
            "`n` must be positive, got 0.0",
        ),
        (
            lambda: fit_power_law(torch.ones(2), torch.ones(2)),
            "`n` must have at least two different values",
        ),
        (lambda: transfer_onset(torch.ones(1), 0.0, 1.0), "`amplitude` must be positive, got 0.0"),
        (lambda: transfer_onset(torch.ones(1), 1.0, -1.0), "`exponent` must be positive, got -1.0"),
    ],
)
def test_refuses_what_is_outside_the_domain(call, message):
    with pytest.raises(ValueError, match=message):
        call()
