r"""The sweep behind a structure function: from high to low :math:`\beta`, each from where the one before ended."""

import hashlib
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from lightning_taskinfo._batches import take
from lightning_taskinfo._files import read_tensors, write_tensors
from lightning_taskinfo._observe import ParamDict, observing
from lightning_taskinfo.tasks.training import (
    Samples,
    Training,
    expected_loss,
    initial_weights,
    train_noisy,
    train_plain,
)
from lightning_taskinfo.variational import add_weight_noise, noisy_weights, sampling, weight_kl

Center: TypeAlias = Literal["initial", "zero"] | Mapping[str, Tensor]
Row: TypeAlias = dict[str, float]
START = 0.3  # noise to begin with, as a share of the prior's: the full one shakes the means off their place


class Sweep:
    r"""A noisy network on its way through a list of :math:`\beta`, with what was measured so far.

    Args:
        model: The network at its start; becomes noisy, in place.
        samples: The task.
        centre: Mean of the pre-distribution by parameter name.
        prior_std: Its standard deviation.
        training: How to minimise.
        seed: Seed of batches and noise.
    """

    def __init__(
        self,
        model: nn.Module,
        samples: Samples,
        centre: ParamDict,
        *,
        prior_std: float,
        training: Training,
        seed: int,
    ) -> None:
        noise, std = stage_seed(seed, 0), START * prior_std
        self.model = add_weight_noise(
            model, std=std, prior_center=centre, prior_std=prior_std, seed=noise
        )
        self.samples, self.centre, self.training, self.seed = samples, centre, training, seed
        self.prior: Row = {}
        self.rows: list[Row] = []

    def begin(self) -> None:
        """Measure the pre-distribution itself, then train without noise."""
        start = {name: mean.detach().clone() for name, mean, _ in noisy_weights(self.model)}
        set_gaussian(self.model, self.centre, 1.0)
        self.prior = self._loss()
        set_gaussian(self.model, start, START)
        with sampling(self.model, enabled=False):
            train_plain(
                self.model,
                self.samples,
                no_penalty,
                training=self.training,
                seed=stage_seed(self.seed, 1),
            )

    def step(self, beta: float) -> None:
        r"""Minimise :math:`C_\beta` from where the network is, and measure.

        The first has the longest way to go, from plain weights to almost nothing: it is trained twice.
        """
        for turn in range(1 if self.rows else 2):
            seed = stage_seed(self.seed, 2, len(self.rows), turn)
            train_noisy(
                self.model,
                self.samples,
                lambda m: beta * weight_kl(m),
                training=self.training,
                seed=seed,
            )
        self.rows.append({"beta": beta, "kl": weight_kl(self.model).item(), **self._loss()})

    def save(self, path: Path) -> None:
        """Write network and rows, atomically."""
        write_tensors(
            path, {"prior": self.prior, "rows": self.rows, "model": self.model.state_dict()}
        )

    def load(self, path: Path) -> None:
        """Take up what :meth:`save` wrote.

        Raises:
            ValueError: If the file is damaged.
        """
        advice = "Delete it to begin the sweep again."
        kept = read_tensors(path, advice=advice)
        try:
            self.model.load_state_dict(kept["model"])
            self.prior = dict(kept["prior"])
            self.rows = list(kept["rows"])
        except (TypeError, ValueError, KeyError, AttributeError, RuntimeError) as error:
            raise ValueError(f"{path}: it holds something else than a sweep. {advice}") from error

    def _loss(self) -> Row:
        loss, error = expected_loss(self.model, self.samples, training=self.training)
        return {"loss": loss, "loss_error": error}


@torch.no_grad()
def set_gaussian(model: nn.Module, means: Mapping[str, Tensor], std: float) -> None:
    """Put means into noisy weights, and deviations that are ``std`` times the prior's."""
    for name, mean, noise in noisy_weights(model):
        mean.copy_(means[name])
        noise.log_variance.copy_((noise.prior_log_variance + 2 * math.log(std)).expand_as(mean))


def center_of(start: ParamDict, center: Center) -> ParamDict:
    """Return the mean of the pre-distribution by name; what a mapping lacks is refused where noise is added.

    Raises:
        ValueError: If ``prior_center`` is an unknown word.
    """
    if center == "initial":
        return start
    if center == "zero":
        return {name: torch.zeros_like(value) for name, value in start.items()}
    if isinstance(center, str):
        raise ValueError(
            f"`prior_center` must be 'initial', 'zero' or tensors by name, got {center!r}."
        )
    return dict(center)


def no_penalty(model: nn.Module) -> Tensor:
    """Return nothing to pay: plain training."""
    return next(model.parameters()).new_zeros(())


def stage_seed(*parts: int) -> int:
    """Return a seed that belongs to these numbers alone; that of a tuple of integers is the same in every process."""
    return hash(parts) % 2**63


@torch.no_grad()
def network_digest(model: nn.Module, inputs: Any) -> dict[str, str]:
    """Return what tells a network at its start from others: its weights, its modules, and what it makes of two samples.

    These answers are rounded, since another machine may go on with the folder.
    """
    with observing(model):
        answers = model(take(inputs, lambda x: x[:2])).double()
    return {
        "weights": digest(initial_weights(model).values()),
        "modules": repr(model),
        "answers": f"{answers.abs().mean():.2e}",
    }


def digest(tensors: Iterable[Tensor]) -> str:
    """Return a short fingerprint of shapes, types and values."""
    total = hashlib.sha256()
    for tensor in tensors:
        array: Any = tensor.detach().cpu().contiguous().numpy()
        total.update(f"{array.dtype} {array.shape}".encode())
        total.update(array.tobytes())
    return total.hexdigest()[:16]
