"""For the tests and the doctests of the package alike."""

import functools
import gc
import importlib.metadata
import os

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the processes that tests start
os.environ.setdefault("WANDB_MODE", "offline")  # W&B reads it once a process
# Every `Trainer` reads the entry points of all that is installed, which stay as they are: 8 ms each.
importlib.metadata.entry_points = functools.cache(importlib.metadata.entry_points)
gc.set_threshold(50_000, 20, 20)  # searches for garbage took a twentieth of the time
collect_ignore = ["tests/first_screen.py"]  # a script, for an environment without test tools


def pytest_collection_finish():
    """One thread of torch, and what was imported is left out of every search for garbage.

    It is a million objects that nobody frees. The process that only hands out tests to others collects none, and
    does not wait for torch either.
    """
    import torch

    torch.set_num_threads(1)  # one worker a core: small tensors gain nothing from two threads
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def _cache_of_the_session(tmp_path_factory):
    """Cached data of a test session stays in its own folder, which its processes share, not in the user's."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TASKINFO_CACHE_DIR", str(folder / "cache"))
        yield
