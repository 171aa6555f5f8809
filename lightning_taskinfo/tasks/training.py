r"""Minimise :math:`C_\beta` in a plain torch loop: without noise first, then with noisy weights.

Everything random comes from the seed that a call is given: batches and noise from generators of
their own, dropout from a global generator that is put back afterwards. The same seed gives the same
bits, alone or beside other work.
"""

import math
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Generator, Tensor, nn

from lightning_taskinfo._batches import sample_count, take
from lightning_taskinfo._files import digest
from lightning_taskinfo._observe import observing, trainable_parameters, weights_now
from lightning_taskinfo._random import own_randomness
from lightning_taskinfo._ranges import check_counts, check_not_negative, check_positive
from lightning_taskinfo.functional.likelihood import Likelihood
from lightning_taskinfo.variational import noisy_weights, sampling

ModelFn = Callable[[], nn.Module]
Penalty = Callable[[nn.Module], Tensor]
START = 0.3  # noise to begin with, as a share of the prior's: the full one shakes the means off their place


@dataclass(frozen=True)
class Training:
    r"""How one :math:`C_\beta` is minimised: Adam, its rates falling to zero along half a cosine.

    Args:
        pretrain_steps: Optimizer steps without noise, before the first :math:`\beta`.
        steps: Optimizer steps with noisy weights, for each :math:`\beta`.
        batch_size: Samples of one step.
        noises: Networks drawn in one step, each for all samples of the batch; more of them end
            nearer the minimum.
        learning_rate: Rate for weights and means.
        log_variance_learning_rate: Rate for the log-variances, which have further to go.
        draws: Networks drawn from :math:`Q` to estimate :math:`E_Q[L_D]` after the training.
        chunk_size: Samples that go through the network at a time where nothing is trained.

    Raises:
        ValueError: If a number of steps is negative, or another value not positive.
    """

    pretrain_steps: int = 400
    steps: int = 400
    batch_size: int = 128
    noises: int = 1
    learning_rate: float = 1e-2
    log_variance_learning_rate: float = 1e-1
    draws: int = 32
    chunk_size: int = 4096

    def __post_init__(self) -> None:
        check_not_negative(pretrain_steps=self.pretrain_steps)
        check_counts(
            steps=self.steps,
            batch_size=self.batch_size,
            noises=self.noises,
            chunk_size=self.chunk_size,
        )
        check_positive(
            learning_rate=self.learning_rate,
            log_variance_learning_rate=self.log_variance_learning_rate,
        )
        if self.draws < 2:
            raise ValueError(f"`draws` must be at least 2 for a standard error, got {self.draws}.")


@dataclass(frozen=True)
class TaskData:
    """All samples of a task and what its outputs mean.

    Args:
        inputs: ``N`` inputs: a tensor, or tuples and dicts of them.
        targets: Their targets, shape ``[N, ...]``.
        likelihood: What the outputs mean.
    """

    inputs: Any
    targets: Tensor
    likelihood: Likelihood

    def __len__(self) -> int:
        return sample_count(self.inputs)

    def check(self, model: nn.Module) -> None:
        """Raise a ``ValueError`` if outputs or targets do not fit the likelihood; the model is only observed."""
        with observing(model), torch.no_grad():
            outputs = model(take(self.inputs, lambda x: x[:2]))
        if not isinstance(outputs, Tensor):
            raise ValueError(
                f"The network must return a tensor of outputs, got {type(outputs).__name__}."
            )
        shape = (len(self.targets), *outputs.shape[1:])
        self.likelihood.check(outputs[:1].expand(shape), self.targets)

    def losses(self, model: nn.Module, index: Tensor | slice) -> Tensor:
        """Return the negative log-likelihood of the picked samples in nats, shape ``[B]``."""
        outputs = model(take(self.inputs, lambda x: x[index]))
        return -self.likelihood.log_prob(outputs, self.targets[index])


def build(model_fn: ModelFn, seed: int, *, argument: str = "model_fn") -> nn.Module:
    """Return a copy of what ``model_fn`` makes after ``torch.manual_seed(seed)``; torch's generator stays as it is."""
    if isinstance(model_fn, nn.Module):
        found = f"a {type(model_fn).__name__}, a network already"
        raise ValueError(f"`{argument}` must be a function that makes a network, got {found}.")
    with own_randomness(seed):
        model = model_fn()
    if not isinstance(model, nn.Module):
        raise ValueError(f"`{argument}` must return a network, got {type(model).__name__}.")
    return deepcopy(model)  # what is trained is not the caller's own


def train_plain(
    model: nn.Module,
    samples: TaskData,
    penalty: Penalty | None = None,
    *,
    training: Training,
    seed: int,
) -> None:
    """Minimise the sum of the loss plus ``penalty``, for ``training.pretrain_steps``."""
    parameters = list(trainable_parameters(model).values())
    weights = {"params": parameters, "lr": training.learning_rate}
    _descend(model, samples, penalty, [weights], training, training.pretrain_steps, 1, seed)


def train_noisy(
    model: nn.Module,
    samples: TaskData,
    penalty: Penalty,
    *,
    training: Training,
    seed: int,
) -> None:
    """Minimise the expected sum of the loss plus ``penalty``, for ``training.steps``."""
    variances = [noise.log_variance for *_, noise in noisy_weights(model)]
    known = {id(v) for v in variances}
    means = [p for p in trainable_parameters(model).values() if id(p) not in known]
    groups = [
        {"params": means, "lr": training.learning_rate},
        {"params": variances, "lr": training.log_variance_learning_rate},
    ]
    _descend(model, samples, penalty, groups, training, training.steps, training.noises, seed)


def _descend(
    model: nn.Module,
    samples: TaskData,
    penalty: Penalty | None,
    groups: list[dict[str, Any]],
    training: Training,
    steps: int,
    noises: int,
    seed: int,
) -> None:
    generator = Generator().manual_seed(seed)
    batches = _batches(len(samples), training.batch_size, generator)
    optimizer = torch.optim.Adam(groups, fused=True)  # one call for many small tensors
    cosine = partial(_cosine, steps=max(1, steps))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, cosine)
    model.train()
    with own_randomness(seed), torch.enable_grad():
        for index in islice(batches, steps):
            drawn = []
            for _ in range(noises):
                losses = samples.losses(model, index)
                drawn.append(losses.mean())
            loss = torch.stack(drawn).mean()
            if penalty is not None:
                loss = loss + penalty(model) / len(samples)  # never the size of the batch
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()


def _cosine(t: int, steps: int) -> float:
    return 0.5 + 0.5 * math.cos(math.pi * t / steps)


def _batches(n: int, batch_size: int, generator: Generator) -> Iterator[Tensor]:
    """Yield batches of shuffled indices without end; what is left of a pass is dropped, so that all have one size."""
    size = min(batch_size, n)
    while True:
        order = torch.randperm(n, generator=generator)
        yield from order.split(size)[: n // size]


def expected_loss(
    model: nn.Module,
    samples: TaskData,
    *,
    training: Training,
) -> tuple[float, float]:
    r"""Estimate :math:`E_Q[L_D]`, the expected **sum** of the loss, with its Monte-Carlo standard error.

    Every chunk of samples sees a network of its own, which is as unbiased as one network for all,
    and varies less.
    """
    drawn = []
    with sampling(model):
        for _ in range(training.draws):
            drawn.append(loss_sum(model, samples, training=training))
    sums = torch.tensor(drawn, dtype=torch.float64)
    error = sums.std() / math.sqrt(training.draws)
    return sums.mean().item(), error.item()


@torch.no_grad()
def loss_sum(model: nn.Module, samples: TaskData, *, training: Training) -> float:
    """Return the sum of the loss of the network as it is, in eval mode."""
    model.eval()
    size = training.chunk_size
    sums = []
    for start in range(0, len(samples), size):
        losses = samples.losses(model, slice(start, start + size))
        sums.append(losses.double().sum())
    return torch.stack(sums).sum().item()


@torch.no_grad()
def network_digest(model: nn.Module, inputs: Any) -> dict[str, str]:
    """Return what tells a network at its start from others: its weights, its modules, and what it makes of two samples.

    These answers are rounded, since another machine may go on with the folder.
    """
    with observing(model):
        answers = model(take(inputs, lambda x: x[:2])).double()
    return {
        "weights": digest(weights_now(model).items()),
        "modules": repr(model),
        "answers": f"{answers.abs().mean():.2e}",
    }
