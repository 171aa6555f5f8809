"""How complex is a dataset? Its structure function, traced by training noisy weights."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor, nn

from lightning_taskinfo._files import StrPath, claim_folder, digest, read_tensors, write_tensors
from lightning_taskinfo._observe import ParamDict, weights_now
from lightning_taskinfo._progress import Progress, shown
from lightning_taskinfo._random import seed_from
from lightning_taskinfo._ranges import check_positive
from lightning_taskinfo.certificates.samples import Data, read_pair
from lightning_taskinfo.functional.likelihood import Categorical, Likelihood, as_likelihood
from lightning_taskinfo.tasks import training as train
from lightning_taskinfo.tasks.structure import StructureFunction
from lightning_taskinfo.tasks.training import ModelFn, TaskData, Training
from lightning_taskinfo.variational import (
    PriorCenter,
    add_weight_noise,
    noisy_weights,
    prior_means,
    sampling,
    weight_kl,
)

BETAS = tuple(10 ** (2 - j / 2) for j in range(10))  # 100 … 0.003


def structure_function(
    model_fn: ModelFn,
    data: Data,
    betas: Sequence[float] = BETAS,
    *,
    prior_center: PriorCenter = "initial",
    prior_std: float = 0.1,
    likelihood: str | Likelihood = "categorical",
    training: Training | None = None,
    seed: int = 0,
    name: str = "",
    folder: StrPath | None = None,
    progress: Progress | bool = True,
) -> StructureFunction:
    r"""Trace the structure function of a dataset by training noisy weights at ever lower prices of information.

    .. math:: C_\beta = \min_Q\, E_Q[L_D] + \beta\,\mathrm{KL}(Q\|P), \qquad Q = N(\mu, \mathrm{diag}\,\sigma^2)

    A network is trained plainly, then turned noisy and trained at the highest :math:`\beta`, where
    it forgets all that is not worth its price; each lower one starts from there. Two sweeps with
    the same seed over the same inputs differ by their labels alone.

    Args:
        model_fn: Makes the network, the same one after the same ``torch.manual_seed``.
        data: ``(inputs, targets)``, a dataset of such pairs, or a loader over one, whose dataset is
            read.
        betas: Weights of the divergence beside the **sum** of the loss; used from high to low.
        prior_center: Mean of the pre-distribution: the network's own start, ``"zero"``, or tensors
            by parameter name.
        prior_std: Standard deviation of the pre-distribution.
        likelihood: What the outputs mean, as for :func:`~lightning_taskinfo.fisher.fisher_trace`.
        training: How long and how fast to train.
        seed: Seed of the network's start, the batches and the noise.
        name: What to call the task in plots.
        folder: Keeps rows and network after each :math:`\beta`; a call that was interrupted
            continues there. Refused if it belongs to other data, another network or other settings.
        progress: Whether to draw a bar where standard error is a terminal or a notebook; or a
            function, called with the number of finished :math:`\beta`, their total and a label.

    Returns:
        The points, with hull, complexity, critical :math:`\beta` and plots.

    Raises:
        ValueError: If an argument is out of its range, or the folder belongs to something else.

    Example:
        >>> from torch import nn
        >>> x = torch.linspace(-1, 1, 40)[:, None]
        >>> quick = Training(pretrain_steps=50, steps=50)
        >>> curve = structure_function(lambda: nn.Linear(1, 2), (x, (x[:, 0] > 0).long()), [10, 0.1], training=quick)
        >>> curve.kl[0] < curve.kl[1], curve.loss[0] > curve.loss[1]
        (True, True)

    References:
        Achille, Paolini, Mbeng, Soatto, *The information complexity of learning tasks, their
        structure and their distance*, sections 3 and 7.
    """
    check_positive(prior_std=prior_std, betas=betas)
    different = {float(beta) for beta in betas}
    betas = tuple(sorted(different, reverse=True))
    training = training or Training()
    inputs, targets = read_pair(data)
    samples = TaskData(inputs, targets, as_likelihood(likelihood))
    model = train.build(model_fn, seed)
    samples.check(model)
    centre = prior_means(prior_center, weights_now(model))
    if folder is not None:
        made = {
            "betas": betas,
            "prior_std": prior_std,
            "likelihood": repr(samples.likelihood),
            "seed": seed,
            "network": train.network_digest(model, inputs),
            "prior_center": digest(centre.items()),
            "data": digest([("inputs", inputs), ("targets", targets)]),
            "training": asdict(training),
        }
        claim_folder(folder, made, results=["sweep.pt"])
    sweep = Sweep(model, samples, centre, prior_std=prior_std, training=training, seed=seed)
    with shown(progress, name or "structure_function", len(betas)) as tell:
        path = None if folder is None else Path(folder) / "sweep.pt"
        sweep.run(betas, path, tell)
    return StructureFunction(
        betas=betas,
        kl=sweep.column("kl"),
        loss=sweep.column("loss"),
        loss_error=sweep.column("loss_error"),
        prior_loss=sweep.prior["loss"],
        prior_loss_error=sweep.prior["loss_error"],
        samples=len(samples),
        label_entropy=_label_entropy(samples),
        name=name,
    )


def _label_entropy(samples: TaskData) -> float | None:
    """Nats per label, of the frequencies of classes; ``None`` where labels are not classes."""
    if not isinstance(samples.likelihood, Categorical):
        return None
    counts = torch.unique(samples.targets, return_counts=True)[1]
    share = counts.double() / samples.targets.numel()
    return float(-(share * share.log()).sum())


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
        samples: TaskData,
        centre: ParamDict,
        *,
        prior_std: float,
        training: Training,
        seed: int,
    ) -> None:
        self.model = add_weight_noise(
            model,
            std=train.START * prior_std,
            prior_center=centre,
            prior_std=prior_std,
            seed=seed_from(seed, 0),
        )
        self.samples = samples
        self.centre = centre
        self.training = training
        self.seed = seed
        self.prior: dict[str, float] = {}
        self.rows: list[dict[str, float]] = []

    def run(self, betas: Sequence[float], path: Path | None, progress: Progress) -> None:
        """Go through the list, from where the file at ``path`` ends; it is written after every step."""
        if path is not None and path.exists():
            self.load(path)
        else:
            self.begin()
        for done, beta in enumerate(betas, 1):
            if done > len(self.rows):
                self.step(beta)
                if path is not None:
                    self.save(path)
            progress(done, len(betas), f"β = {beta:.3g}")

    def column(self, key: str) -> tuple[float, ...]:
        """Return one of the measured numbers, of every step."""
        return tuple(row[key] for row in self.rows)

    def begin(self) -> None:
        """Measure the pre-distribution itself, then train without noise."""
        start = {}
        for name, mean, _ in noisy_weights(self.model):
            start[name] = mean.detach().clone()
        _set_gaussian(self.model, self.centre, 1.0)
        self.prior = self._loss()
        _set_gaussian(self.model, start, train.START)
        with sampling(self.model, enabled=False):
            seed = seed_from(self.seed, 1)
            train.train_plain(self.model, self.samples, training=self.training, seed=seed)

    def step(self, beta: float) -> None:
        r"""Minimise :math:`C_\beta` from where the network is, and measure.

        The first has the longest way to go, from plain weights to almost nothing: it is trained
        twice.
        """

        def price(model: nn.Module) -> Tensor:
            return beta * weight_kl(model)

        for turn in range(1 if self.rows else 2):
            seed = seed_from(self.seed, 2, len(self.rows), turn)
            train.train_noisy(self.model, self.samples, price, training=self.training, seed=seed)
        kl = weight_kl(self.model).item()
        row = {"beta": beta, "kl": kl, **self._loss()}
        self.rows.append(row)

    def save(self, path: Path) -> None:
        """Write network and rows, atomically."""
        state = {"prior": self.prior, "rows": self.rows, "model": self.model.state_dict()}
        write_tensors(path, state)

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

    def _loss(self) -> dict[str, float]:
        loss, error = train.expected_loss(self.model, self.samples, training=self.training)
        return {"loss": loss, "loss_error": error}


@torch.no_grad()
def _set_gaussian(model: nn.Module, means: Mapping[str, Tensor], std: float) -> None:
    """Put means into noisy weights, and deviations that are ``std`` times the prior's."""
    for name, mean, noise in noisy_weights(model):
        mean.copy_(means[name])
        log_variance = noise.prior_log_variance + 2 * math.log(std)
        noise.log_variance.copy_(log_variance.expand_as(mean))
