"""The data module: what it takes, what it gives out, and what it refuses."""

import io
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from lightning_taskinfo.data import save_npz
from lightning_taskinfo.transfer import TransferDataModule
from lightning_taskinfo.transfer.ready.data import fit_images
from tests.transfer.tiny import tiny_data, tiny_task

X = torch.zeros(1, 8, 8)


def pair(value, shape=(9, 1, 8, 8)):
    """A training and a test set of images of one value."""
    return (TensorDataset(torch.full(shape, float(value)), torch.arange(9) % 3),) * 2


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
    task = data.tasks()[1].train
    torch.testing.assert_close(x, task.x[batch["labeled_index"]].float() / 255)
    torch.testing.assert_close(batch["unlabeled"], task.x[batch["unlabeled_index"]].float() / 255)
    assert torch.equal(y, task.y[batch["labeled_index"]])


def test_pretraining_has_source_labels_beside_target_inputs():
    data = ready().use("pretrain")
    batch = first_batch(data)
    source, target = data.tasks()
    torch.testing.assert_close(
        batch["labeled"][0], source.train.x[batch["labeled_index"]].float() / 255
    )
    torch.testing.assert_close(
        batch["unlabeled"], target.train.x[batch["unlabeled_index"]].float() / 255
    )
    _, y = data.on_before_batch_transfer(next(iter(data.val_dataloader())), 0)
    assert torch.equal(y, source.test.y)
    data.use("fine_tune")
    assert torch.equal(next(iter(data.test_dataloader()))[0][1], target.test.y)
    assert len(next(iter(data.val_dataloader()))[0][1]) == 12


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
    assert {tuple(t.shape) for t in tensors} == {(78, 1, 8, 8), (78,)}
    (index,) = (t for t in tensors if t.ndim == 1)
    assert len(index.unique()) == 78  # rows, not classes


def test_the_unlabelled_inputs_do_not_depend_on_the_number_of_labels():
    few, many = (ready(labels=n, max_unlabeled=30).unlabeled for n in (3, 30))
    assert torch.equal(few.x, many.x)
    assert len(few) == 30


def test_the_validation_samples_are_in_no_training_part():
    data = ready()
    assert not set(data.unlabeled.index.tolist()) & set(data.split.validation.tolist())


def test_all_ways_to_name_a_task_give_the_same_data(tmp_path):
    task = tiny_task(1)
    save_npz(tmp_path / "mine.npz", task)
    pair = tuple(TensorDataset(torch.from_numpy(x), torch.from_numpy(y)) for x, y in
                 ((task.x_train, task.y_train), (task.x_test, task.y_test)))  # fmt: skip
    modules = [
        ready(target=target, data_dir=tmp_path)
        for target in (task, tmp_path / "mine.npz", "mine", pair)
    ]
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


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int64, None])
def test_whole_numbers_from_0_to_255_are_bytes_wherever_they_are(dtype):
    numbers = np.random.default_rng(0).integers(0, 256, (9, 1, 8, 8))
    images = numbers.tolist() if dtype is None else numbers.astype(dtype)
    part = list(zip(images, [0, 1, 2] * 3, strict=True))
    data = ready(source=(part, part), unlabeled=images)
    for samples in (data.source, data.source_test, data.unlabeled):
        assert samples.x.dtype == torch.uint8
        assert samples.x.tolist() == numbers.tolist()
    assert (
        data.describe()["unlabeled"]
        == ready(unlabeled=numbers.astype(np.uint8)).describe()["unlabeled"]
    )


@pytest.mark.parametrize("kind", [bool, int])
def test_drawings_in_black_and_white_stay_between_0_and_1(kind):
    images = (np.random.default_rng(0).random((9, 8, 8)) > 0.5).astype(kind)
    x = ready(unlabeled=images).unlabeled.x
    assert x.dtype == torch.float32
    assert x.unique().tolist() == [0.0, 1.0]


def test_channels_may_be_last_or_missing_wherever_images_come_from():
    images = np.random.default_rng(0).integers(0, 256, (9, 3, 8, 12), dtype=np.uint8)
    for given, channels in (
        (images, 3),
        (np.moveaxis(images, 1, -1), 3),
        (images[:, 0], 1),
        (images[:, 0, ..., None], 1),
    ):
        part = list(zip(given, [0, 1, 2] * 3, strict=True))
        data = ready(
            source=(part, part), target=(part, part), labels=3, validation=0, unlabeled=given
        )
        for samples in (data.source, data.source_test, data.unlabeled, data.target_test):
            assert np.array_equal(samples.x.numpy(), images[:, :channels])


def test_own_unlabelled_inputs_are_limited_and_floats_as_the_others_are():
    data = ready(unlabeled=np.random.default_rng(0).random((25, 1, 8, 8)), max_unlabeled=10)
    assert len(data.unlabeled) == 10
    assert first_batch(data)["unlabeled"].dtype == torch.float32
    assert min(data.unlabeled.index.tolist()) >= 90
    assert data.num_indices == 115


def test_a_settled_module_reads_datasets_once_and_paths_from_the_root(tmp_path, monkeypatch):
    save_npz(tmp_path / "mine.npz", tiny_task(1))
    monkeypatch.chdir(tmp_path)
    reads = []

    class Counted(TensorDataset):
        def __getitem__(self, index):
            reads.append(index)
            return super().__getitem__(index)

    task = tiny_task(0)
    pair = (
        Counted(torch.from_numpy(task.x_train), torch.from_numpy(task.y_train)),
        Counted(torch.from_numpy(task.x_test), torch.from_numpy(task.y_test)),
    )
    settled = tiny_data(source=pair, target="mine.npz", data_dir=".").settled()
    count = len(reads)
    monkeypatch.chdir("/")
    settled.setup()
    assert len(reads) == count == 150
    assert torch.equal(settled.source.x, torch.from_numpy(task.x_train))
    assert settled.arguments["data_dir"] == str(tmp_path)


def test_a_module_travels_to_other_processes():
    assert len(pickle.loads(pickle.dumps(tiny_data())).arguments) == len(tiny_data().arguments)


def test_the_description_knows_the_data_by_what_they_hold():
    data, other = tiny_data(), tiny_data(target=tiny_task(2, name="target"))
    assert data.describe() == tiny_data(labels=30, seed=5).describe()
    assert data.describe()["target"]["sha256"] != other.describe()["target"]["sha256"]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"batch_size": 1}, ValueError, "`batch_size` must be at least 2, got 1"),
        (
            {"labels": 1000},
            ValueError,
            "`labels` must be between 0 and 78, the samples beside 12 others, got 1000",
        ),
        (
            {"labels": 10.0},
            TypeError,
            "`labels` must be a whole number or a sequence of whole numbers, got 10.0",
        ),
        (
            {"validation": "9"},
            TypeError,
            "`validation` must be a whole number or a sequence .*, got '9'",
        ),
        ({"labels": -5}, ValueError, "`labels` must be between 0 and 78, .* got -5"),
        ({"validation": -1}, ValueError, "`validation` must be between 0 and 90, .* got -1"),
        (
            {"source": (np.zeros((9, 8, 8)), np.zeros(9))},
            ValueError,
            r"`source` must be two datasets.* got a sample that is ndarray; arrays make an",
        ),
        ({"source": ([], [])}, ValueError, "`source` must hold images, .* non-empty"),
        (
            {"source": (pair(1)[0],) * 3},
            TypeError,
            "`source` must be an ArrayData, .* a pair of datasets, got tuple",
        ),
        (
            {"source": ([(X, 0), X],) * 2},
            ValueError,
            r"`source` must be two datasets.* of pairs \(image, class\)",
        ),
        (
            {"source": ([(X, 0, 1)],) * 2},
            ValueError,
            r"`source` must be two datasets.* of pairs \(image, class\)",
        ),
        (
            {"source": ([(X, 0), (X[..., 1:], 1)],) * 2},
            ValueError,
            r"`source` must hold images, all of one shape.* got \[1, 8, 8\] at entry 0 and \[1, 8, 7\]",
        ),
        (
            {"labels": 2},
            ValueError,
            "`labels` must give every one of the 3 classes at least one label",
        ),
        (
            {"target": "nowhere"},
            ValueError,
            "A dataset must be digits or letters .*'nowhere' was not found",
        ),
        (
            {"source": "digit"},
            ValueError,
            r"A dataset must be .*'digit' was not found .*at this path.*\.$",
        ),
        (
            {"target": "no/such/file.npz"},
            ValueError,
            "A dataset must be .*'no/such/file.npz' was not found",
        ),
        (
            {"source": "tests"},
            ValueError,
            "A dataset must be .*'tests' was not found at this path",
        ),
        ({"target": 3}, TypeError, "`target` must be an ArrayData, a name, .* got int"),
        ({"unlabeled": np.zeros(5)}, ValueError, r"`unlabeled` must have the shape .* got \(5,\)"),
        (
            {"unlabeled": np.zeros((5, 64))},
            ValueError,
            r"`unlabeled` must have the shape .* got \(5, 64\)",
        ),
        (
            {"unlabeled": Path("mine.npz")},
            ValueError,
            "`unlabeled` must hold images, all of one shape, got a PosixPath",
        ),
        ({"unlabeled": np.zeros((1, 8, 8))}, ValueError, r"with N at least 2, got \(1, 8, 8\)"),
        (
            {"unlabeled": "mine.npz"},
            ValueError,
            "`unlabeled` must hold images, all of one shape, got a str",
        ),
        (
            {"unlabeled": tiny_task(1)},
            ValueError,
            "`unlabeled` must hold images, all of one shape, got a ArrayData",
        ),
        (
            {"unlabeled": [[[1, 2]], [[1]]]},
            ValueError,
            "`unlabeled` must hold images, all of one shape, got a list",
        ),
        (
            {"unlabeled": pair(np.nan)[0]},
            ValueError,
            "`unlabeled` must hold images, .* got a TensorDataset",
        ),
        (
            {"unlabeled": np.full((9, 8, 8), np.inf)},
            ValueError,
            "`unlabeled` must be finite, got 576 values that are not",
        ),
        (
            {"source": pair(np.nan)},
            ValueError,
            "`source` must be finite, got 576 values that are not",
        ),
        (
            {"target": (pair(1)[0], pair(np.inf)[1])},
            ValueError,
            "`target` must be finite, got 576 values that are not",
        ),
        (
            {"source": pair(1, shape=(9, 64))},
            ValueError,
            r"`source` must have the shape \[N, C, H, W\], .* got \(9, 64\)",
        ),
        (
            {"target": (TensorDataset(torch.zeros(4, 1, 8, 8), torch.tensor([0, 1, -1, 0])),) * 2},
            ValueError,
            "`target` must have classes that count from 0, got -1",
        ),
        (
            {"target": (TensorDataset(torch.zeros(4, 1, 8, 8), torch.tensor([0, 1, 0.5, 0])),) * 2},
            ValueError,
            "`target` must be whole numbers, got float32 such as 0.0; number the classes from 0",
        ),
        (
            {"source": ([(torch.zeros(1, 8, 8), 0), (torch.zeros(1, 8, 8), 0, 1)],) * 2},
            ValueError,
            r"of pairs \(image, class\), got a sample that is tuple of Tensor, int, int; arrays make",
        ),
        (
            {"source": (TensorDataset(torch.zeros(4, 1, 8, 8), torch.eye(4)),) * 2},
            ValueError,
            "`source` must be whole numbers, got float32 such as 1.0",
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


@pytest.mark.parametrize("unlabeled", ["mine.npz", tiny_task(1)], ids=["path", "data"])
def test_what_only_stands_for_images_is_refused_when_given(unlabeled):
    with pytest.raises(ValueError, match="`unlabeled` must hold images, all of one shape"):
        tiny_data(unlabeled=unlabeled)


def test_unknown_stage():
    with pytest.raises(
        ValueError, match="`stage` must be 'pretrain' or 'fine_tune', got 'scratch'"
    ):
        TransferDataModule().use("scratch")
