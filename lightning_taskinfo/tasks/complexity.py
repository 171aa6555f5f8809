"""How complex is a dataset? Its structure function, traced by training noisy weights."""

import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor

from lightning_taskinfo._files import claim_folder
from lightning_taskinfo._progress import Progress, shown
from lightning_taskinfo._ranges import check_positive
from lightning_taskinfo.certificates.samples import Data, read_tensors
from lightning_taskinfo.functional.likelihood import Categorical, Likelihood, as_likelihood
from lightning_taskinfo.tasks._sweep import Center, Sweep, center_of, digest, network_digest
from lightning_taskinfo.tasks.structure import StructureFunction
from lightning_taskinfo.tasks.training import ModelFn, Samples, Training, build, initial_weights

BETAS = tuple(10 ** (2 - j / 2) for j in range(10))  # 100 … 0.003


def structure_function(
    model_fn: ModelFn,
    data: Data,
    betas: Sequence[float] = BETAS,
    *,
    prior_center: Center = "initial",
    prior_std: float = 0.1,
    likelihood: str | Likelihood = "categorical",
    training: Training | None = None,
    seed: int = 0,
    name: str = "",
    folder: str | os.PathLike[str] | None = None,
    progress: Progress | bool = True,
) -> StructureFunction:
    r"""Trace the structure function of a dataset by training noisy weights at ever lower prices of information.

    .. math:: C_\beta = \min_Q\, E_Q[L_D] + \beta\,\mathrm{KL}(Q\|P), \qquad Q = N(\mu, \mathrm{diag}\,\sigma^2)

    A network is trained plainly, then turned noisy and trained at the highest :math:`\beta`, where it forgets all that
    is not worth its price; each lower one starts from there. Two sweeps with the same
    seed over the same inputs differ by their labels alone.

    Args:
        model_fn: Makes the network, the same one after the same ``torch.manual_seed``.
        data: ``(inputs, targets)``, a dataset of such pairs, or a loader over one, whose dataset is read.
        betas: Weights of the divergence beside the **sum** of the loss; used from high to low.
        prior_center: Mean of the pre-distribution: the network's own start, ``"zero"``, or tensors by parameter name.
        prior_std: Standard deviation of the pre-distribution.
        likelihood: What the outputs mean, as for :func:`~lightning_taskinfo.fisher.fisher_trace`.
        training: How long and how fast to train.
        seed: Seed of the network's start, the batches and the noise.
        name: What to call the task in plots.
        folder: Keeps rows and network after each :math:`\beta`; a call that was interrupted continues there. Refused if
            it belongs to other data, another network or other settings.
        progress: Whether to draw a bar where standard error is a terminal or a notebook; or a function, called with the
            number of finished :math:`\beta`, their total and a label.

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
        Achille, Paolini, Mbeng, Soatto, *The information complexity of learning tasks, their structure and their
        distance*, sections 3 and 7.
    """
    betas, training = _checked(betas, prior_std), training or Training()
    inputs, targets = read_tensors(data)
    samples = Samples(inputs, targets, as_likelihood(likelihood))
    model = build(model_fn, seed)
    samples.check(model)
    start = initial_weights(model)
    centre = center_of(start, prior_center)
    if folder is not None:
        made = {
            "betas": betas,
            "prior_std": prior_std,
            "likelihood": repr(samples.likelihood),
            "seed": seed,
        }
        made |= {"network": network_digest(model, inputs), "prior_center": digest(centre.values())}
        made |= {"data": digest([inputs, targets]), "training": asdict(training)}
        claim_folder(folder, made, results=["sweep.pt"])
    sweep = Sweep(model, samples, centre, prior_std=prior_std, training=training, seed=seed)
    with shown(progress, name or "structure_function", len(betas)) as tell:
        _run(sweep, betas, None if folder is None else Path(folder) / "sweep.pt", tell)
    kl, loss, error = (
        tuple(row[key] for row in sweep.rows) for key in ("kl", "loss", "loss_error")
    )
    guess = sweep.prior["loss"], sweep.prior["loss_error"]
    entropy = _label_entropy(targets) if isinstance(samples.likelihood, Categorical) else None
    return StructureFunction(betas, kl, loss, error, *guess, len(samples), entropy, name)


def _run(
    sweep: Sweep, betas: Sequence[float], path: Path | None, progress: Progress | None
) -> None:
    if path is not None and path.exists():
        sweep.load(path)
    else:
        sweep.begin()
    for done, beta in enumerate(betas, 1):
        if done > len(sweep.rows):
            sweep.step(beta)
            if path is not None:
                sweep.save(path)
        if progress is not None:
            progress(done, len(betas), f"β = {beta:.3g}")


def _checked(betas: Sequence[float], prior_std: float) -> tuple[float, ...]:
    check_positive(prior_std=prior_std, betas=betas)
    ordered = tuple(sorted({float(beta) for beta in betas}, reverse=True))
    return ordered


def _label_entropy(targets: Tensor) -> float:
    share = torch.unique(targets, return_counts=True)[1].double() / targets.numel()
    return float(-(share * share.log()).sum())
