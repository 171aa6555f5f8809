"""Order and augmentation are drawn from (seed, epoch) alone, and leave the global generators as they were."""

import random

import numpy as np
import torch

from lightning_taskinfo.transfer.ready.data import ImageSamples
from lightning_taskinfo.transfer.sampling import Drawn, EpochSampler, reseed, stream_seed


def order(sampler):
    return [index for *_, index in sampler]


def test_an_epoch_visits_every_sample_once_in_an_order_of_its_own():
    sampler = EpochSampler(20, seed=0)
    first = order(sampler)
    again = order(sampler)  # the second pass of a loader that cycles
    sampler.set_epoch(1)
    second = order(sampler)
    assert sorted(first) == sorted(again) == sorted(second) == list(range(20))
    assert len({tuple(x) for x in (first, again, second)}) == 3


def test_a_resumed_sampler_continues_with_the_same_order():
    sampler, resumed = EpochSampler(20, seed=3), EpochSampler(20, seed=3)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        orders = [order(sampler), order(sampler)]
    resumed.set_epoch(2)
    assert [order(resumed), order(resumed)] == orders


def test_an_iterator_opened_before_its_epoch_is_set_follows_the_epoch():
    sampler = EpochSampler(20, seed=0)
    early = iter(sampler)
    sampler.set_epoch(5)
    again = EpochSampler(20, seed=0)
    again.set_epoch(5)
    assert [index for *_, index in early] == order(again)


class Noisy:
    """Samples that draw from every generator."""

    def __getitem__(self, row):
        return row + torch.randn(()) + np.random.randn() + random.random()  # noqa: NPY002


def drawn(*draws):
    return Drawn(Noisy(), np.arange(4), torch.stack, 7).__getitems__(draws)


def test_augmentation_is_drawn_from_seed_epoch_pass_and_index():
    reseed(1)
    found = [drawn(draw).item() for draw in [(3, 0, 2), (4, 0, 2), (3, 1, 2), (3, 0, 1)]]
    reseed(2)  # what the global generators hold plays no part
    assert drawn((3, 0, 2)).item() == found[0]
    assert len({*found}) == 4


def test_augmentation_leaves_the_global_generators_alone():
    reseed(1)
    expected = torch.rand(()), np.random.rand(), random.random()  # noqa: NPY002
    reseed(1)
    drawn((0, 0, 0))
    assert (torch.rand(()), np.random.rand(), random.random()) == expected  # noqa: NPY002


def test_images_come_in_batches_with_their_index():
    x, index = torch.arange(8, dtype=torch.uint8).reshape(2, 1, 2, 2), torch.tensor([10, 11])
    (images, labels), known = ImageSamples(x, torch.tensor([5, 6]), index).__getitems__([(0, 0, 1)])
    torch.testing.assert_close(images, x[[1]].float() / 255)
    assert (labels.tolist(), known.tolist()) == ([6], [11])
    inputs, known = ImageSamples(x, None, index).__getitems__([1, 0])
    torch.testing.assert_close(inputs, x[[1, 0]].float() / 255)
    assert known.tolist() == [11, 10]


def test_seeds_differ_by_every_part():
    assert len({stream_seed(a, b) for a in range(10) for b in range(10)}) == 100
