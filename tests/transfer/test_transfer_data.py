"""The data module: what it takes, what it gives out, and what it refuses."""

import io
import pickle

import numpy as np
import pytest
import torch

from lightning_taskinfo.data import save_npz
from lightning_taskinfo.transfer import TransferDataModule
from lightning_taskinfo.transfer.ready.data import fit_images
from tests.transfer.tiny import tiny_data, tiny_task


def ready(**changes):
    data = tiny_data(**changes)
    data.setup()
    return data


def first_batch(data):
    loaders = data.train_dataloader()
    return data.on_before_batch_transfer(
        {name: next(iter(loader)) for name, loader in loaders.items()}, 0
    )


def test_batches_hold_labelled_and_unlabelled_samples_with_their_index():
    data = ready().use("fine_tune")
    batch = first_batch(data)
    x, y = batch["labeled"]
    assert x.shape == (9, 1, 8, 8)
    assert batch["unlabeled"].shape == (16, 1, 8, 8)
    images, classes = data.tasks()["target"].train().tensors
    torch.testing.assert_close(x, images[batch["labeled_index"]])
    torch.testing.assert_close(batch["unlabeled"], images[batch["unlabeled_index"]])
    assert torch.equal(y, classes[batch["labeled_index"]])


def test_pretraining_has_source_labels_beside_target_inputs():
    data = ready().use("pretrain")
    batch = first_batch(data)
    source, target = data.tasks().values()
    images, _ = source.train().tensors
    torch.testing.assert_close(batch["labeled"][0], images[batch["labeled_index"]])
    images, _ = target.train().tensors
    torch.testing.assert_close(batch["unlabeled"], images[batch["unlabeled_index"]])
    for stage, task in (("pretrain", source), ("fine_tune", target)):
        (_, y), _ = next(iter(data.use(stage).test_dataloader()))
        assert y.tolist() == task.y_test.tolist()


def test_the_unlabelled_samples_do_not_know_their_labels():
    """No tensor of integers as long as the labels is in what the loader holds, however it is reached."""
    data = ready()
    held = io.BytesIO()
    torch.save(vars(data.unlabeled), held)
    held.seek(0)
    tensors = [
        value
        for value in torch.load(held, weights_only=True).values()
        if isinstance(value, torch.Tensor)
    ]
    assert data.unlabeled.y is None
    assert {tuple(t.shape) for t in tensors} == {(90, 1, 8, 8), (90,)}
    (index,) = (t for t in tensors if t.ndim == 1)
    assert len(index.unique()) == 90  # rows, not classes


def test_the_unlabelled_inputs_do_not_depend_on_the_number_of_labels():
    few, many = (ready(labels=n, max_unlabeled=30).unlabeled for n in (3, 30))
    assert torch.equal(few.x, many.x)
    assert len(few) == 30


def test_all_ways_to_name_a_task_give_the_same_data(tmp_path, monkeypatch):
    monkeypatch.setenv("TASKINFO_DATA_DIR", str(tmp_path))
    task = tiny_task(1)
    save_npz(tmp_path / "mine.npz", task)
    modules = [ready(target=target) for target in (task, tmp_path / "mine.npz", "mine")]
    for module in modules[1:]:
        assert torch.equal(module.labeled.x, modules[0].labeled.x)
        assert torch.equal(module.labeled.y, modules[0].labeled.y)
        assert torch.equal(module.target_test.x, modules[0].target_test.x)


def test_sizes_channels_and_classes_may_differ():
    target = tiny_task(1, classes=5, size=12, channels=3)
    data = ready(target=target, labels=10)
    assert data.labeled.x.shape[1:] == data.source.x.shape[1:] == (1, 8, 8)
    assert (data.source_classes, data.target_classes) == (3, 5)
    assert ready(target=target, labels=10, image_shape=(3, 16, 16)).source.x.shape[1:] == (
        3,
        16,
        16,
    )


def test_one_channel_is_replicated_and_several_are_averaged(monkeypatch):
    monkeypatch.setattr("lightning_taskinfo.transfer.ready.data.CHUNK", 3)
    grey = torch.randint(
        256, (4, 1, 6, 6), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )
    colour = fit_images(grey, (3, 6, 6))
    assert torch.equal(colour[:, 2:], grey)
    assert torch.equal(fit_images(colour, (1, 6, 6)), grey)
    halves = torch.nn.functional.avg_pool2d(grey.float(), 2)
    assert (
        fit_images(grey, (1, 3, 3)).float().sub(halves).abs().max() < 40
    )  # a smooth filter, not a sample
    assert fit_images(torch.full_like(grey, 7), (1, 9, 5)).unique().tolist() == [7]


def test_own_unlabelled_inputs():
    extra = np.full((25, 8, 8), 255, dtype=np.uint8)
    data = ready(unlabeled=extra)
    assert len(data.unlabeled) == 25
    assert data.unlabeled.index.tolist() == list(range(90, 115))
    assert data.num_indices == 115


def test_own_unlabelled_inputs_are_limited_and_may_have_another_shape():
    extra = np.random.default_rng(0).integers(0, 256, (25, 12, 12, 3), dtype=np.uint8)
    data = ready(unlabeled=extra, max_unlabeled=10)
    assert data.unlabeled.x.shape == (10, 1, 8, 8)
    assert min(data.unlabeled.index.tolist()) >= 90
    assert data.num_indices == 115
    assert data.describe() != ready(unlabeled=255 - extra, max_unlabeled=10).describe()


def test_a_module_travels_to_other_processes():
    assert len(pickle.loads(pickle.dumps(tiny_data())).arguments) == len(tiny_data().arguments)


def test_the_description_knows_the_data_by_what_they_hold():
    data, other = tiny_data(), tiny_data(target=tiny_task(2, name="target"))
    assert data.describe() == tiny_data(labels=30, seed=5).describe()
    assert data.describe()["sha256"] != other.describe()["sha256"]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"batch_size": 1}, ValueError, "`batch_size` must be at least 2, got 1"),
        (
            {"labels": 1000},
            ValueError,
            "`labels` must be between 1 and the 90 training samples there are, got 1000",
        ),
        ({"labels": [3, 4]}, TypeError, r"`labels` must be a whole number, got \[3, 4\]"),
        ({"labels": -5}, ValueError, "`labels` must be at least 1, got -5"),
        (
            {"labels": 2},
            ValueError,
            "`labels` must give every one of the 3 classes at least one label",
        ),
        (
            {"target": "nowhere"},
            ValueError,
            "A dataset must be digits or letters .*'nowhere' was not",
        ),
        ({"target": 3}, TypeError, "`target` must be an ArrayData, or .* got int"),
        ({"source": ([], [])}, TypeError, "`source` must be an ArrayData, or .* got tuple"),
        (
            {"unlabeled": np.zeros((5, 8, 8))},
            ValueError,
            "`unlabeled` must be uint8, .* got float64",
        ),
        (
            {"unlabeled": np.zeros((5, 64), dtype=np.uint8)},
            ValueError,
            r"`unlabeled` must have the shape .* got \(5, 64\)",
        ),
        (
            {"target": tiny_task(1, channels=2), "image_shape": (3, 8, 8)},
            ValueError,
            "2 channels or 1, got 3",
        ),
    ],
)
def test_bad_input(arguments, error, message):
    with pytest.raises(error, match=message):
        ready(**arguments)


def test_unknown_stage():
    with pytest.raises(
        ValueError, match="`stage` must be one of pretrain, fine_tune, got 'scratch'"
    ):
        TransferDataModule().use("scratch")
