"""Random numbers: seeds made of several numbers, and generators that are put back afterwards."""

import random
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial

import torch


def seed_from(*parts: int) -> int:
    """Return a seed that belongs to these whole numbers alone; it is the same in every process.

    Example:
        >>> seed_from(0, 1) == seed_from(0, 1), seed_from(0, 1) == seed_from(1, 0)
        (True, False)
    """
    return hash(parts) % 2**63


def seed_everything(seed: int) -> None:
    """Seed torch's, numpy's and Python's global generators, on every device."""
    if _has_accelerator():
        torch.manual_seed(seed)
    else:  # `torch.manual_seed` would queue every call, with its traceback, for a device that never comes
        torch.default_generator.manual_seed(seed)
    random.seed(seed)
    if numpy := sys.modules.get("numpy"):  # not loaded: nobody draws from it
        numpy.random.seed(seed % 2**32)


def _has_accelerator() -> bool:
    """Whether there is a device beside the processor; unlike `is_available`, this leaves CUDA to forked processes."""
    kind = torch.accelerator.current_accelerator()
    return kind is not None and torch.get_device_module(kind).device_count() > 0


@contextmanager
def own_randomness(seed: int, device: torch.device | None = None) -> Iterator[None]:
    """Seed torch's global generator for a while, that of a device too, and put all of them back afterwards."""
    restore = keep_random_states([] if device is None else [device])
    try:
        torch.default_generator.manual_seed(seed)
        if device is not None and device.type not in ("cpu", "meta"):
            torch.get_device_module(device).manual_seed(seed)
        yield
    finally:
        restore()


def keep_random_states(devices: Iterable[torch.device] = ()) -> Callable[[], None]:
    """Return a function that puts the global generators back to where they are now.

    Args:
        devices: Whose generators of torch to keep, beside those of the processor.
    """
    kept = [
        partial(torch.set_rng_state, torch.get_rng_state()),
        partial(random.setstate, random.getstate()),
    ]
    if numpy := sys.modules.get("numpy"):
        kept.append(partial(numpy.random.set_state, numpy.random.get_state()))
    for device in devices:
        if device.type not in ("cpu", "meta"):
            module = torch.get_device_module(device)
            index = () if device.type == "mps" else (device,)  # there is one mps only
            state = module.get_rng_state(*index)
            kept.append(partial(module.set_rng_state, state, *index))

    def restore() -> None:
        for put_back in kept:
            put_back()

    return restore
