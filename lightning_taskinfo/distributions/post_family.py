"""The Gaussians of every width around one network, and the losses that their draws have."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import methodcaller
from typing import Any

import torch
from torch import Generator, Tensor, nn

from lightning_taskinfo._nested import take
from lightning_taskinfo._observe import ParamDict, holding
from lightning_taskinfo._random import seed_from
from lightning_taskinfo.distributions.gaussian import Curvature, turned
from lightning_taskinfo.functional.information import InformationTerms, terms_by_group

KEPT = 1 << 24  # bytes of noises
Draw = Callable[[str, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class PostFamily:
    r"""For each width of the pre-distribution, the best Gaussian post-distribution around the same weights.

    Attributes:
        curvature: :math:`h = N F` of the **sum** of the loss by name of the weight: its diagonal,
            or the eigenvalues and eigenvectors of its Kronecker factors.
        distances: :math:`\|\Delta\|^2` of the displacement :math:`\Delta = w - w_0` by name of the weight.
        beta: Weight of the KL beside the sum of the loss.
    """

    curvature: Curvature
    distances: Mapping[str, float]
    beta: float

    def terms(self, prior_stds: Sequence[float]) -> list[dict[str, InformationTerms]]:
        """Return the information in each weight for some widths of the pre-distribution."""
        values = {name: block.eigenvalues for name, block in self.curvature.items()}
        return terms_by_group(values, self.distances, prior_stds=prior_stds, beta=self.beta)

    def draw(self, prior_std: float) -> Draw:
        r"""Return the function that makes :math:`w + \Sigma^{1/2}\varepsilon` of a weight and its noise.

        It goes over each number as few times as it can: a network that does not fit into the
        processor's cache is as slow to read as to compute with.
        """
        gain = prior_std**2 / self.beta

        def drawn(name: str, weight: Tensor, noise: Tensor) -> Tensor:
            block = self.curvature[name]
            h = block.eigenvalues.view_as(weight)
            # As `post_variance`, in the precision of the noise.
            root = torch.add(h.new_ones(()), h, alpha=gain).to(noise.dtype).rsqrt_()
            if block.left is None and block.right is None:
                return torch.addcmul(weight, noise, root, value=prior_std, out=root)
            # Into the eigenvectors' basis and back: this root is symmetric, and so the same for any
            # choice of them.
            bases = take((block.left, block.right), methodcaller("to", noise))
            root.mul_(turned(noise, *take(bases, Tensor.t)))
            return turned(root, *bases).mul_(prior_std).add_(weight)

        return drawn


@torch.no_grad()
def losses_with_noise(
    model: nn.Module,
    loss: Callable[[], float],
    draw: Draw,
    noise: ParamDict,
) -> tuple[float, float]:
    r"""Losses of the network with weights :math:`w + \Sigma^{1/2}\varepsilon` and :math:`w - \Sigma^{1/2}\varepsilon`.

    Both are draws from the same Gaussian, and what is linear in the noise cancels in their mean. The
    same noise for several Gaussians makes their losses comparable (common random numbers).

    Args:
        model: The network; its own weights come back, bit for bit.
        loss: Returns the loss under the network's present weights.
        draw: Returns :math:`w + \Sigma^{1/2}\varepsilon` from the name of a weight, the weight and its
            :math:`\varepsilon`.
        noise: Standard normal :math:`\varepsilon` by name, from :func:`standard_noise`; the dict is
            emptied on the way, as a noise is as large as the network. Other weights keep their values.
    """
    parameters = dict(model.named_parameters())
    weights = {name: parameters[name] for name in noise}
    drawn = {name: draw(name, weight, noise.pop(name)) for name, weight in weights.items()}

    def loss_of_drawn() -> float:
        rounded = {name: part.to(weights[name].dtype) for name, part in drawn.items()}
        with holding(weights, rounded):
            return loss()

    plus = loss_of_drawn()
    for name, part in drawn.items():
        part.lerp_(weights[name].to(part.dtype), 2.0)  # to the other side of the weight
    return plus, loss_of_drawn()


def standard_noise(weights: Mapping[str, Tensor], seed: int) -> ParamDict:
    """Return standard normal noise for each of the weights, float32 at least, on their device.

    Args:
        weights: Tensors by name, whose shapes and devices count.
        seed: The same seed gives the same noise.

    Example:
        >>> first, again = (standard_noise({"w": torch.zeros(2, 3)}, seed=0) for _ in range(2))
        >>> first["w"].shape, torch.equal(first["w"], again["w"])
        (torch.Size([2, 3]), True)
    """
    generators: dict[torch.device, Generator] = {}
    noise = {}
    for name, w in weights.items():
        generator = generators.setdefault(w.device, Generator(w.device).manual_seed(seed))
        noise[name] = torch.randn(
            w.shape,
            generator=generator,
            dtype=torch.promote_types(w.dtype, torch.float32),
            device=w.device,
        )
    return noise


class Noises:
    """Numbered noises for the same weights, asked for again and again.

    Drawing one takes longer than running the network on some samples. So noises of small networks are kept, 16 MB of
    them.

    Args:
        seed: Seed of all of them.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.kept: dict[int, ParamDict] = {}
        self._kinds: dict[str, Any] = {}

    def noise(self, number: int, weights: Mapping[str, Tensor]) -> ParamDict:
        """Return :func:`standard_noise` of a number in a dict of its own; its tensors are not to be written to."""
        kinds = {name: (w.shape, w.dtype, w.device) for name, w in weights.items()}
        if kinds != self._kinds:  # other weights than before
            self._kinds = kinds
            self.kept.clear()
        if number not in self.kept:
            drawn = standard_noise(weights, seed_from(self.seed, number))
            size = sum(part.nbytes for part in drawn.values())
            if size * (len(self.kept) + 1) > KEPT:
                return drawn
            self.kept[number] = drawn
        return dict(self.kept[number])
