"""The reference network: trained once, the same every time, good at what it was trained on."""

import pytest
import torch

from lightning_taskinfo import Task2Vec
from lightning_taskinfo.data.names import cache_dir, load_dataset
from lightning_taskinfo.tasks import ready as module
from lightning_taskinfo.tasks.ready import ReferenceNetwork, reference_network


@pytest.fixture(scope="module")
def network():
    return reference_network(epochs=1)


@pytest.fixture
def few_images(monkeypatch):
    """Training on 200 images instead of 8,000."""
    images, labels = module._images_of_all_classes()
    monkeypatch.setattr(module, "_images_of_all_classes", lambda: (images[::40], labels[::40]))


def test_tells_digits_and_letters_apart(network):
    for name, first in (("digits", 0), ("letters", 10)):
        images, labels = load_dataset(name).test().tensors
        with torch.no_grad():
            accuracy = (network(images).argmax(1) == labels + first).float().mean()
        assert accuracy > 0.75  # a twentieth by chance


def test_takes_images_of_any_size_and_colour(network):
    g = torch.Generator().manual_seed(0)
    colours = torch.rand(2, 3, 28, 28, generator=g)
    assert torch.allclose(network(colours), network(colours.mean(1, keepdim=True)), atol=1e-5)
    assert network(torch.rand(2, 3, 32, 40, generator=g)).shape == (2, 20)
    assert network(torch.rand(2, 1, 8, 8, generator=g)).shape == (2, 20)


def test_is_read_from_the_cache_and_leaves_the_random_state_alone(network, monkeypatch):
    monkeypatch.setattr(module, "_train", lambda *_: pytest.fail("trained again"))
    state = torch.get_rng_state()
    again = reference_network(epochs=1)
    assert torch.equal(torch.get_rng_state(), state)
    assert not again.training
    for name, value in again.state_dict().items():
        assert torch.equal(value, network.state_dict()[name])


@pytest.mark.usefixtures("few_images")
def test_training_repeats_itself_and_depends_on_the_seed(tmp_path, monkeypatch):
    weights = []
    for folder, seed in (("a", 0), ("b", 0), ("c", 1)):
        monkeypatch.setenv("TASKINFO_CACHE_DIR", str(tmp_path / folder))
        torch.manual_seed(len(weights))
        weights.append(reference_network(epochs=2, seed=seed).head.weight)
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


@pytest.mark.usefixtures("few_images")
@pytest.mark.parametrize("damage", ["cut", "text", "shape"])
def test_a_damaged_cache_is_made_anew(tmp_path, monkeypatch, damage):
    monkeypatch.setenv("TASKINFO_CACHE_DIR", str(tmp_path))
    before = reference_network(epochs=1).state_dict()
    (path,) = cache_dir().glob("probe-*.pt")
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:1000])
    elif damage == "text":
        path.write_text("not an archive")
    else:
        torch.save({name: value[:1] for name, value in before.items()}, path)
    after = reference_network(epochs=1).state_dict()
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert set(torch.load(path, weights_only=True)) == set(before)


@pytest.mark.usefixtures("few_images")
def test_a_folder_that_cannot_be_written_costs_a_warning(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("TASKINFO_CACHE_DIR", str(tmp_path / "file"))
    monkeypatch.setattr(module, "load_dataset", lambda _: pytest.fail("not needed"))
    with pytest.warns(UserWarning, match="The reference network is not cached"):
        assert isinstance(reference_network(epochs=1), ReferenceNetwork)


def test_inputs_that_are_no_images_need_a_network_of_their_own(network):
    with pytest.raises(ValueError, match=r"takes images .*, got \[3, 10\]; set `network`"):
        network(torch.ones(3, 10))


def test_refuses_no_epochs():
    with pytest.raises(ValueError, match="`epochs` must be at least 1, got 0"):
        reference_network(epochs=0)


def test_the_norm_grows_with_the_number_of_classes(network):
    """A controlled family on real data: the first 2, 5 and 10 digits."""
    embedder = Task2Vec(network, max_samples=200)
    (images, labels), (x_test, y_test) = (
        split.tensors for split in (load_dataset("digits").train(), load_dataset("digits").test())
    )
    images, labels = images[:1500], labels[:1500]
    embeddings = [
        embedder.embed(
            (images[labels < c], labels[labels < c]),
            name=f"{c}",
            test=(x_test[y_test < c], y_test[y_test < c]),
        )
        for c in (2, 5, 10)
    ]
    norms, errors = [e.norm for e in embeddings], [e.test_error for e in embeddings]
    assert norms == sorted(norms)
    assert errors == sorted(errors)
