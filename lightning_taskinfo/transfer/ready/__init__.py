"""The ready recipe: starts are pretrained on a source, then fine-tuned on the target's labels.

``module.py`` has the networks and the methods, ``data.py`` source and target.
"""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Generator, Tensor

from lightning_taskinfo._files import read_tensors
from lightning_taskinfo._ranges import check_counts, check_not_negative, check_positive
from lightning_taskinfo._warn import TaskInfoWarning, warn
from lightning_taskinfo.fisher import fisher_diagonal
from lightning_taskinfo.functional.information import information_in_weights
from lightning_taskinfo.transfer import sampling
from lightning_taskinfo.transfer.overlap import feature_overlap
from lightning_taskinfo.transfer.ready import module
from lightning_taskinfo.transfer.ready.data import TransferDataModule
from lightning_taskinfo.transfer.training import (
    ADVICE,
    SCRATCH,
    After,
    Job,
    Recipe,
    Row,
    RunLog,
    Stage,
    Trial,
    Values,
)
from lightning_taskinfo.variational import plain_state_dict

VERSION = 3  # of the files in a folder: raise it when the same configuration gives other numbers
STREAMS = {"pretrain": 0, "fine_tune": 1, "scratch": 2, "backbone": 3, "head": 4}  # of randomness
MEASURED = 256  # target inputs in the Fisher information
MAX_EXACT_CLASSES = 20  # their cost grows with the classes: beyond, labels are sampled
PRIOR_STD = 0.1
FEWEST = 20  # labels for five folds
Weights = Mapping[str, Tensor]


@dataclass(frozen=True)
class Stages:
    """How long and how each stage trains.

    Args:
        pretrain_epochs: Epochs on the source.
        fine_tune_epochs: Epochs on the target, from the pretrained weights or from scratch. An
            epoch goes once through the unlabelled inputs, or the labelled ones if they are more,
            with any method, so that all take the same number of steps.
        fine_tune: ``"full"``, ``"linear"`` (the head on frozen features) or ``"layerwise"``.
        learning_rate: Of Adam while pretraining and from scratch.
        fine_tune_learning_rate: While fine-tuning; the same where ``None``.
        weight_decay: Of Adam.

    Raises:
        ValueError: If a number is out of range.
        TypeError: If a number of epochs is no whole number.
    """

    pretrain_epochs: int = 5
    fine_tune_epochs: int = 20
    fine_tune: module.FineTune = "full"
    learning_rate: float = 1e-3
    fine_tune_learning_rate: float | None = None
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        check_counts(pretrain_epochs=self.pretrain_epochs, fine_tune_epochs=self.fine_tune_epochs)
        check_positive(
            learning_rate=self.learning_rate,
            fine_tune_learning_rate=self.fine_tune_learning_rate,
        )
        check_not_negative(weight_decay=self.weight_decay)
        module.check_fine_tune(self.fine_tune)

    def epochs(self, stage: Stage) -> int:
        """Return the epochs of a stage; training from scratch has those of fine-tuning."""
        return self.pretrain_epochs if stage == "pretrain" else self.fine_tune_epochs


class Ready(Recipe):
    """Trainings of the ready parts; all is checked, split and made once before a file is.

    Args:
        backbone: Name or function of the network.
        data: Source and target.
        labels: Numbers of labels; that of ``data`` where ``None``.
        seeds: The seeds.
        accelerator: Where to train.
        namespace: Whose modules they are.
        methods: The methods; ``["standard"]`` where ``None``.
        stages: How each stage trains.
        weights: Weights of the penalties, where not the usual ones.

    Raises:
        ValueError: If something does not fit.
        TypeError: If ``data`` is of another kind.
    """

    def __init__(
        self,
        backbone: module.Backbone,
        data: TransferDataModule,
        labels: Sequence[int] | None,
        seeds: Sequence[int],
        accelerator: str,
        namespace: str,
        *,
        methods: Sequence[str] | None,
        stages: Stages | None,
        weights: Mapping[str, float] | None,
    ) -> None:
        if not isinstance(data, TransferDataModule):
            raise TypeError(
                f"`data` must be a TransferDataModule where there are no `starts`, got a {type(data).__name__}; "
                "`starts` takes your own module, data and checkpoints."
            )
        if isinstance(methods, str):
            raise ValueError(
                f"`methods` must be a list of methods, got {methods!r}; one alone is [{methods!r}]."
            )
        wanted = ["standard"] if methods is None else methods
        self.methods = [method for method in wanted if method != SCRATCH]
        sampling.check_different("methods", self.methods)
        for method in self.methods:
            module.parse_method(method, argument="methods")
        rows = data.arguments["labels"]
        self.given = not isinstance(rows, int)  # the labelled rows
        if self.given and labels is not None:
            raise ValueError("`labels` must be left out where `data` names the labelled rows.")
        self.labels = labels or [len(rows) if self.given else rows]
        self.seeds = seeds
        self.stages = stages or Stages()
        self.weights = module.all_weights(weights or {})
        _check_used(weights or {}, self.methods)
        self.namespace = namespace
        self.accelerator = accelerator
        self.backbone = backbone
        self.origins = {}
        self.data = data.settled()
        self.title = " → ".join(task.name for task in self.data.tasks())
        for count in self.labels:
            split = self._data(count, seeds[0])
        with sampling.generators_kept():
            module.make_backbone(backbone, split.image_shape, argument="model")
        self.configuration = {
            "version": VERSION,
            "backbone": module.backbone_name(backbone, argument="model"),
            "data": self.data.describe(),
            "stages": asdict(self.stages),
            "weights": self.weights,
        }

    def trials(self, root: Path, log: RunLog) -> list[Trial]:
        """Return the trainings of each seed, pretraining first; methods that pretrain alike share one."""
        cells: list[tuple[Stage, str, int]] = []
        cells += [("pretrain", method, max(self.labels)) for method in self.methods]
        cells += [("scratch", SCRATCH, count) for count in self.labels]
        cells += [("fine_tune", method, n) for n, method in product(self.labels, self.methods)]
        found: dict[str, Trial] = {}
        for seed, (stage, method, count) in product(self.seeds, cells):
            start = "+".join(module.acting(method, "pretrain")) or "standard"
            pretraining = f"pretrain-{start}-seed{seed}"
            name = pretraining if stage == "pretrain" else f"{method}-{count}-seed{seed}"
            found[name] = Trial(
                self,
                root,
                log,
                name=name,
                stage=stage,
                method=method,
                labels=count,
                seed=seed,
                start=SCRATCH if stage == "scratch" else start,
                way=self.stages.fine_tune if stage == "fine_tune" else "full",
                needs=found[pretraining] if stage == "fine_tune" else None,
            )
        return [*found.values()]

    def job(self, trial: Trial) -> Job:
        """Return the network of a stage, with what is known of it before and found after training."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", TaskInfoWarning)  # heard before the first training
            data = self._data(trial.labels, trial.seed)
        net = self._module(trial, data, trial.method)
        before: Values = {}
        after: After = _scores
        if trial.stage == "pretrain":
            if "lautum" in net.penalties:
                net.lautum.fit_inputs(data.unlabeled_dataloader())
        else:
            data.use("fine_tune")
            before, after = self._measured(trial, data, net)
            net.setup("fit")
        net.add_noise()
        return Job(
            module=net,
            seeds=(trial.seed, STREAMS[trial.stage]),
            fit={"datamodule": data},
            test={"datamodule": data},
            options={
                "max_epochs": self.stages.epochs(trial.stage),
                "accelerator": self.accelerator,
            },
            weights=lambda: _plain(net),
            after=after,
            before=before,
            ours=True,
        )

    def _data(self, labels: int, seed: int) -> TransferDataModule:
        changes = {} if self.given else {"labels": labels}
        data = self.data.replaced(seed=seed, **changes)
        data.setup()
        return data

    def _measured(
        self,
        trial: Trial,
        data: TransferDataModule,
        net: Any,
    ) -> tuple[Values, After]:
        """Load pretrained weights if there are some; return what is logged before training, and what finds the rest."""
        initial = start = _plain(net)
        overlap = None
        if trial.needs is not None:
            known = read_tensors(trial.needs.weights, advice=ADVICE)
            parts = [(name.partition("."), weight) for name, weight in known.items()]
            body = {name: weight for (part, _, name), weight in parts if part == "backbone"}
            net.backbone.load_state_dict(body)
            start = _plain(net)
            overlap = _overlap(data, net.backbone, trial.seed)
        measured = self._measure(trial, data, start, information=initial)
        outside = {}
        if overlap is not None:
            outside = dict(zip(overlap["layers"], overlap["outside"], strict=True))

        def after(test: Row) -> tuple[Values, Values]:
            found = self._measure(trial, data, _plain(net), information=initial, added=start)
            added = found.pop("added")
            y: Any = data.target_test.y
            shares = y.bincount(minlength=data.target_classes) / len(y)
            variance = float(1 - shares.square().sum())  # of the labels
            result, _ = _scores(test)
            result["missed_share"] = test["test_squared_error"] / variance
            for name in ("information", "fisher_trace"):
                result[name] = {"before": measured[name], "after": found[name]}
            result["information"]["added"] = added
            result["overlap"] = overlap
            return result, {"after": found, "added": added}

        return {"before": measured, "outside_span": outside}, after

    def _module(self, trial: Trial, data: TransferDataModule, method: str) -> Any:
        """A network whose initial weights depend on the seed alone: those of a pretraining are those of scratch."""
        stages = self.stages
        pretraining = trial.stage == "pretrain"
        sampling.reseed(trial.seed, STREAMS["backbone"])
        backbone = module.make_backbone(self.backbone, data.image_shape)
        sampling.reseed(trial.seed, STREAMS["head"])
        rate = stages.fine_tune_learning_rate if trial.stage == "fine_tune" else None
        return module.CLASSES[self.namespace](
            backbone,
            data.source_classes if pretraining else data.target_classes,
            data.image_shape,
            method=method,
            stage=trial.stage,
            weights=self.weights,
            fine_tune=stages.fine_tune,
            learning_rate=rate or stages.learning_rate,
            weight_decay=stages.weight_decay,
            num_labeled=len(data.source if pretraining else data.labeled),
            num_unlabeled=len(data.unlabeled),
            num_indices=data.num_indices,
            epochs=stages.epochs(trial.stage),
            seed=trial.seed,
        )

    def _measure(
        self,
        trial: Trial,
        data: TransferDataModule,
        weights: Weights,
        **origins: Weights,
    ) -> Values:
        r"""The Fisher trace, and the information in the weights from each of some origins, by name.

        That is :math:`\mathrm{KL}(Q \| P)` in nats for :math:`P = N(w_0, 0.1^2 I)`, with
        :math:`\beta = 1`; see
        :func:`~lightning_taskinfo.functional.information.information_in_weights`.
        """
        model = self._module(trial, data, "standard")
        model.load_state_dict(dict(weights))
        count = min(MEASURED, len(data.unlabeled))
        inputs, _ = data.unlabeled.__getitems__(range(count))
        fisher = fisher_diagonal(
            model.eval(),
            inputs,
            labels="exact" if data.target_classes <= MAX_EXACT_CLASSES else "sampled",
            generator=Generator(inputs.device).manual_seed(trial.seed),
        )
        n = len(data.labeled)
        found = {"fisher_trace": _by_layer({name: f.double().sum() for name, f in fisher.items()})}
        for origin, w0 in origins.items():
            nats = {}
            for name, f in fisher.items():
                moved = weights[name] - w0[name]
                nats[name] = information_in_weights(n * f, moved, prior_std=PRIOR_STD, beta=1.0).kl
            found[origin] = _by_layer(nats)
        return found


def _by_layer(values: Mapping[str, Tensor]) -> Values:
    """``{"total": value, "layers": {name: value}}`` of values by parameter."""
    layers: dict[str, float] = {}
    for name, value in values.items():
        layer = name.rpartition(".")[0] or name
        layers[layer] = layers.get(layer, 0.0) + float(value)
    return {"total": sum(layers.values()), "layers": layers}


def _overlap(data: TransferDataModule, backbone: Any, seed: int) -> Values | None:
    """What the features of a pretrained network miss of the target labels; ``None`` with too few for five folds.

    The seed decides the order in which folds are taken.
    """
    n = len(data.labeled)
    if n < FEWEST:
        return None
    order = torch.randperm(n, generator=Generator().manual_seed(seed))
    batch, _ = data.labeled.__getitems__(order.tolist())
    found = feature_overlap(backbone, [batch])
    return {
        "layers": list(found.layers),
        "outside": found.outside.tolist(),
        "standard_error": found.standard_error.tolist(),
    }


def _scores(test: Row) -> tuple[Values, Values]:
    """What a pretraining is judged by."""
    return {"test": {"accuracy": test["test_accuracy"], "loss": test["test_loss"]}}, {}


def _plain(net: Any) -> dict[str, Tensor]:
    """Weights and buffers of backbone and head, without noise, on the processor."""
    state = plain_state_dict(net)
    ours = [name for name in state if name.startswith(("backbone.", "head."))]
    return {name: state[name].detach().cpu().clone() for name in ours}


def _check_used(weights: Mapping[str, float], methods: Sequence[str]) -> None:
    """Warn of weights that no method has a use for."""
    used = {name for method in methods for name in module.parse_method(method)}
    unused = [name for name in weights if name in module.PENALTIES and name not in used]
    if unused:
        warn(f"`weights` of {', '.join(unused)} are not used by `methods` {', '.join(methods)}.")
