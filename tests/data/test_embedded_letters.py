"""The letters are letters: drawn where asked, from faces kept apart, and readable across faces."""

from pathlib import Path

import matplotlib
import numpy as np
import pytest
from matplotlib.ft2font import FT2Font
from sklearn.neighbors import KNeighborsClassifier

from lightning_taskinfo.data import embedded, load_letters
from lightning_taskinfo.data.embedded import LETTERS, TEST_FACES, TRAIN_FACES

STILL = {"rotation": 0, "scale": (0.7, 0.7), "shift": 0, "stroke": (0, 0), "noise": 0}


def drawn(jitter=None, *, train_size, test_size, **options):
    """Fewer letters, drawn in another way."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (jitter or {}).items():
            patch.setattr(embedded, name.upper(), value)
        patch.setattr(embedded, "COUNTS", (train_size, test_size))
        return load_letters(**options)


@pytest.fixture(scope="module")
def letters():
    return drawn(train_size=600, test_size=200)


def moments(image):
    """Total grey, centre (row, column) and box (height, width) of an image."""
    values = image[0] / 255.0
    rows, columns = (np.flatnonzero(values.sum(axis) > 0.5) for axis in (1, 0))
    box = (np.ptp(rows) + 1, np.ptp(columns) + 1)
    return values.sum(), (rows.mean(), columns.mean()), box


def test_faces_are_kept_apart_and_hold_every_letter():
    assert not set(TRAIN_FACES) & set(TEST_FACES)
    assert len({*TRAIN_FACES, *TEST_FACES}) == 22
    for face in (*TRAIN_FACES, *TEST_FACES):
        font = FT2Font(str(Path(matplotlib.get_data_path(), "fonts", "ttf", f"{face}.ttf")))
        assert {ord(letter) for letter in LETTERS} <= set(font.get_charmap()), face


def test_splits_are_even_over_the_classes(letters):
    assert np.bincount(letters.y_train).tolist() == [60] * 10
    assert np.bincount(letters.y_test).tolist() == [20] * 10
    assert not np.array_equal(letters.y_train, np.arange(600) % 10), "the classes come shuffled"


def test_the_seed_decides_everything(letters):
    again, other = (drawn(train_size=600, test_size=200, seed=seed) for seed in (0, 1))
    for key in ("x_train", "y_train", "x_test", "y_test"):
        assert np.array_equal(getattr(letters, key), getattr(again, key)), key
    assert not np.array_equal(letters.x_test, other.x_test)


def test_no_two_drawings_are_alike(letters):
    assert len(np.unique(letters.x_train.reshape(600, -1), axis=0)) == 600


def test_without_jitter_a_face_draws_a_letter_in_one_way():
    still = drawn(STILL, train_size=400, test_size=400)
    for x, y, faces in (
        (still.x_train, still.y_train, TRAIN_FACES),
        (still.x_test, still.y_test, TEST_FACES),
    ):
        for label in range(10):
            assert len(np.unique(x[y == label].reshape(40, -1), axis=0)) <= len(faces)


@pytest.mark.parametrize("size", [14, 28, 40])
def test_a_letter_lies_centred_in_a_box_of_its_scale(size):
    still = drawn(STILL, size=size, train_size=200, test_size=10)
    for image in still.x_train:
        _, centre, box = moments(image)
        assert abs(max(box) - 0.7 * size) <= 2  # one pixel at either end is covered in part
        assert np.abs(np.subtract(centre, (size - 1) / 2)).max() <= 1


def test_stands_upright_and_reads_from_left_to_right():
    still = drawn(STILL, train_size=400, test_size=10)
    for letter, heavier in {
        "F": np.s_[:14, :],
        "E": np.s_[:, :14],
        "C": np.s_[:, :14],
        "J": np.s_[14:, :],
    }.items():
        mean = still.x_train[still.y_train == LETTERS.index(letter), 0].mean(0)
        assert mean[heavier].sum() > 0.5 * mean.sum(), letter


@pytest.mark.parametrize(("stroke", "sign"), [(0.04, 1), (-0.02, -1)])
def test_stroke_thickens_and_thins(stroke, sign):
    jitter = {
        "rotation": 0,
        "scale": (0.7, 0.7),
        "shift": 0,
        "stroke": (stroke, stroke),
        "noise": 0,
    }
    grey = [drawn(j, train_size=100, test_size=10).x_train.astype(float) for j in (STILL, jitter)]
    assert (sign * (grey[1] - grey[0]).sum((1, 2, 3)) > 0).all()


def test_noise_has_the_given_standard_deviation():
    jitter = {"rotation": 0, "scale": (0.7, 0.7), "shift": 0, "stroke": (0, 0), "noise": 0.05}
    quiet, noisy = (
        drawn(j, train_size=100, test_size=10).x_train.astype(float) for j in (STILL, jitter)
    )
    grey = (quiet > 60) & (quiet < 195)  # far from the ends, where nothing is clipped
    deviation = (noisy - quiet)[grey] / 255
    assert abs(deviation.std() - 0.05) < 4 * 0.05 / np.sqrt(2 * grey.sum())


def test_rotation_and_shift_stay_within_their_bounds():
    shifted = {"rotation": 0, "scale": (0.5, 0.5), "shift": 0.1, "stroke": (0, 0), "noise": 0}
    centres = np.array(
        [moments(image)[1] for image in drawn(shifted, train_size=300, test_size=10).x_train]
    )
    assert np.abs(centres - 13.5).max() < 2.8 + 1  # 0.1 · 28, and a pixel covered in part
    assert (centres.min(0) < 11.5).all()
    assert (centres.max(0) > 15.5).all()
    turned = {"rotation": 90, "scale": (0.5, 0.5), "shift": 0, "stroke": (0, 0), "noise": 0}
    data = drawn(turned, train_size=300, test_size=10)
    heights, widths = np.array(
        [moments(x)[2] for x in data.x_train[data.y_train == LETTERS.index("I")]]
    ).T
    assert (heights > widths + 3).any()
    assert (widths > heights + 3).any()


def test_faces_never_seen_can_be_read(letters):
    """Nearest neighbours among 600 letters, no training: chance is 0.1."""
    neighbours = KNeighborsClassifier(3).fit(
        letters.x_train.reshape(600, -1) / 255.0, letters.y_train
    )
    assert neighbours.score(letters.x_test.reshape(200, -1) / 255.0, letters.y_test) > 0.6


def test_refuses_images_that_are_too_small():
    with pytest.raises(ValueError, match="`size` must be at least 8, got 7"):
        load_letters(size=7)
