"""The default probe of task embeddings: a small network, trained once on the embedded digits and letters."""

import hashlib
import json

import numpy as np
import torch
from torch import Generator, Tensor, nn
from torch.nn.functional import cross_entropy, interpolate

from lightning_taskinfo._files import atomic_write
from lightning_taskinfo._random import own_randomness
from lightning_taskinfo._ranges import check_counts
from lightning_taskinfo._warn import warn
from lightning_taskinfo.data.pairs import cache_dir, load_dataset

VERSION = 1  # part of the cache file's name: raise it when the network or its training changes
SIDE = 28


class SmallProbe(nn.Module):
    """Three convolutions and a hidden layer, for images of any size: they are made grey and 28×28 first.

    Args:
        num_outputs: Outputs of the head.
    """

    def __init__(self, num_outputs: int = 20) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 16, 5, 2, 2), nn.ReLU(),  # 14×14
            nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU(),  # 7×7
            nn.Conv2d(32, 48, 3, 2, 1), nn.ReLU(),  # 4×4
            nn.Flatten(), nn.Linear(48 * 16, 64), nn.ReLU(),
        )  # fmt: skip
        self.head = nn.Linear(64, num_outputs)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits ``[N, C]`` of images ``[N, channels, H, W]`` with values in ``[0, 1]``."""
        if images.dim() != 4:
            raise ValueError(
                f"The default probe takes images [N, channels, height, width], got {list(images.shape)}; "
                "set `probe` to a network for your inputs."
            )
        grey = images.mean(1, keepdim=True)
        if grey.shape[-2:] != (SIDE, SIDE):
            grey = interpolate(grey, (SIDE, SIDE), mode="bilinear", antialias=True)
        return self.head(self.body(grey))


def default_probe(*, epochs: int = 4, seed: int = 0) -> SmallProbe:
    """Return the small probe, trained to tell the 20 classes of the embedded digits and letters apart.

    Trained at the first call, in seconds and with one thread, then read from the folder of cached
    data: the same weights every time. A file that cannot be read is made anew, and a folder that
    cannot be written to costs a warning.

    Args:
        epochs: Passes over the 8,000 training images.
        seed: Seed of the initial weights and of the order of the images.

    Raises:
        ValueError: If ``epochs`` is not positive.
    """
    check_counts(epochs=epochs)
    key = json.dumps([VERSION, epochs, seed])
    path = cache_dir() / f"probe-{hashlib.sha256(key.encode()).hexdigest()[:16]}.npz"
    with own_randomness(seed):  # its first weights are drawn, and replaced
        probe = SmallProbe()
    try:
        with path.open("rb") as file:  # numpy leaves a broken file open
            arrays = np.load(file, allow_pickle=False)
            probe.load_state_dict(
                {name: torch.from_numpy(arrays[name]) for name in probe.state_dict()}
            )
    except Exception:  # not there, not readable, or damaged: zip, numpy and torch each have words of their own for it
        _train(probe, epochs, seed)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with atomic_write(path) as file:
                np.savez(
                    file, **{name: value.numpy() for name, value in probe.state_dict().items()}
                )
        except OSError as error:
            warn(f"The probe is not cached: {error}")
    return probe.eval()


def _train(probe: SmallProbe, epochs: int, seed: int) -> None:
    """Adam on both embedded datasets; deterministic, and the global random state stays as it is."""
    generator, threads = Generator().manual_seed(seed), torch.get_num_threads()
    images, labels = _images_of_all_classes()
    _initialise(probe, generator)
    optimizer = torch.optim.Adam(probe.parameters(), lr=2e-3)
    torch.set_num_threads(1)  # sums are split over threads, so their number shows in the last bits
    try:
        with torch.inference_mode(False), torch.enable_grad():
            for _ in range(epochs):
                for batch in torch.randperm(len(images), generator=generator).split(64):
                    optimizer.zero_grad()
                    cross_entropy(probe(images[batch]), labels[batch]).backward()
                    optimizer.step()
    finally:
        torch.set_num_threads(threads)


def _images_of_all_classes() -> tuple[Tensor, Tensor]:
    """Digits as classes 0 to 9, letters as 10 to 19."""
    digits, y = load_dataset("digits").train().tensors
    letters, z = load_dataset("letters").train().tensors
    return torch.cat([digits, letters]), torch.cat([y, z + 10])


def _initialise(probe: SmallProbe, generator: Generator) -> None:
    for parameter in probe.parameters():
        if parameter.ndim > 1:
            nn.init.kaiming_normal_(parameter, nonlinearity="relu", generator=generator)
        else:
            nn.init.zeros_(parameter)
