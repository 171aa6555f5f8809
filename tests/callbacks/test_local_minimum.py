"""``LocalMinimum`` against gradients stacked in a loop, once at the end of training unless told otherwise."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_taskinfo.callbacks import LocalMinimum
from lightning_taskinfo.functional.minima import normalise_logits
from tests.callbacks.runs import digits, fit


def jacobian(model, *, normalised=False):
    """Gradients of each sample's loss, ``[32, P]`` in float64."""
    model = model.double().eval()
    rows = []
    for x, y in digits():
        logits = model(x.double().unsqueeze(0))
        loss = F.cross_entropy(normalise_logits(logits) if normalised else logits, y.unsqueeze(0))
        rows.append(
            torch.cat([g.flatten() for g in torch.autograd.grad(loss, [*model.parameters()])])
        )
    return torch.stack(rows)


@pytest.mark.parametrize("normalised", [False, True])
def test_equals_a_loop_at_the_end_of_training(tmp_path, normalised):
    callback = LocalMinimum(subset_size=32, draws=2, normalise_logits=normalised)
    loader = DataLoader(digits(), batch_size=8)
    model = fit(tmp_path, callback, loader=loader, precision="64-true").lightning_module
    (row,) = callback.history
    j = jacobian(model, normalised=normalised)
    xi = j @ j.T
    assert row["step"] == 8
    assert row["local_minimum/gamma"] == pytest.approx(xi.logdet().item(), rel=1e-6)
    assert row["local_minimum/spectral_radius"] == pytest.approx(
        torch.linalg.matrix_norm(xi, 2).item() / 32, rel=1e-6
    )
    assert row["local_minimum/frobenius"] == pytest.approx(
        xi.square().sum().item() / 32**2, rel=1e-6
    )
    assert row["local_minimum/trace"] == pytest.approx(xi.trace().item() / 32, rel=1e-6)
    x, y = digits().tensors
    assert row["local_minimum/mean_loss"] == pytest.approx(
        F.cross_entropy(model(x.double()), y).item(), rel=1e-6
    )


def test_draws_have_a_standard_error_and_repeat(tmp_path):
    def row(**arguments):
        callback = LocalMinimum(subset_size=6, **arguments)
        fit(tmp_path, callback)
        return callback.history[-1]

    assert row() == row()
    assert row(seed=1)["local_minimum/gamma"] != row()["local_minimum/gamma"]
    assert 0 < row()["local_minimum/gamma_standard_error"] < 1


def test_on_a_schedule_and_with_drawn_labels(tmp_path):
    callback = LocalMinimum(every_n_epochs=1, subset_size=4, labels="sampled", max_samples=12)
    fit(tmp_path, callback, max_epochs=3)
    assert [row["step"] for row in callback.history] == [4, 8, 12]


def test_a_singular_matrix_is_logged_as_such(tmp_path):
    x, y = (part[:4].repeat(8, *[1] * (part.dim() - 1)) for part in digits().tensors)
    callback = LocalMinimum()
    with pytest.warns(UserWarning, match="The gradients of .* samples span .* directions only"):
        fit(tmp_path, callback, loader=DataLoader(TensorDataset(x, y), batch_size=8))
    assert callback.history[-1]["local_minimum/gamma"] == -math.inf


@pytest.mark.parametrize("argument", ["draws", "subset_size"])
def test_refuses_non_positive(argument):
    with pytest.raises(ValueError, match=f"`{argument}` must be at least 1, got 0"):
        LocalMinimum(**{argument: 0})


def test_refuses_subsets_larger_than_the_whole():
    with pytest.raises(ValueError, match="`subset_size` must be at most `max_samples`, 30, got 31"):
        LocalMinimum(subset_size=31, max_samples=30)
    LocalMinimum(subset_size=30, max_samples=30)


def test_refuses_several_gradients_a_sample():
    with pytest.raises(ValueError, match="`labels` must be one of empirical, sampled, got 'exact'"):
        LocalMinimum(labels="exact")
    with pytest.raises(ValueError, match=r"`mc_samples` must be 1, .* got 2"):
        LocalMinimum(labels="sampled", mc_samples=2)
