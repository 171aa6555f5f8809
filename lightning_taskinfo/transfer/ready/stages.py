"""The ready recipe: starts are pretrained on a source, then fine-tuned on the target's labels."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from lightning_taskinfo._ranges import check_not_negative, check_positive
from lightning_taskinfo._warn import TaskInfoWarning, warn
from lightning_taskinfo.transfer.cells import SCRATCH, Cell, Job, Recipe, Stage
from lightning_taskinfo.transfer.logs import RunLog
from lightning_taskinfo.transfer.ready.backbones import (
    Backbone,
    backbone_name,
    feature_dim,
    make_backbone,
)
from lightning_taskinfo.transfer.ready.data import TransferDataModule
from lightning_taskinfo.transfer.ready.measure import (
    fisher_of,
    information_by_layer,
    overlap_of,
    trace_by_layer,
)
from lightning_taskinfo.transfer.ready.methods import (
    PENALTIES,
    acting,
    check_weights,
    parse_method,
)
from lightning_taskinfo.transfer.ready.module import CLASSES, FineTune
from lightning_taskinfo.transfer.sampling import check_different, generators_kept, reseed
from lightning_taskinfo.transfer.training import Fitted, load_weights
from lightning_taskinfo.variational import plain_state_dict

VERSION = 3  # of the files in a folder: raise it when the same configuration gives other numbers
STREAMS = {"pretrain": 0, "fine_tune": 1, "scratch": 2, "backbone": 3, "head": 4}  # of randomness
MEASURED = 256  # target inputs in the Fisher information


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
    """

    pretrain_epochs: int = 5
    fine_tune_epochs: int = 20
    fine_tune: FineTune = "full"
    learning_rate: float = 1e-3
    fine_tune_learning_rate: float | None = None
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        for name in ("pretrain_epochs", "fine_tune_epochs"):
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` must be at least 1, got {getattr(self, name)}.")
        check_positive(
            learning_rate=self.learning_rate,
            fine_tune_learning_rate=self.fine_tune_learning_rate,
        )
        check_not_negative(weight_decay=self.weight_decay)
        if self.fine_tune not in ("full", "linear", "layerwise"):
            raise ValueError(
                f"`fine_tune` must be 'full', 'linear' or 'layerwise', got {self.fine_tune!r}."
            )

    def epochs(self, stage: Stage) -> int:
        """Return the epochs of a stage; training from scratch has those of fine-tuning."""
        return self.pretrain_epochs if stage == "pretrain" else self.fine_tune_epochs


@dataclass(frozen=True)
class Ready(Recipe):
    """Trainings of the ready parts.

    Attributes:
        backbone: Name or function of the network.
        data: Arguments of :class:`TransferDataModule`, but for labels and seed.
        methods: The methods.
        stages: How each stage trains.
        weights: Weights of the penalties.
    """

    backbone: Backbone
    data: Mapping[str, Any]
    methods: Sequence[str]
    stages: Stages
    weights: Mapping[str, float]

    def cells(self, root: Path, log: RunLog) -> list[Cell]:
        """Return all trainings, pretraining and scratch first; methods that pretrain alike share one."""

        def cell(stage: Stage, method: str, count: int, seed: int) -> Cell:
            start = "+".join(acting(method, "pretrain")) or "standard"
            pretraining = f"pretrain-{start}-seed{seed}"
            return Cell(
                self,
                root,
                log,
                name=pretraining if stage == "pretrain" else f"{method}-{count}-seed{seed}",
                stage=stage,
                method=method,
                labels=count,
                seed=seed,
                start=SCRATCH if stage == "scratch" else start,
                way=self.stages.fine_tune if stage == "fine_tune" else "full",
                needs=pretraining if stage == "fine_tune" else None,
            )

        most = max(self.labels)
        pairs = [(count, seed) for seed in self.seeds for count in self.labels]
        cells = [cell("pretrain", m, most, seed) for seed in self.seeds for m in self.methods]
        cells += [cell("scratch", SCRATCH, count, seed) for count, seed in pairs]
        cells += [cell("fine_tune", m, count, seed) for count, seed in pairs for m in self.methods]
        return list({cell.name: cell for cell in reversed(cells)}.values())[::-1]

    def job(self, cell: Cell) -> Job:
        """Return the network of a stage, with what is known of it before and found after training."""
        data = self._data(cell)
        pretraining = cell.stage == "pretrain"
        module = self._module(cell, data, cell.method)
        job: dict[str, Any] = {
            "module": module,
            "seeds": (cell.seed, STREAMS[cell.stage]),
            "fit": {"datamodule": data},
            "test": {"datamodule": data},
            "options": {
                "max_epochs": self.stages.epochs(cell.stage),
                "accelerator": self.accelerator,
                "devices": 1,
                "log_every_n_steps": 10,
            },
            "weights": lambda: _plain(module),
            "ours": True,
        }
        if pretraining:
            if "lautum" in module.penalties:
                module.lautum.fit_inputs(_InputsOnly(data))
            module.add_noise()
            return Job(**job, after=lambda fitted: ({"test": _scores(fitted.test)}, {}))
        initial = _plain(module)
        if cell.needs is not None:
            module.backbone.load_state_dict(_backbone(load_weights(cell.pretrained)))
        begun = _plain(module)
        before = self._measure(cell, data, begun, information=initial)
        overlap = None
        if cell.needs is not None:
            labelled = data.labeled.__getitems__(range(len(data.labeled)))[0]
            overlap = overlap_of(module.backbone, *labelled, seed=cell.seed)
        module.freeze_for(0)
        module.add_noise()

        def after(fitted: Fitted) -> tuple[dict[str, Any], dict[str, Any]]:
            found = self._measure(cell, data, _plain(module), information=initial, added=begun)
            added = found.pop("added")
            traces = {"before": before["fisher_trace"], "after": found["fisher_trace"]}
            nats = {"before": before["information"], "after": found["information"], "added": added}
            return {
                "test": _scores(fitted.test),
                "missed_share": fitted.test["test_squared_error"] / _label_variance(data),
                "information": nats,
                "fisher_trace": traces,
                "overlap": overlap,
            }, {"after": found, "added": added}

        missed = {} if overlap is None else zip(overlap["layers"], overlap["outside"], strict=True)
        return Job(**job, after=after, before={"before": before, "outside_span": dict(missed)})

    def _data(self, cell: Cell) -> TransferDataModule:
        arguments = {**self.data, "seed": cell.seed}
        if isinstance(arguments["labels"], int):  # otherwise the labelled rows are given
            arguments["labels"] = cell.labels
        data = TransferDataModule(**arguments)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", TaskInfoWarning)  # heard before the first cell
            data.setup()
        return data.use("pretrain" if cell.stage == "pretrain" else "fine_tune")

    def _module(self, cell: Cell, data: TransferDataModule, method: str) -> Any:
        """A network whose initial weights depend on the seed alone: those of a pretraining are those of scratch."""
        pretraining, stages = cell.stage == "pretrain", self.stages
        reseed(cell.seed, STREAMS["backbone"])
        backbone = make_backbone(self.backbone, data.image_shape)
        reseed(cell.seed, STREAMS["head"])
        rate = stages.fine_tune_learning_rate if cell.stage == "fine_tune" else None
        return CLASSES[self.namespace](
            backbone,
            data.source_classes if pretraining else data.target_classes,
            data.image_shape,
            method=method,
            stage=cell.stage,
            weights=self.weights,
            fine_tune=stages.fine_tune,
            learning_rate=rate or stages.learning_rate,
            weight_decay=stages.weight_decay,
            num_labeled=len(data.source if pretraining else data.labeled),
            num_unlabeled=len(data.unlabeled),
            num_indices=data.num_indices,
            epochs=stages.epochs(cell.stage),
            seed=cell.seed,
        )

    def _measure(
        self,
        cell: Cell,
        data: TransferDataModule,
        weights: Mapping[str, Tensor],
        **origins: Mapping[str, Tensor],
    ) -> dict[str, Any]:
        """The Fisher trace, and the information in the weights from each of some origins, by name."""
        model = self._module(cell, data, "standard")
        model.load_state_dict(dict(weights))
        inputs, _ = data.unlabeled.__getitems__(range(min(MEASURED, len(data.unlabeled))))
        fisher = fisher_of(model, inputs, data.target_classes, seed=cell.seed)
        nats = {
            name: information_by_layer(fisher, weights, w0, len(data.labeled))
            for name, w0 in origins.items()
        }
        return {"fisher_trace": trace_by_layer(fisher), **nats}


def ready_recipe(
    model: Backbone,
    data: TransferDataModule,
    methods: Sequence[str],
    labels: Sequence[int] | None,
    seeds: Sequence[int],
    stages: Stages,
    weights: Mapping[str, float],
    namespace: str,
    accelerator: str,
) -> Ready:
    """Check everything, split for every number of labels and make a network, before a file is made.

    Raises:
        ValueError: If something does not fit.
        TypeError: If ``data`` is of another kind.
    """
    if not isinstance(data, TransferDataModule):
        raise TypeError(
            f"`data` must be a TransferDataModule where there are no `starts`, got a {type(data).__name__}; "
            "`starts` takes your own module, data and checkpoints."
        )
    if isinstance(methods, str):
        raise ValueError(
            f"`methods` must be a list of methods, got {methods!r}; one alone is [{methods!r}]."
        )
    methods = [method for method in dict.fromkeys(methods) if method != SCRATCH]
    check_different("methods", methods)
    check_used(weights, methods)
    rows = data.arguments["labels"]
    given = not isinstance(rows, int)
    if given and labels is not None:
        raise ValueError("`labels` must be left out where `data` names the labelled rows.")
    if labels is None:
        labels = [len(rows) if given else rows]
    weights = check_weights(weights)
    source, target = data.tasks()
    for count in labels:
        split = data.replaced(seed=seeds[0], **({} if given else {"labels": count}))
        split.setup()
    with generators_kept():
        network = make_backbone(model, split.image_shape, argument="model")
        feature_dim(network, split.image_shape, argument="model")
    configuration = {
        "version": VERSION,
        "backbone": backbone_name(model, argument="model"),
        "data": data.describe(),
        "stages": asdict(stages),
        "weights": weights,
    }
    return Ready(
        f"{source.name} → {target.name}",
        namespace,
        configuration,
        labels,
        seeds,
        accelerator,
        None,
        model,
        data.settled().arguments,
        methods,
        stages,
        weights,
    )


def check_used(weights: Mapping[str, float], methods: Sequence[str]) -> None:
    """Warn of weights that no method has a use for."""
    used = {part for method in methods for part in parse_method(method, argument="methods")}
    if unused := [name for name in weights if name in PENALTIES and name not in used]:
        warn(f"`weights` of {', '.join(unused)} are not used by `methods` {', '.join(methods)}.")


class _InputsOnly:
    """The unlabelled inputs, batch by batch, as often as they are asked for."""

    def __init__(self, data: TransferDataModule) -> None:
        self.data = data

    def __iter__(self) -> Any:
        return (x for x, _ in self.data.unlabeled_dataloader())


def _backbone(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {n.removeprefix("backbone."): w for n, w in weights.items() if n.startswith("backbone.")}


def _plain(module: Any) -> dict[str, Tensor]:
    """Weights and buffers of backbone and head, without noise, on the processor."""
    return {
        f"{part}.{name}": tensor.detach().cpu().clone()
        for part in ("backbone", "head")
        for name, tensor in plain_state_dict(getattr(module, part)).items()
    }


def _label_variance(data: TransferDataModule) -> float:
    assert data.target_test.y is not None
    shares = data.target_test.y.bincount(minlength=data.target_classes) / len(data.target_test)
    return float(1 - shares.square().sum())


def _scores(test: Mapping[str, float]) -> dict[str, float]:
    return {"accuracy": test["test_accuracy"], "loss": test["test_loss"]}
