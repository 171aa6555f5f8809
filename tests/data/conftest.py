import numpy as np
import pytest


@pytest.fixture
def arrays():
    """Small valid splits: 12 training and 10 test images of 3 channels, all different."""
    rng = np.random.default_rng(0)
    return {
        "x_train": rng.integers(0, 256, (12, 3, 8, 9), dtype=np.uint8),
        "y_train": np.arange(12) % 10,
        "x_test": rng.integers(0, 256, (10, 3, 8, 9), dtype=np.uint8),
        "y_test": np.arange(10),
    }
