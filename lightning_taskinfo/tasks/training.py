r"""Minimise :math:`C_\beta` in a plain torch loop: without noise first, then with noisy weights.

Everything random comes from the seed that a call is given: batches and noise from generators of
their own, dropout from a global generator that is put back afterwards. The same seed gives the same
bits, alone or beside other work.
"""

import math
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import asdict, dataclass
from itertools import islice, product
from typing import Any

import torch
from torch import Generator, Tensor, nn

from lightning_taskinfo._calls import NoLogitsError
from lightning_taskinfo._files import digest
from lightning_taskinfo._nested import pick, tensors
from lightning_taskinfo._observe import observing, trainable_parameters, weights_now
from lightning_taskinfo._random import own_randomness
from lightning_taskinfo._ranges import check_counts, check_not_negative, check_positive
from lightning_taskinfo._warn import first_line
from lightning_taskinfo.certificates.samples import Data, read_pair
from lightning_taskinfo.functional.likelihood import Categorical, Likelihood
from lightning_taskinfo.variational import noisy_weights, sampling

ModelFn = Callable[[], nn.Module]
CHUNK = 4096  # samples that go through the network at a time where nothing is trained


@dataclass(frozen=True)
class Training:
    r"""How one :math:`C_\beta` is minimised: Adam, its rates falling to zero along half a cosine.

    Args:
        pretrain_steps: Optimizer steps without noise, before the first :math:`\beta`.
        steps: Optimizer steps with noisy weights, for each :math:`\beta`.
        batch_size: Samples of one step.
        learning_rate: Rate for weights and means.
        log_variance_learning_rate: Rate for the log-variances, which have further to go.
        draws: Networks drawn from :math:`Q` to estimate :math:`E_Q[L_D]` after the training.

    Raises:
        ValueError: If a number of steps is negative, or another value not positive.
    """

    pretrain_steps: int = 400
    steps: int = 400
    batch_size: int = 128
    learning_rate: float = 1e-2
    log_variance_learning_rate: float = 1e-1
    draws: int = 32

    def __post_init__(self) -> None:
        check_not_negative(pretrain_steps=self.pretrain_steps)
        check_counts(steps=self.steps, batch_size=self.batch_size)
        check_positive(
            learning_rate=self.learning_rate,
            log_variance_learning_rate=self.log_variance_learning_rate,
        )
        if self.draws < 2:
            raise ValueError(f"`draws` must be at least 2 for a standard error, got {self.draws}.")


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


def read_task(
    data: Data, likelihood: Likelihood, *, argument: str = "data"
) -> tuple[Tensor, Tensor]:
    """Return inputs and targets of a task; classes of any integer type become int64."""
    inputs, targets = read_pair(data, argument=argument)
    if isinstance(likelihood, Categorical) and not targets.is_floating_point():
        targets = targets.long()
        if (targets == likelihood.ignore_index).all():
            raise ValueError(f"`{argument}` must hold a label that counts, got none.")
    return inputs, targets


def first_answers(
    model: nn.Module,
    inputs: Any,
    *,
    argument: str,
    run: Callable[[Any], Any] | None = None,
) -> Any:
    """Return what a network makes of two samples; a ``ValueError`` about the argument where it does not take them."""
    few = pick(inputs, slice(2))
    try:
        with observing(model), torch.no_grad():
            return (run or model)(few)
    except NoLogitsError:  # about the network
        raise
    except Exception as error:
        kinds = ", ".join(f"{x.dtype} {list(x.shape)}" for x in tensors(inputs))
        raise ValueError(
            f"`{argument}` must hold inputs that the network takes, got {kinds} ({first_line(error)})."
        ) from error


@dataclass(frozen=True)
class Fit:
    """A network on its way to a task: all samples, what its outputs mean, and how it is trained.

    Args:
        model: The network, which is trained in place.
        inputs: ``N`` inputs: a tensor, or tuples and dicts of them.
        targets: Their targets, shape ``[N, ...]``.
        likelihood: What the outputs mean.
        training: How it is trained.
    """

    model: nn.Module
    inputs: Any
    targets: Tensor
    likelihood: Likelihood
    training: Training

    def losses(self, index: Tensor | slice) -> Tensor:
        """Return the negative log-likelihood of the picked samples in nats, shape ``[B]``."""
        outputs = self.model(pick(self.inputs, index))
        return -self.likelihood.log_prob(outputs, self.targets[index])

    def check(self, argument: str = "data") -> Tensor:
        """Return the answers to two samples; a ``ValueError`` if outputs or targets do not fit the likelihood."""
        outputs = first_answers(self.model, self.inputs, argument=argument)
        if not isinstance(outputs, Tensor):
            kind = type(outputs).__name__
            raise ValueError(f"The network must return a tensor of outputs, got {kind}.")
        shape = (len(self.targets), *outputs.shape[1:])
        self.likelihood.check(outputs[:1].expand(shape), self.targets)
        return outputs

    def configuration(self) -> dict[str, Any]:
        """Return what decides the numbers that come out, beside prior and seed: a folder belongs to one.

        A network is known by its weights, its modules, and its answers to two samples, which are
        rounded, since another machine may go on with the folder.
        """
        network = {
            "weights": digest(weights_now(self.model).items()),
            "modules": repr(self.model),
            "answers": f"{self.check().double().abs().mean():.2e}",
        }
        data = enumerate(tensors((self.inputs, self.targets)))
        return {
            "data": digest((str(index), x) for index, x in data),
            "likelihood": repr(self.likelihood),
            "network": network,
            "training": asdict(self.training),
        }

    def minimise(
        self,
        penalty: Callable[[], Tensor | float],
        seed: int,
        *,
        noisy: bool,
    ) -> None:
        """Minimise the (expected) sum of the loss plus ``penalty()``, with noisy weights or without noise."""
        training = self.training
        steps = training.steps if noisy else training.pretrain_steps
        variances = [noise.log_variance for *_, noise in noisy_weights(self.model)]
        known = {id(v) for v in variances}
        weights = trainable_parameters(self.model).values()
        means = [p for p in weights if id(p) not in known]
        groups = [
            {"params": means, "lr": training.learning_rate},
            {"params": variances, "lr": training.log_variance_learning_rate},
        ]
        optimizer = torch.optim.Adam(groups, fused=True)  # one call for many small tensors
        scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda t: 0.5 + 0.5 * math.cos(math.pi * t / max(1, steps))
        )
        N = len(self.targets)
        batches = _batches(N, training.batch_size, Generator().manual_seed(seed))
        self.model.train()
        with own_randomness(seed), torch.enable_grad():
            for index in islice(batches, steps):
                loss = self.losses(index).mean() + penalty() / N  # never the size of the batch
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                scheduler.step()
        for name, weight in weights_now(self.model).items():
            if not weight.isfinite().all():
                raise ValueError(
                    f"`training` must come to finite weights, but {name} is not; set lower learning rates."
                )

    @torch.no_grad()
    def expected_loss(self) -> tuple[float, float]:
        r"""Estimate the expected **sum** :math:`E_Q[L_D]` of the loss, and its Monte-Carlo standard error.

        Every chunk of samples sees a network of its own, which is as unbiased as one network for
        all, and varies less.
        """
        sums = torch.zeros(self.training.draws, dtype=torch.float64)
        self.model.eval()
        with sampling(self.model):
            for draw, start in product(range(len(sums)), range(0, len(self.targets), CHUNK)):
                sums[draw] += self.losses(slice(start, start + CHUNK)).double().sum()
        error = sums.std() / math.sqrt(len(sums))
        return sums.mean().item(), error.item()


def _batches(n: int, batch_size: int, generator: Generator) -> Iterator[Tensor]:
    """Yield batches of shuffled indices without end; what is left of a pass is dropped, so that all have one size."""
    size = min(batch_size, n)
    while True:
        order = torch.randperm(n, generator=generator)
        yield from order.split(size)[: n // size]
