"""The ready recipe: starts are pretrained on a source, then adapted to the target like any other.

``module.py`` has the networks and the methods, ``data.py`` source and target.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Generator, Tensor

from lightning_taskinfo._lightning import DEFAULT
from lightning_taskinfo._observe import layer_of
from lightning_taskinfo._ranges import check_counts, check_positive
from lightning_taskinfo.fisher import fisher_diagonal
from lightning_taskinfo.functional.information import information_in_weights
from lightning_taskinfo.transfer.overlap import feature_overlap
from lightning_taskinfo.transfer.ready.data import TransferDataModule
from lightning_taskinfo.transfer.ready.module import (
    Backbone,
    Stage,
    TransferClassifier,
    acting,
    all_weights,
    make_backbone,
)
from lightning_taskinfo.transfer.sampling import check_different, generators_kept
from lightning_taskinfo.transfer.starts import Adapt, Start
from lightning_taskinfo.transfer.training import SCRATCH, After, Job, Recipe, Row, Trial, Values
from lightning_taskinfo.variational import plain_state_dict

VERSION = 4  # of the files in a folder: raise it when the same configuration gives other numbers
STREAMS = {"pretrain": 0, "fine_tune": 1, "scratch": 2}  # of randomness
HEAD = ("head.weight", "head.bias")
MEASURED = 256  # target inputs in the Fisher information
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
        learning_rate: Of Adam while pretraining and from scratch.
        fine_tune_learning_rate: While fine-tuning; the same where ``None``.

    Raises:
        ValueError: If a number is out of range.
        TypeError: If a number of epochs is no whole number.
    """

    pretrain_epochs: int = 5
    fine_tune_epochs: int = 20
    learning_rate: float = 1e-3
    fine_tune_learning_rate: float | None = None

    def __post_init__(self) -> None:
        check_counts(pretrain_epochs=self.pretrain_epochs, fine_tune_epochs=self.fine_tune_epochs)
        check_positive(
            learning_rate=self.learning_rate,
            fine_tune_learning_rate=self.fine_tune_learning_rate,
        )

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
        adapt: Ways to adapt.
        methods: The methods; ``["standard"]`` where ``None``.
        stages: How each stage trains.
        weights: Weights of the penalties, where not the usual ones.

    Raises:
        ValueError: If something does not fit.
        TypeError: If ``data`` is of another kind.
    """

    def __init__(
        self,
        backbone: Backbone,
        data: TransferDataModule,
        labels: Sequence[int] | None,
        seeds: Sequence[int],
        accelerator: str,
        adapt: Sequence[Adapt] | str,
        *,
        methods: Sequence[str] | str | None,
        stages: Stages | None,
        weights: Mapping[str, float] | None,
    ) -> None:
        if not isinstance(data, TransferDataModule):
            raise TypeError(
                f"`data` must be a TransferDataModule where there are no `starts`, got a {type(data).__name__}; "
                "`starts` takes your own module, data and checkpoints."
            )
        if isinstance(methods, str):
            methods = [methods]
        methods = ["standard"] if methods is None else [*methods]
        check_different("methods", methods)
        self.pretrained = {}
        self.learned = {}
        for method in methods:
            self.pretrained[method] = "+".join(acting(method, "pretrain")) or "standard"
        self.labels = labels or [data.arguments["labels"]]
        self.seeds = seeds
        self.accelerator = accelerator
        self.namespace = DEFAULT
        self.origins = {}
        self.backbone = backbone
        self.stages = stages or Stages()
        self.weights = all_weights(weights or {})
        tasks = data.tasks()
        self.title = " → ".join(task.name for task in tasks.values())
        self.data = data.replaced(**tasks)  # read once, and good for other processes
        for count in self.labels:
            split = self._split(count, seeds[0])
        self.classes = {"pretrain": split.source_classes, "fine_tune": split.target_classes}
        self.sizes: Values = {
            "image_shape": split.image_shape,
            "num_unlabeled": len(split.unlabeled),
            "num_indices": split.num_indices,
        }
        self.starts = {
            name: Start(partial(self._module, name), {}, fresh=HEAD) for name in (SCRATCH, *methods)
        }
        with generators_kept():
            self.take_ways(adapt)
            network = make_backbone(backbone, split.image_shape)
        self.configuration = {
            "version": VERSION,
            "backbone": str(getattr(backbone, "__qualname__", network)),  # of a partial, its layers
            "data": self.data.describe(),
            "stages": asdict(self.stages),
            "weights": self.weights,
        }

    def _split(self, labels: int, seed: int) -> TransferDataModule:
        data = self.data.replaced(labels=labels, seed=seed)
        data.setup()
        return data

    def _module(
        self,
        method: str,
        stage: Stage = "fine_tune",
        labels: int = 1,
        seed: int = 0,
    ) -> TransferClassifier:
        """The network of a method in a stage; what is fresh in it is the same for all methods and stages."""
        stages = self.stages
        rate = stages.fine_tune_learning_rate if stage == "fine_tune" else None
        if method == SCRATCH:
            method, rate = "standard", None
        return TransferClassifier(
            make_backbone(self.backbone, self.sizes["image_shape"]),
            self.classes[stage],
            method=method,
            stage=stage,
            weights=self.weights,
            learning_rate=rate or stages.learning_rate,
            num_labeled=labels,
            epochs=stages.epochs(stage),
            seed=seed,
            **self.sizes,
        )

    def job(self, trial: Trial) -> Job:
        """Return the network of a stage, with what is known of it before and found after training."""
        stage: Stage = "pretrain" if trial.stage == "pretrain" else "fine_tune"
        data = self._split(trial.labels, trial.seed).use(stage)
        make = partial(self._module, trial.start, stage, trial.labels, trial.seed)
        net = Start(make, trial.needs.weights if trial.needs else {}).module(trial.seed)
        before: Values = {}
        after: After = _scores
        kept: Sequence[str] = HEAD
        if stage == "fine_tune":
            initial = _plain(Start(make, {}).module(trial.seed))
            before, after = self._measured(trial, data, net, initial)
            self.adapted(net, trial.start, trial.way)
        else:
            kept = ()  # the head is that of the source
            if "lautum" in net.penalties:
                net.lautum.fit_inputs(data.unlabeled_dataloader())
        return Job(
            module=net,
            seeds=(trial.seed, STREAMS[trial.stage]),
            fit={"datamodule": data},
            test={"datamodule": data},
            options={"max_epochs": self.stages.epochs(stage), "accelerator": self.accelerator},
            weights=lambda: _plain(net, kept),
            after=after,
            before=before,
        )

    def _measured(
        self,
        trial: Trial,
        data: TransferDataModule,
        net: TransferClassifier,
        initial: Weights,
    ) -> tuple[Values, After]:
        """What is logged before training, and what finds the rest after it."""
        start = _plain(net)
        measured = self._measure(data, start, information=initial)
        overlap = None if trial.needs is None else _overlap(data, net.backbone, trial.seed)
        outside = {}
        if overlap is not None:
            outside = dict(zip(overlap["layers"], overlap["outside"], strict=True))

        def after(test: Row) -> tuple[Values, Values]:
            found = self._measure(data, _plain(net), information=initial, added=start)
            added = found.pop("added")
            result, _ = _scores(test)
            for name in ("information", "fisher_trace"):
                result[name] = {"before": measured[name], "after": found[name]}
            result["information"]["added"] = added
            result["overlap"] = overlap
            return result, {"after": found, "added": added}

        return {"before": measured, "outside_span": outside}, after

    def _measure(
        self,
        data: TransferDataModule,
        weights: Weights,
        **origins: Weights,
    ) -> Values:
        r"""The Fisher trace, and the information in the weights from each of some origins, by name.

        That is :math:`\mathrm{KL}(Q \| P)` in nats for :math:`P = N(w_0, 0.1^2 I)`, with
        :math:`\beta = 1`; see
        :func:`~lightning_taskinfo.functional.information.information_in_weights`.
        """
        model = self._module(SCRATCH)
        model.load_state_dict(dict(weights))
        inputs, _ = data.unlabeled.__getitems__(range(len(data.unlabeled))[:MEASURED])
        fisher = fisher_diagonal(model.eval(), inputs, labels="exact")
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
    layers = defaultdict[str, float](float)
    for name, value in values.items():
        layers[layer_of(name) or name] += float(value)
    return {"total": sum(layers.values()), "layers": dict(layers)}


def _overlap(data: TransferDataModule, backbone: Any, seed: int) -> Values | None:
    """What the features of a pretrained network miss of the target labels; ``None`` with too few for five folds.

    The seed decides the order in which folds are taken.
    """
    n = len(data.labeled)
    if n < FEWEST:
        return None
    order = torch.randperm(n, generator=Generator().manual_seed(seed))
    batch, _ = data.labeled.__getitems__(order.tolist())
    found = feature_overlap(backbone, [batch]).to_dict()
    del found["samples"]
    return found


def _scores(test: Row) -> tuple[Values, Values]:
    """What a pretraining is judged by."""
    return {"test": {"accuracy": test["test_accuracy"], "loss": test["test_loss"]}}, {}


def _plain(net: Any, head: Sequence[str] = HEAD) -> dict[str, Tensor]:
    """Weights and buffers of the backbone, and of the head, without noise, on the processor."""
    state = plain_state_dict(net)
    ours = [name for name in state if name.startswith("backbone.") or name in head]
    return {name: state[name].detach().cpu().clone() for name in ours}
