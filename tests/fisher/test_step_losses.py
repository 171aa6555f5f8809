"""Losses of samples that are read off a training step's graph, beside torch's own."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from lightning_taskinfo.fisher import step_losses
from lightning_taskinfo.fisher.step_losses import StepLosses, losses_of

N, T, C = 6, 4, 5


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(0)


def outputs(*shape, generator):
    return torch.randn(shape, generator=generator, requires_grad=True)


def read(loss, targets):
    return StepLosses(loss, N, targets)


def values(loss, targets):
    """Return the mean loss of each sample."""
    return losses_of([read(loss, targets).later()()])


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize(
    "options",
    [{}, {"label_smoothing": 0.1}, {"weight": torch.arange(1.0, C + 1)}, {"ignore_index": 2}],
    ids=str,
)
def test_cross_entropy(options, reduction, generator):
    out, y = outputs(N, C, generator=generator), torch.arange(N) % C
    loss = F.cross_entropy(3 * out, y, reduction=reduction, **options)
    found = values(loss / 4, y)
    expected = F.cross_entropy(3 * out, y, reduction="none")
    if "ignore_index" in options:
        expected = torch.where(y == 2, torch.nan, expected)
    torch.testing.assert_close(found, expected, equal_nan=True)
    assert not found.requires_grad


def test_tokens_are_averaged_over_those_that_count(generator):
    out, y = outputs(N, T, C, generator=generator), torch.randint(C, (N, T), generator=generator)
    y[0, 1:] = -100
    y[1] = -100
    rows = F.cross_entropy(out.flatten(0, 1), y.flatten(), reduction="none").view(N, T)
    expected = rows.sum(1) / (y != -100).sum(1)
    for loss in (
        F.cross_entropy(out.flatten(0, 1), y.flatten()),
        F.cross_entropy(out.transpose(1, 2), y),
    ):
        torch.testing.assert_close(values(loss, y), expected, equal_nan=True)


@pytest.mark.parametrize("padded", [True, False])
def test_labels_of_a_language_model_may_be_shifted(padded, generator):
    out, y = outputs(N, T, C, generator=generator), torch.randint(C, (N, T), generator=generator)
    shifted = F.pad(y, (0, 1), value=-100)[:, 1:] if padded else y[:, 1:]
    logits = out if padded else out[:, :-1]
    loss = F.cross_entropy(logits.reshape(-1, C), shifted.reshape(-1))
    rows = F.cross_entropy(out[:, :-1].reshape(-1, C), y[:, 1:].reshape(-1), reduction="none").view(
        N, T - 1
    )
    torch.testing.assert_close(values(loss, y), rows.mean(1))


@pytest.mark.parametrize(
    "loss",
    [
        F.mse_loss,
        F.binary_cross_entropy_with_logits,
        lambda x, y, **k: F.binary_cross_entropy(x.sigmoid(), y, **k),
    ],
)
def test_other_losses_are_means_over_outputs(loss, generator):
    out, y = outputs(N, 3, generator=generator), torch.rand(N, 3, generator=generator)
    found = values(loss(out, y), y)
    torch.testing.assert_close(found, loss(out, y, reduction="none").mean(1))


def test_half_precision_is_read_in_single_precision(generator):
    out, y = outputs(N, C, generator=generator), torch.arange(N) % C
    found = values(F.cross_entropy(out.bfloat16(), y), y)
    assert found.dtype == torch.float32
    torch.testing.assert_close(
        found, F.cross_entropy(out, y, reduction="none"), rtol=0.02, atol=0.02
    )


def permuted(out, y):
    return F.cross_entropy(out.flip(0), y.flip(0))


def two(out, y):
    return F.cross_entropy(out, y) + F.cross_entropy(2 * out, y)


def soft(out, y):
    return F.cross_entropy(out, F.one_hot(y, C).float())


def repeated(out, y):
    return F.cross_entropy(out[:4], y[:4])


@pytest.mark.parametrize(
    ("loss", "message"),
    [(permuted, "targets"), (two, "got 2"), (soft, "got 0"), (repeated, "of shape [4]")],
)
def test_losses_that_are_not_those_of_the_batch_are_not_read(loss, message, generator):
    out, y = outputs(N, C, generator=generator), torch.arange(N) % C
    found = read(loss(out, y), y)
    assert message in found.problem
    assert not losses_of([found.later()()]).isfinite().any()


def test_unknown_targets_are_not_compared(generator):
    out, y = outputs(N, C, generator=generator), torch.arange(N) % C
    found = values(permuted(out, y), None)
    torch.testing.assert_close(found, F.cross_entropy(out, y, reduction="none").flip(0))


def test_a_checkpointed_loss_is_read_and_the_backward_pass_goes_on(generator):
    out, y = outputs(N, C, generator=generator), torch.arange(N) % C
    loss = checkpoint(F.cross_entropy, 2 * out, y, use_reentrant=False)
    torch.testing.assert_close(values(loss, y), F.cross_entropy(2 * out, y, reduction="none"))
    (expected,) = torch.autograd.grad(F.cross_entropy(2 * out, y), out)
    loss.backward()
    torch.testing.assert_close(out.grad, expected)


@pytest.mark.parametrize("small", [True, False])
@pytest.mark.parametrize("same", [True, False])
def test_what_was_read_does_not_change_with_outputs_and_labels(same, small, generator, monkeypatch):
    monkeypatch.setattr(step_losses, "COPIED", N * C if small else N * C - 1)
    out, y = outputs(N, C, generator=generator), torch.arange(N) % C
    log_prob = out.log_softmax(1)
    found = read(F.nll_loss(log_prob, y), y if same else y.clone()).later()
    expected = F.cross_entropy(out, y, reduction="none").detach()
    with torch.no_grad():
        log_prob.zero_()
        y.fill_(-100)
    torch.testing.assert_close(losses_of([found()]), expected)


def test_batches_of_any_lengths_are_averaged_one_after_the_other(generator):
    batches = []
    expected = []
    for length in (T, T, 2, T):
        out = outputs(N, length, C, generator=generator)
        y = torch.randint(C, (N, length), generator=generator)
        y[0, 1:] = -100
        loss = F.cross_entropy(out.flatten(0, 1), y.flatten())
        batches.append(read(loss, y).later()())
        expected.append(values(loss, y))
    torch.testing.assert_close(losses_of(batches), torch.cat(expected))


@pytest.mark.parametrize("shape", [(N,), (N, 1), (N, 2)])
def test_one_sample_in_the_place_of_another_is_seen(shape, generator):
    """Also where labels have one column, of which nothing is left when they are shifted."""
    out, y = outputs(*shape, generator=generator), torch.rand(shape, generator=generator)
    other = y.clone()
    other[:2] = y[:2].flip(0)
    assert read(F.mse_loss(out, y.clone()), y).problem is None
    assert "in their order" in read(F.mse_loss(out, other), y).problem


def test_what_is_kept_of_targets_that_are_trained_holds_no_graph(generator):
    out, y = (outputs(N, C, generator=generator) for _ in range(2))
    sums, _ = read(F.mse_loss(out, y), y).later()()
    assert not sums.requires_grad
