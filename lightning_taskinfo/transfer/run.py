"""Starts × ways to adapt × numbers of labels × seeds: plan the trainings, run them, report."""

import itertools
import operator
import os
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import numpy as np
from torch import nn

from lightning_taskinfo._files import StrPath, claim_folder
from lightning_taskinfo._lightning import DEFAULT
from lightning_taskinfo._parallel import check_executor, check_travels, run_jobs
from lightning_taskinfo._progress import Progress, shown
from lightning_taskinfo._ranges import check_not_negative, check_seed
from lightning_taskinfo._wandb import PREFIX
from lightning_taskinfo.transfer.own import Own
from lightning_taskinfo.transfer.ready import Ready, Stages
from lightning_taskinfo.transfer.ready.module import Backbone
from lightning_taskinfo.transfer.report import Result, TransferReport
from lightning_taskinfo.transfer.sampling import check_different
from lightning_taskinfo.transfer.starts import MakeModule
from lightning_taskinfo.transfer.training import (
    LoggerKind,
    Recipe,
    RunLog,
    Trial,
    Values,
    check_trainer,
)


def transfer(
    model: Backbone | MakeModule,
    data: Any,
    *,
    starts: Mapping[str, Any] | None = None,
    adapt: Sequence[Any] | str = ("full",),
    metric: str | None = None,
    mode: Literal["min", "max"] | None = None,
    trainer: Mapping[str, Any] | None = None,
    batch_size: int | None = None,
    certify: bool = False,
    methods: Sequence[str] | None = None,
    stages: Stages | None = None,
    weights: Mapping[str, float] | None = None,
    labels: Sequence[int] | int | None = None,
    seeds: Sequence[int] | int = 3,
    folder: StrPath | None = None,
    logger: LoggerKind = "none",
    project: str = "lightning-taskinfo",
    name: str | None = None,
    executor: Executor | None = None,
    workers: int | None = 0,
    accelerator: str = "cpu",
    progress: Progress | bool = True,
) -> TransferReport:
    """Train on a few target labels from every start and from scratch, and report which start helps.

    With ``starts``, the module, the data and the starts are yours. Each start is adapted in every
    way, for every number of labels and seed, beside training your module from scratch. A seed
    decides the labelled samples, the fresh weights and the order of the batches, and is shared by
    all starts, so that they are compared in pairs.

    Without ``starts``, they are made here: for every method and seed, a network is pretrained on the
    source of a :class:`TransferDataModule` beside unlabelled target inputs, gets a new head, and is
    adapted to the target's labels like any other start.

    With a ``folder``, every run keeps its last finished epoch and its result there. A run that was
    killed goes on where it was and ends with the same numbers; a finished one is read, not
    repeated; starts, ways to adapt, methods, labels and seeds can be added; anything else that
    changes the numbers is refused, with what differs. Where it runs (processes, accelerator) and
    what it logs to may change.

    Args:
        model: With ``starts``: a function without arguments that makes your LightningModule, with
            its own optimizers and loss. Without: the backbone, a name in
            :data:`lightning_taskinfo.transfer.BACKBONES`, or a function (or class) at the top of a
            module that makes a network for an image shape.
        data: With ``starts``: the target, as a LightningDataModule, datasets
            ``{"train": …, "test": …}``, with ``"validation"`` or not, or arrays
            ``(inputs, targets)`` in place of a dataset. Labelled samples are chosen from its
            training set, in equal shares for the classes where targets are classes. Without: source
            and target, as a :class:`TransferDataModule`.
        starts: Starts by name: the path of a checkpoint or of a state dict, a state dict, or a
            function that makes a LightningModule of any architecture. A head that does not fit
            ``model`` is fresh. One that fits is kept: leave it out of the state dict if its classes
            are others.
        adapt: How starts are adapted: ``"full"``; ``"linear"``, the head alone; ``"lora"``,
            low-rank adapters, by peft; the name of a layer, which is frozen with all before it; or
            a function that freezes what it likes in the module it is given.
        metric: Name of a metric that the module logs in its ``test_step``; where ``None``, the
            error of its outputs on the test set, or their mean squared error where targets are real
            numbers.
        mode: Whether the metric is better lower, ``"min"``, or higher, ``"max"``; ``None`` where its
            name says so, such as ``"test_loss"`` or ``"accuracy"``.
        trainer: Options of Lightning's Trainer, such as ``{"max_steps": 300}``; 20 epochs where
            there is no length.
        batch_size: Samples in a training batch; that of the data module, or 32, where ``None``.
        certify: With ``starts``: also bound the true error of every trained network, scratch too.
            In the report stand the PAC-Bayes bound of a randomised network with the start's weights
            as the prior's centre, where frozen weights cost nothing; the bound for the network
            itself, by its disagreement with the randomised one on training inputs that serve
            nothing else; and the bound by the test set's labels. A certificate needs independent
            draws: labelled samples are then chosen at random, not in equal shares for the classes.
            It is valid only if the start was pretrained on other samples, which cannot be checked.
        methods: Without ``starts``: see :class:`TransferClassifier`; ``["standard"]`` where
            ``None``.
        stages: Without ``starts``: how long and how each stage trains.
        weights: Without ``starts``: weights of the penalties by name, where not those of
            :data:`lightning_taskinfo.transfer.WEIGHTS`; of those too that are to be added later to
            the same ``folder``.
        labels: Numbers of target labels; all training samples, or that of ``data``, where ``None``.
        seeds: The seeds, or how many.
        folder: Where everything is kept; nowhere where ``None``. On several machines it must be a
            shared one, at the same path.
        logger: What each run logs to.
        project: Project in Weights & Biases.
        name: What to call the experiment: its title, and its group in Weights & Biases.
        executor: Runs the trainings in other processes: a
            :class:`concurrent.futures.ProcessPoolExecutor`, or Dask's ``client.get_executor()``
            with ``threads_per_worker=1``.
        workers: Processes of our own pool where there is no ``executor``; 0 for this process alone,
            ``None`` for as many as there are cores. A script that uses processes needs
            ``if __name__ == "__main__":``.
        accelerator: Lightning's accelerator of each training, which has one device.
        progress: Whether to say how many runs there are and which weights of each start are fresh,
            and to draw a bar where standard error is a terminal or a notebook, and write a line now
            and then elsewhere; or a function, called with the number of finished trainings, their
            total and a label.

    Returns:
        The report.

    Raises:
        ValueError: If an argument is out of range, the data or a start do not fit, a checkpoint in
            ``folder`` is damaged, or ``folder`` belongs to another configuration.
        RuntimeError: If a training fails, with its name.

    Example::

        report = transfer(
            MyModule, target, starts={"mnist": "mnist.ckpt", "wiki": state_dict}, adapt=["full", "linear"],
            labels=[50, 200], seeds=5, metric="test_error", trainer={"max_steps": 300}, folder="runs/letters",
        )
        report.save("runs/letters/report")

        data = TransferDataModule("digits", "letters", labels=50)
        report = transfer("small_cnn", data, methods=["standard", "lautum"], seeds=3, folder="runs/ready")
    """
    check_executor(executor, workers)
    if isinstance(model, nn.Module):
        rule = "`model` must be a class or a function that makes a network, for every seed its own"
        raise TypeError(f"{rule}, got a {type(model).__name__}, a network already.")
    if executor is None:  # whose machines may have others
        rule = f"`accelerator` must be one that Lightning finds here, got {accelerator!r}"
        check_trainer(rule, DEFAULT, {"accelerator": accelerator})
    if folder is None and logger == "wandb_offline":
        raise ValueError(f"`folder` must be given for the files of `logger` {logger!r}, got None.")
    own: Values = {
        "metric": metric,
        "mode": mode,
        "trainer": trainer,
        "batch_size": batch_size,
        "certify": certify or None,
    }
    ready: Values = {"methods": methods, "stages": stages, "weights": weights}
    unused, when = (own, "without") if starts is None else (ready, "with")
    for argument, value in unused.items():
        if value is not None:
            raise ValueError(f"`{argument}` must be left out {when} `starts`, got {value!r}.")
    counts = None if labels is None else _whole_numbers("labels", labels)
    shared: Values = {
        "data": data,
        "labels": counts,
        "seeds": _seeds(seeds),
        "accelerator": accelerator,
        "adapt": adapt,
    }
    made: Any = model
    if starts is None:
        recipe: Recipe = Ready(made, **shared, **ready)
    else:
        recipe = Own(made, starts=starts, logged=logger != "none", **shared, **own)
    title = name or recipe.title
    with TemporaryDirectory() as temporary:
        root = Path(temporary if folder is None else folder).absolute()  # a worker's is another
        log = RunLog(logger, project, group_name(title, root), root / "logs", recipe.namespace)
        trials = recipe.trials(root, log)
        check_travels(trials[0], "`model`, a start, `adapt` or `data`", executor, workers)
        if progress is True:
            lines = [announced(len(trials), recipe.seconds, workers, executor)]
            lines += [f"start {start}: {origin}" for start, origin in recipe.origins.items()]
            sys.stderr.writelines(f"transfer: {line}\n" for line in lines)
        claim_folder(root, recipe.configuration, results=["results/*", "stages/*"])
        recipe.store(root)
        with shown(progress, "transfer", len(trials)) as tell:
            found = _run(trials, executor, workers, tell)
    results = [_result(one, found[one.name]) for one in trials if one.stage != "pretrain"]
    return TransferReport(results, recipe.configuration, title, dict(recipe.origins))


def announced(
    runs: int,
    seconds: float | None,
    workers: int | None,
    executor: Executor | None,
) -> str:
    """Return how many runs there are, and how long they may take.

    Example:
        >>> announced(24, 10.0, 2, None)
        '24 trainings of about 10 s, about 2 min in 2 processes'
        >>> announced(24, 0.2, 0, None)
        '24 trainings of about 0.2 s, about 4.8 s in 1 process'
    """
    if seconds is None:
        return f"{runs} trainings"
    each = f"{runs} trainings of about {_time(seconds)}"
    if executor is not None:
        return each
    count = 1 if workers == 0 else min(workers or os.cpu_count() or 1, runs)
    whole = _time(runs * seconds / count)
    return f"{each}, about {whole} in {count} process{'es' * (count > 1)}"


def _time(seconds: float) -> str:
    """A time with two digits at least, so that one of a training and one of all agree."""
    number, unit = (seconds, "s") if seconds < 60 else (seconds / 60, "min")
    return f"{number:.2g} {unit}" if number < 10 else f"{number:.0f} {unit}"


def group_name(title: str, folder: StrPath) -> str:
    """Return the group in Weights & Biases of an experiment and its folder.

    Args:
        title: Name of the experiment, such as that of its report.
        folder: Folder of the transfer.

    Example:
        >>> group_name("digits → letters", "runs/first")
        'digits → letters (first)'
    """
    return f"{title} ({Path(folder).absolute().name})"


def _seeds(given: Any) -> list[int]:
    """The seeds, or as many as asked for."""
    if np.ndim(given) == 0:
        given = range(*_whole_numbers("seeds", given))
    seeds = _whole_numbers("seeds", given)
    check_not_negative(seeds=min(seeds))
    check_seed(max(seeds))
    return seeds


def _whole_numbers(argument: str, given: Any) -> list[int]:
    """One number or several as a list of Python's own, which names of files and JSON know."""
    try:
        numbers = [operator.index(one) for one in ([given] if np.ndim(given) == 0 else given)]
    except TypeError:
        raise TypeError(f"`{argument}` must be a whole number or several, got {given!r}.") from None
    check_different(argument, numbers)
    return numbers


def _run(
    trials: Sequence[Trial],
    executor: Executor | None,
    workers: int | None,
    tell: Progress,
) -> Values:
    """Run what needs nothing first, then what starts from it; checkpoints of a finished one are not needed."""
    named = {trial.name: trial for trial in trials}
    finished = itertools.count(1)

    def done(name: str, _result: Values) -> None:
        trial = named[name]
        for checkpoint in trial.folder.glob("last.ckpt*"):
            checkpoint.unlink(missing_ok=True)
        tell(next(finished), len(trials), trial.description)

    for one in trials:  # a pretraining is done again if its weights are gone and still needed
        if one.needs and not one.result.exists() and not one.needs.weights.exists():
            one.needs.result.unlink(missing_ok=True)
    results: Values = {}
    for needy in (False, True):
        wave = {name: one for name, one in named.items() if bool(one.needs) is needy}
        results |= run_jobs(
            Trial.run,
            wave,
            folder=trials[0].root / "results",
            executor=executor,
            workers=workers,
            on_done=done,
        )
    return results


def _result(trial: Trial, found: Values) -> Result:
    """What a training has found, as it is reported."""
    # Without what was measured beside training: a killed run measures at other steps.
    curves = [
        {key: row[key] for key in row if not key.startswith(f"{PREFIX}/")}
        for row in found["curves"]
    ]
    return Result(trial.method, trial.labels, trial.seed, **{**found, "curves": curves})
