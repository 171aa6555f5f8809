"""Labels drawn by a sample's number rather than by its place in a batch: the same on one process as on many."""

import math
from collections.abc import Iterator

import torch
from torch import Generator, Tensor

from lightning_taskinfo.functional.likelihood import Bernoulli, Categorical, Gaussian, Likelihood


class NumberedDraws:
    r"""A likelihood whose labels for sample ``first + n`` of ``total`` do not depend on who measures it.

    All random numbers of a measurement come from ``seed``, one row for each of the ``total``
    samples, and a process uses the rows of its own samples: a categorical label is the inverse of
    the cumulative distribution at a uniform number, a Gaussian one that of the normal distribution.
    One instance serves one measurement, whose samples come in their order, ``mc_samples`` draws a
    chunk. A likelihood of another kind draws by itself, from a generator seeded with the chunk's
    first sample: as good, but other labels for another number of processes.

    Args:
        likelihood: What the outputs mean.
        seed: Seed of all draws of the measurement.
        first: Number of the first sample of this process.
        total: Samples of all processes together.
        mc_samples: Number of labels drawn for each sample.

    Example:
        >>> outputs = torch.zeros(4, 3)
        >>> whole = NumberedDraws(Categorical(), seed=0, total=4).sample(outputs)
        >>> second_half = NumberedDraws(Categorical(), seed=0, first=2, total=4).sample(outputs[2:])
        >>> torch.equal(whole[2:], second_half)
        True
    """

    def __init__(
        self, likelihood: Likelihood, *, seed: int, total: int, first: int = 0, mc_samples: int = 1
    ) -> None:
        self.likelihood = likelihood
        self.seed = seed
        self.total = total
        self.mc_samples = mc_samples
        self.position = first
        self.draw = 0
        self._uniform: Tensor | None = None  # [mc_samples, total, ...]

    def sample(self, outputs: Tensor, generator: Generator | None = None) -> Tensor:
        u = self._next(outputs)
        if isinstance(self.likelihood, Categorical):
            below = outputs.double().softmax(-1).cumsum(-1) < u[..., :1]
            return below.sum(-1).clamp(max=outputs.shape[-1] - 1)
        if isinstance(self.likelihood, Bernoulli):
            return (u < outputs.sigmoid()).to(outputs.dtype)
        if isinstance(self.likelihood, Gaussian):
            normal = math.sqrt(2) * self.likelihood.std * torch.erfinv(2 * u - 1)
            return outputs + normal.to(outputs.dtype)
        seeded = Generator(outputs.device).manual_seed(int(u.flatten()[0].item() * 2**53))
        return self.likelihood.sample(outputs, seeded)

    def _next(self, outputs: Tensor) -> Tensor:
        """Return the uniform numbers of the next draw, ``[N, ..., C]`` in float64, strictly between 0 and 1."""
        if self._uniform is None:
            shape = (self.mc_samples, self.total, *outputs.shape[1:])
            if isinstance(self.likelihood, Categorical):
                shape = (*shape[:-1], 1)
            generator = Generator().manual_seed(self.seed)
            drawn = torch.rand(shape, generator=generator, dtype=torch.float64, device="cpu")
            self._uniform = drawn.clamp(min=2.0**-54)
        stop = self.position + len(outputs)
        # What fills a batch up draws something, too.
        rows = torch.arange(self.position, stop, device="cpu") % self.total
        u = self._uniform[self.draw, rows]
        self.draw += 1
        if self.draw == self.mc_samples:
            self.draw = 0
            self.position = stop
        return u.to(outputs.device)

    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.likelihood.log_prob(outputs, targets)

    def score(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.likelihood.score(outputs, targets)

    def roots(self, outputs: Tensor) -> Iterator[Tensor]:
        return self.likelihood.roots(outputs)

    def counted(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.likelihood.counted(outputs, targets)

    def check(self, outputs: Tensor, targets: Tensor | None) -> None:
        self.likelihood.check(outputs, targets)
