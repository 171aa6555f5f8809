"""Where a prior is centred: a module, its state, a checkpoint, or half of the labels; and what it refuses."""

from copy import deepcopy

import pytest
import torch
from torch import nn

from lightning_taskinfo.certificates import Prior, certify
from lightning_taskinfo.certificates.prior import half_prior, hash_of
from tests.certificates.conftest import blobs, fit

QUICK = {"draws": 20, "betas": (1.0,), "structure": "diagonal"}


def frozen_start():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    model[0].requires_grad_(False)
    model.register_buffer("scale", torch.ones(3))
    return model


def test_a_prior_taken_before_training_equals_that_of_a_copy(data):
    model = frozen_start()
    copied = Prior(deepcopy(model), "random initialisation")
    taken = Prior.of(model, "random initialisation")
    fit(model, data)
    assert certify(model, data, taken, **QUICK) == certify(model, data, copied, **QUICK)


def test_a_frozen_base_is_not_copied_and_still_compared(data):
    model = frozen_start()
    prior = Prior.of(model, "random initialisation")
    assert sorted(prior.center) == ["2.bias", "2.weight"]
    fit(model, data)
    assert certify(model, data, prior, **QUICK).valid
    model[0].weight.data[0, 0] += 1
    model.scale[0] = 2
    reasons = certify(model, data, prior, **QUICK).reasons
    assert ["`0.weight`" in reasons[0], "`scale`" in reasons[1], len(reasons)] == [True, True, 2]


def test_hashes_know_values_and_shapes():
    x = torch.arange(6.0)
    one = hash_of(x)
    assert one == hash_of(x.clone())
    assert one != hash_of(x.view(2, 3))
    assert one != hash_of(x + 1)
    assert hash_of(torch.empty(0)) != hash_of(torch.tensor(1.0, dtype=torch.bfloat16))


@pytest.mark.parametrize("kind", ["state_dict", "lightning"])
def test_a_checkpoint_is_a_centre(trained, start, data, prior, tmp_path, kind):
    path = tmp_path / "start.pt"
    state = start.state_dict()
    torch.save(state if kind == "state_dict" else {"state_dict": state, "epoch": 3}, path)
    from_file = certify(trained, data, Prior(path, "random initialisation"), **QUICK)
    assert from_file == certify(trained, data, prior, **QUICK)


def test_a_fresh_head_is_centred_at_zero(trained, start, data):
    other = deepcopy(start)
    other[2] = nn.Linear(8, 5)  # the head of another task
    with pytest.raises(
        ValueError, match=r"`center` .*`2.weight` with shape \(2, 8\), got \(5, 8\)"
    ):
        certify(trained, data, Prior(other, "pretrained"), **QUICK)
    found = certify(trained, data, Prior(other, "pretrained", fresh=["2."]), **QUICK)
    zero = {**start.state_dict(), "2.weight": torch.zeros(2, 8), "2.bias": torch.zeros(2)}
    assert found == certify(trained, data, Prior(zero, "pretrained"), **QUICK)
    assert found.valid


def test_a_prior_of_another_network_is_refused(trained, data):
    other = nn.ModuleDict({"trunk": nn.Linear(4, 8), "head": nn.Linear(8, 2)})
    with pytest.raises(
        ValueError, match=r"`center` must hold `0.weight` with shape \(8, 4\), got nothing; `fresh`"
    ):
        certify(trained, data, Prior(other, "another network"), **QUICK)


@pytest.mark.parametrize("content", [b"no weights", {"state_dict": [1]}, None])
def test_a_file_without_weights_is_refused(tmp_path, content):
    path = tmp_path / "start.pt"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content:
        torch.save(content, path)
    with pytest.raises(ValueError, match=r"`center` .*start\.pt"):
        Prior(path)


def test_samples_that_the_centre_was_trained_on_are_refused(trained, start, data):
    seen = torch.cat([torch.randn(50, 4), data[0][:3]])
    with pytest.raises(ValueError, match=r"`data` .*got 3 of 600"):
        certify(trained, data, Prior(start, "pretrained", seen=seen), **QUICK)
    unlabelled = blobs(200, 5)[0]
    with pytest.raises(ValueError, match=r"`unlabelled` .*got 9 of 200"):
        certify(
            trained,
            data,
            Prior(start, "pretrained", seen=unlabelled[:9]),
            unlabelled=unlabelled,
            **QUICK,
        )


def test_half_of_the_labels_of_a_network_with_a_buffer_that_is_not_saved(data):
    model = frozen_start()
    model.register_buffer("place", torch.arange(3), persistent=False)
    prior = Prior(deepcopy(model), "random initialisation")
    found = certify(fit(model, data), data, prior, half_fn=fit, **QUICK)
    assert (found.valid, found.n) == (True, 300)


def test_half_of_the_labels_train_the_centre_and_the_others_certify(trained, start, data, prior):
    seen = []

    def train(network, half):
        seen.append((deepcopy(network.state_dict()), half))
        fit(network, half)

    random = torch.get_rng_state()
    found = certify(trained, data, prior, half_fn=train, **QUICK)
    assert torch.equal(torch.get_rng_state(), random)
    ((begun, half),) = seen
    assert all(torch.equal(begun[name], value) for name, value in start.state_dict().items())
    assert (len(half[1]), found.n) == (300, 300)
    rows = {tuple(row) for row in half[0].tolist()}
    rest = [i for i, row in enumerate(data[0].tolist()) if tuple(row) not in rows]
    assert len(rest) == 300
    assert found.kl < certify(trained, data, prior, **QUICK).kl
    assert "half" in found.prior_origin
    assert found.valid


def test_what_a_half_returns_is_taken_and_buffers_of_the_trained_network_are_not(data):
    start = nn.Sequential(nn.Linear(4, 2))
    start.register_buffer("scale", torch.ones(1))
    prior = Prior.of(start, "random initialisation")
    model = fit(deepcopy(start), data)
    model.scale.mul_(2)  # what it learned from all samples
    other = fit(deepcopy(start), data, steps=10)
    new, rest = half_prior(prior, model, data, lambda network, half: other, seed=0)
    assert torch.equal(new.center["0.weight"], other[0].weight)
    (reason,) = certify(model, rest, new, **QUICK).reasons
    assert "buffer `scale`" in reason


def test_a_half_needs_a_start(trained, data):
    with pytest.raises(ValueError, match=r"`half_fn` .*`center`"):
        certify(trained, data, half_fn=fit, **QUICK)


def test_beginnings_of_names_are_a_sequence():
    with pytest.raises(ValueError, match=r"`fresh` .*got 'head'"):
        Prior(fresh="head")


def test_a_prior_is_shown_without_its_tensors():
    shown = repr(Prior.of(nn.Linear(300, 300), origin="random initialisation"))
    assert "random initialisation" in shown
    assert "tensor" not in shown
