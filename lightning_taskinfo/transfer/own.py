"""The user's own recipe: their module, from each of their starts, adapted in each way, on a few target labels."""

import hashlib
import json
import math
import re
import time
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lightning_taskinfo._batches import read_batch
from lightning_taskinfo._calls import outputs_of
from lightning_taskinfo._lightning import NAMESPACES
from lightning_taskinfo._nested import IGNORED, described, moved
from lightning_taskinfo._observe import observing, trainable_parameters
from lightning_taskinfo._warn import reason_of
from lightning_taskinfo.certificates import Prior, certify
from lightning_taskinfo.certificates.certify import FEWEST
from lightning_taskinfo.certificates.samples import check_fresh, read_inputs
from lightning_taskinfo.transfer import starts as reading
from lightning_taskinfo.transfer.report import is_higher_better
from lightning_taskinfo.transfer.sampling import (
    Loader,
    Rows,
    Target,
    chosen_rows,
    generators_kept,
    read_target,
    reseed,
)
from lightning_taskinfo.transfer.starts import Adapt, Given, MakeModule, Start
from lightning_taskinfo.transfer.training import (
    SCRATCH,
    SILENT,
    Job,
    Recipe,
    Row,
    RunLog,
    Trial,
    Values,
    check_trainer,
    make_trainer,
    quiet,
)

VERSION = 1  # of the files in a folder: raise it when the same configuration gives other numbers
STREAM = 5  # of random numbers, and
CERTIFIED = 6  # of those in a certificate
MOST_FRESH = 5000  # inputs to compare predictions on
TRIED = 3  # training steps to estimate a time from
LENGTHS = {"max_epochs", "max_steps", "max_time"}
VALIDATION = {"limit_val_batches", "check_val_every_n_epoch", "val_check_interval"}
RESERVED = ("logger", "default_root_dir", "accelerator", "devices", "num_nodes", *SILENT)


class Own(Recipe):
    """Trainings of the user's module; all is read, and seen to fit and to train, before anything is written.

    Args:
        make: Makes the user's module.
        data: Their target data.
        labels: Numbers of labels; all training samples where ``None``.
        seeds: The seeds.
        accelerator: Where to train.
        starts: Their starts by name.
        adapt: Ways to adapt.
        metric: Name of the logged test metric; ``None`` for the error of the outputs.
        mode: Whether less or more of it is better; by its name where ``None``.
        trainer: Options of Lightning's Trainer; 20 epochs where there is no length.
        batch_size: Samples in a training batch.
        certify: Whether the true error of every trained network is bounded.
        logged: Whether runs have a logger.

    Raises:
        ValueError: If something does not fit.
        TypeError: If ``make`` is no class or function.
    """

    def __init__(
        self,
        make: MakeModule,
        data: Any,
        labels: Sequence[int] | None,
        seeds: Sequence[int],
        accelerator: str,
        starts: Mapping[str, Given],
        adapt: Sequence[Adapt] | str,
        *,
        metric: str | None,
        mode: Literal["min", "max"] | None,
        trainer: Mapping[str, Any] | None,
        batch_size: int | None,
        certify: bool | None,
        logged: bool,
    ) -> None:
        if metric is not None:
            is_higher_better(metric, mode)
        elif mode is not None:
            raise ValueError(f"`mode` must be left out without `metric`, got {mode!r}.")
        self.pretrained = {}
        self.metric = metric
        self.certify = certify
        self.logged = logged
        self.target = read_target(data, batch_size)
        self.seeds = seeds
        with generators_kept():
            self.starts = _read_starts(make, starts, next(iter(self.target.test)))
            self.origins = {name: self.starts[name].origin() for name in starts}
            module = self.starts[SCRATCH].module(0)
            self.namespace = str(reading.namespace_of(module))
            self.title = f"{type(module).__name__} from {', '.join(starts)}"
            self.options = _trainer_options(trainer, accelerator, self.namespace)
            self.take_ways(adapt)
            fingerprint = self._choose_rows(labels, module)
            self.learned = {}
            tested, self.seconds = self._tried()
        self.configuration = {
            "version": VERSION,
            "module": f"{type(module).__module__}.{type(module).__qualname__}",
            "data": fingerprint,
            "batch_size": self.target.train.batch_size,
            **self.learned[id(make)],
            "trainer": _plain(self.options),
            "metric": tested,
            "mode": mode,
            "certify": bool(certify),
        }

    def _choose_rows(self, labels: Sequence[int] | None, module: Any) -> Values:
        """Read all samples, choose those that are labelled, and return what the data are known by."""
        target: Any = self.target
        size = len(target.train.dataset)
        self.labels = labels or [size]
        targets, (training, test) = target.labels()
        classes, _ = targets
        for found in targets:
            if found is not None and not found.is_floating_point():
                unknown = found == IGNORED
                if unknown.all() or (self.certify and unknown.any()):
                    raise ValueError(
                        f"`data` must have labels, and one for each sample with `certify`, got {IGNORED}."
                    )
                for start in {id(start.make): start for start in self.starts.values()}.values():
                    self._check_range(found, start.module(0))
            elif self.certify:
                rule = "`certify` must go with one class for each sample"
                raise ValueError(f"{rule}, got targets that are none.")
        self.rows = {}
        for seed in self.seeds:
            self.rows[seed] = chosen_rows(classes, size, self.labels, seed)
            if self.certify:  # equal shares of classes would be no independent draws
                self.rows[seed] = chosen_rows(None, size, self.labels, seed)
                parts = certified_parts(target, self.rows[seed], max(self.labels))
                check_certified(parts, module)
        return {"training": training, "samples": size, "test": test}

    def job(self, trial: Trial) -> Job:
        """Return a start, adapted, with the loaders of its labelled samples."""
        seed = trial.seed
        target = self.target
        origin = "random initialisation"
        if trial.start != SCRATCH:
            others = "said to be pretrained on other samples than the certified ones"
            origin = f"the start {trial.start!r}, {others}"
        module = self.starts[trial.start].module(seed)
        self.adapted(module, trial.start, trial.way)
        rows = self.rows[seed]
        fit: Values = {"train_dataloaders": target.train_loader(rows[: trial.labels], seed)}
        # Epochs of a few labels are too short for validation to be the default.
        if target.validation is not None and VALIDATION & {*self.options}:
            fit["val_dataloaders"] = target.validation
        loader = target.test
        # What is frozen costs nothing.
        prior = Prior.of(module, origin=origin) if self.certify else None

        def weights() -> dict[str, Tensor]:
            return {name: p.detach().cpu() for name, p in trainable_parameters(module).items()}

        def after(test: Row) -> tuple[Values, Values]:
            name = self.metric
            test = own_error(module, loader) if name is None else {name: test[name]}
            if prior is None:
                return {"test": test}, {}
            parts = certified_parts(target, rows, trial.labels)
            bounds = certified_bounds(parts, module, prior, seed)
            return {"test": test, "certificate": bounds}, {"certified": bounds}

        return Job(
            module,
            seeds=(seed, STREAM),
            fit=fit,
            test=None if self.metric is None else {"dataloaders": loader},
            options={**self.options, "callbacks": deepcopy(self.options["callbacks"])},
            weights=weights,
            after=after,
            before={},
        )

    def _check_range(self, labels: Tensor, module: Any) -> None:
        """Raise a ``ValueError`` for a class that the module has no output for, where that can be seen."""
        outputs = reading.seen_outputs(module, next(iter(self.target.test)))
        if outputs is None or outputs.ndim != 2:
            return
        classes = outputs.shape[1]
        if classes == 1 and self.metric is not None:  # yes or no, by one logit
            return
        negative = (labels < 0) & (labels != IGNORED)
        odd = labels[negative | (labels >= classes)]
        if len(odd):
            rule = f"classes from 0 to {classes - 1}, the outputs of {type(module).__name__}"
            raise ValueError(f"`data` must have {rule}, got {int(odd[0])}.")

    def _tried(self) -> tuple[str, float]:
        """Train what each function makes, in the last way and for a few steps, and test it on one batch.

        Returns:
            Name of the metric, and an estimate of the seconds of one training.

        Raises:
            ValueError: If a module does not log the metric, or training fails.
        """
        trials = self.trials(Path(), RunLog())
        most = [trial for trial in trials if trial.labels == max(self.labels)]
        # By what the first one shows a folder is known: of `model`, scratch, which is always there.
        first = {id(self.starts[trial.start].make): trial for trial in reversed(most)}
        last = {id(self.starts[trial.start].make): trial for trial in most}
        tried = {trial.name: trial for trial in [*first.values(), *last.values()]}
        return [self._tried_one(trial) for trial in tried.values()][-1]

    def _tried_one(self, trial: Trial) -> tuple[str, float]:
        job = self.job(trial)
        loader = self.target.test
        make = self.starts[trial.start].make
        ends: list[float] = []  # of training steps

        def learn(trainer: Any, _module: Any) -> None:
            """Note this before the first step: schedules keep in their attributes what training has shown."""
            fresh = self.starts[trial.start].module(0)
            self.learned.setdefault(id(make), _learned(fresh, trainer))

        lightning = NAMESPACES[self.namespace]
        watch = lightning.callbacks.LambdaCallback(
            on_train_start=learn,
            on_train_batch_end=lambda *_: ends.append(time.perf_counter()),
        )
        options = {
            # So that the end of an epoch is reached, and what is monitored then has been validated.
            "limit_train_batches": TRIED,
            **job.options,
            "callbacks": [*job.options["callbacks"], watch],
            # In place of that of a run, which modules and callbacks may need, one that writes nothing.
            "logger": self.logged and lightning.loggers.logger.DummyLogger(),
            "max_steps": TRIED,
            "limit_test_batches": 1,
            "limit_val_batches": 1,
            "val_check_interval": None,
            "check_val_every_n_epoch": 1,
        }
        begun = time.perf_counter()
        try:
            with quiet():
                trainer = make_trainer(self.namespace, options)
                trainer.fit(job.module, **job.fit)
                if self.metric is None:
                    logged: Mapping[str, float] = own_error(job.module, loader, 1)
                else:
                    logged = trainer.test(job.module, dataloaders=loader, verbose=False)[0]
            if not ends:
                raise ValueError("`trainer` must train for one step at least, got none.")
            test = time.perf_counter() - ends[-1]
        except ValueError:
            raise
        except Exception as error:  # of the user's own module
            name = "model" if trial.start == SCRATCH else f"starts[{trial.start!r}]"
            rule = f"`{name}` must make a module that can be trained on `data`"
            raise ValueError(f"{rule}, but {reason_of(error)}") from error
        metric = self.metric or next(iter(logged))
        if metric == "accuracy" and logged.get(metric, 0) > 1:
            raise ValueError(f"`metric` must be a share if it is 'accuracy', got {logged[metric]}.")
        if metric not in logged:
            rule = "`metric` must be one that the module logs in its test_step"
            raise ValueError(f"{rule}, got {metric!r}; it logs {', '.join(logged) or 'none'}.")
        steps = job.options.get("max_steps", -1)
        if steps <= 0:
            steps = (job.options.get("max_epochs") or 1) * len(job.fit["train_dataloaders"])
        # What a Trainer takes to begin, and the first step, which prepares, come once.
        step = (ends[-1] - ends[0]) / max(1, len(ends) - 1)
        return metric, ends[0] - begun + steps * step + len(loader) * test


def _trainer_options(trainer: Any, accelerator: str, namespace: str) -> Values:
    """What every Trainer is made with, 20 epochs where the user says no length.

    Raises:
        ValueError: If an option is unknown, or is left to this package.
    """
    options: Values = {**(trainer or {})}
    if not LENGTHS & {*options}:
        options["max_epochs"] = 20
    if options.get("max_steps") == 0:
        raise ValueError("`trainer` must train for one step at least, got max_steps=0.")
    for name in RESERVED:
        if name in options:
            raise ValueError(f"`trainer` must leave {name} to transfer, got {options[name]!r}.")
    callbacks = options.get("callbacks") or []
    options["callbacks"] = callbacks if isinstance(callbacks, list) else [callbacks]
    check_trainer("`trainer` must hold options of Lightning's Trainer", namespace, options)
    return {"accelerator": accelerator, **options}


def _read_starts(
    make: MakeModule,
    starts: Mapping[str, Given],
    batch: Any,
) -> dict[str, Start]:
    """Scratch, and the user's starts; a batch shows which layer is the last one of each."""
    if not isinstance(starts, Mapping) or not starts:
        rule = "must hold at least one start by its name"
        raise ValueError(f"`starts` {rule}, got {starts!r}.")
    reading.check_new(make, "model")
    read = {SCRATCH: Start(make, {})}
    for name, given in starts.items():
        known = isinstance(name, str) and re.fullmatch(r"\w[\w.-]*", name, re.ASCII)
        if name == SCRATCH or not known:
            rule = "names of letters, digits and underscores, with dots and dashes inside, other than 'scratch'"
            raise ValueError(f"`starts` must have {rule}, got {name!r}.")
        start = reading.read_start(f"starts[{name!r}]", given, make)
        read[name] = replace(start, last=reading.last_layer(start.module(0), batch))
    return read


def _plain(options: Values) -> Values:
    """Options of the Trainer in JSON's types, callbacks by their own plain arguments."""
    found: Values = json.loads(json.dumps(options, default=_told))
    del found["accelerator"]
    return found


def _told(option: Any) -> Values:
    """What an option that is no plain value is known by: its kind, and its plain attributes or its text."""
    known: Values = {"kind": type(option).__qualname__, "text": _without_places(str(option))}
    attributes = getattr(option, "__dict__", {})
    plain = {name: x for name, x in attributes.items() if isinstance(x, bool | int | float | str)}
    return known | plain


def _without_places(said: str) -> str:
    """Leave out where something is in memory: that is another place in each process."""
    return re.sub(" at 0x[0-9a-f]+", "", said)


def _learned(module: Any, trainer: Any) -> Values:
    """What the way is known by in which a module learns: its layers, optimizers and schedules."""
    layers = _without_places(str(module))
    return {
        "network": hashlib.sha256(layers.encode()).hexdigest()[:12],
        "optimizers": [*map(_optimizer, trainer.optimizers)],
        "schedules": [*map(_schedule, trainer.lr_scheduler_configs)],
    }


def _optimizer(optimizer: Any) -> Values:
    """What an optimizer is known by: its kind, its defaults, and the rates that its groups begin with."""
    rates = [group.get("initial_lr", group.get("lr")) for group in optimizer.param_groups]
    settings = {name: str(value) for name, value in optimizer.defaults.items()}
    return {"kind": type(optimizer).__qualname__, "rates": [*map(str, rates)], **settings}


def _schedule(config: Any) -> Values:
    """What a schedule of the learning rate is known by: its kind, its plain settings, and when it steps."""
    return {**_told(config.scheduler), "interval": config.interval, "frequency": config.frequency}


def _class_axes(outputs: Tensor, truth: Tensor) -> set[int]:
    """Return which axes of the outputs may be that of the classes: the last, or, as for torch's losses, the second."""
    found = set()
    for axis in {1, outputs.ndim - 1}:
        if outputs.ndim > 1 and outputs.select(axis, 0).shape == truth.shape:
            found.add(axis)
    return found


@torch.no_grad()
def own_error(
    module: Any,
    loader: Loader,
    batches: int | None = None,
) -> dict[str, float]:
    """Return the share of wrong classes on the test set, or the mean squared error where targets are real numbers.

    Raises:
        ValueError: If a batch cannot be read.
    """
    total = count = 0.0
    with observing(module):
        for batch in islice(loader, batches):
            batch = moved(module.on_before_batch_transfer(batch, 0), module.device)
            try:
                inputs, truth = read_batch(module.on_after_batch_transfer(batch, 0), module)
                outputs = outputs_of(module, inputs)
            except ValueError as error:  # whose advice names arguments of other functions
                rule = "must be given where inputs, targets or outputs are not plain"
                raise ValueError(f"`metric` {rule}, got a batch of {described(batch)}.") from error
            if truth is None:
                raise ValueError(
                    "`metric` must be given where the targets of a test batch are not plain."
                )
            axes = _class_axes(outputs, truth)
            if truth.is_floating_point():
                name = "squared error"
                losses = (outputs.reshape(truth.shape) - truth).square()
                if batches is not None and ((truth == 0) | (truth == 1)).all():
                    rule = "must be given where targets are 0 and 1 as real numbers"
                    raise ValueError(f"`metric` {rule}, got none: logits have no squared error.")
            elif len(axes) == 1:
                name = "error"
                wrong = outputs.argmax(axes.pop()) != truth
                losses = wrong[truth >= 0]  # -100 marks what does not count
            else:
                rule = "must be given where outputs are no scores of classes, or their axis is not plain"
                shapes = f"outputs {list(outputs.shape)} for targets {list(truth.shape)}"
                raise ValueError(f"`metric` {rule}, got {shapes}.")
            if outputs.isnan().any():  # the largest of them is no prediction
                total = math.nan
            total += float(losses.double().sum())
            count += losses.numel()
    return {name: total / count if count else math.nan}


def certified_parts(target: Target, rows: Rows, labels: int) -> dict[str, Loader | None]:
    """Return the samples of a certificate, all of them independent draws, as :func:`certify` calls them.

    Args:
        target: The target data; its test set gives the test-set bound.
        rows: Rows of training samples in random order.
        labels: How many of them are trained on, and certified. Others are inputs that serve nothing
            else, if there are enough.
    """
    fresh = rows[labels:][:MOST_FRESH]
    return {
        "data": target.plain_loader(rows[:labels]),
        "unlabelled": target.plain_loader(fresh) if len(fresh) >= FEWEST else None,
        "held_out": target.test,
    }


def check_certified(parts: Mapping[str, Any], model: nn.Module) -> None:
    """Raise a ``ValueError`` where inputs occur twice, so that they cannot serve nothing else."""
    used, _ = read_inputs(parts["data"], model=model)
    for loader in (parts["held_out"], parts["unlabelled"]):
        if loader is None:
            continue
        inputs, _ = read_inputs(loader, argument="data", model=model)
        check_fresh("data", inputs, used, "the labelled samples, where `certify` is asked for")


def certified_bounds(
    parts: Mapping[str, Any],
    model: nn.Module,
    prior: Prior,
    seed: int,
) -> dict[str, Any]:
    """Return the three bounds on the true error of a trained network, as plain values.

    Args:
        parts: See :func:`certified_parts`.
        model: The trained network.
        prior: The prior, taken before training.
        seed: Of all draws.
    """
    reseed(seed, CERTIFIED)
    found = certify(model, prior=prior, seed=seed, progress=False, **parts)
    network = found.network
    assumptions = list(found.assumptions)
    if network is None:
        missing = f"no bound for the network itself, which needs {FEWEST} inputs without labels"
        assumptions.append(missing)
    return {
        "stochastic": found.bound,
        "network": network and network.bound,
        "test_set": found.test_set.bound,
        "confidence": min(found.confidence, network.confidence if network else 1.0),
        "valid": found.valid,
        "reasons": list(found.reasons),
        "assumptions": assumptions,
        "kl": found.kl,
        "risk": found.risk,
        "disagreement": network and network.disagreement,
    }
