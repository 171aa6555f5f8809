"""The stages of a ready transfer, each a cell that another process can run, and what their networks know."""

import time
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_taskinfo._files import read_result, write_tensors
from lightning_taskinfo._lightning import DEFAULT
from lightning_taskinfo._ranges import check_not_negative, check_positive
from lightning_taskinfo._warn import TaskInfoWarning
from lightning_taskinfo.fisher import fisher_diagonal
from lightning_taskinfo.functional.information import information_in_weights
from lightning_taskinfo.transfer.logs import RunLog
from lightning_taskinfo.transfer.overlap import (
    FeatureOverlap,
    crossings,
    feature_overlap,
    fitted_curve,
)
from lightning_taskinfo.transfer.ready.backbones import Backbone, make_backbone
from lightning_taskinfo.transfer.ready.data import TransferDataModule
from lightning_taskinfo.transfer.ready.methods import Stage, acting, check_weights
from lightning_taskinfo.transfer.ready.module import CLASSES, FineTune
from lightning_taskinfo.transfer.sampling import generators_kept, reseed
from lightning_taskinfo.transfer.training import fit_stage, load_weights
from lightning_taskinfo.variational import plain_state_dict

STREAMS = {
    "pretrain": 0,
    "fine_tune": 1,
    "scratch": 2,
    "backbone": 3,
    "head": 4,
}  # of random numbers, one a purpose
MEASURED = 256  # target inputs in the Fisher information


@dataclass(frozen=True)
class Stages:
    """How long and how each stage trains.

    Args:
        pretrain_epochs: Epochs on the source.
        fine_tune_epochs: Epochs on the target, from the pretrained weights or from scratch. An epoch goes once through
            the unlabelled inputs, or the labelled ones if they are more, with any method, so that all take the same
            number of steps.
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
class Experiment:
    """All that the cells of one transfer share.

    Attributes:
        folder: Where stages keep their files.
        backbone: Name or function of the network.
        data: Arguments of :class:`TransferDataModule`, but for labels and seed.
        stages: How each stage trains.
        weights: Weights of the penalties.
        log: Where a run's metrics go.
        namespace: Lightning's.
        accelerator: Where to train.
    """

    folder: Path
    backbone: Backbone
    data: Mapping[str, Any]
    stages: Stages = field(default_factory=Stages)
    weights: Mapping[str, float] = field(default_factory=dict)
    log: RunLog = field(default_factory=RunLog)
    namespace: str = DEFAULT
    accelerator: str = "cpu"

    def stage_folder(self, name: str) -> Path:
        """Return the folder of one cell."""
        return self.folder / "stages" / name

    def result(self, name: str) -> Path:
        """Return the file with the result of one cell."""
        return self.folder / "results" / f"{name}.json"


@dataclass(frozen=True)
class Cell:
    """One stage of one method, number of labels and seed; ``labels`` does not matter while pretraining."""

    experiment: Experiment
    stage: Stage
    method: str
    labels: int
    seed: int

    @property
    def name(self) -> str:
        """A name that is good for a file."""
        if self.stage == "pretrain":
            return f"pretrain-{'+'.join(acting(self.method, 'pretrain')) or 'standard'}-seed{self.seed}"
        method = "scratch" if self.stage == "scratch" else self.method
        return f"{method}-{self.labels}-seed{self.seed}"

    @property
    def source(self) -> "Cell":
        """The pretraining that a fine-tuning starts from; methods that do not act in it share one."""
        return Cell(self.experiment, "pretrain", self.method, self.labels, self.seed)

    @property
    def folder(self) -> Path:
        """Where its files are."""
        return self.experiment.stage_folder(self.name)

    @property
    def epochs(self) -> int:
        """How many epochs it trains for."""
        return self.experiment.stages.epochs(self.stage)

    @property
    def description(self) -> str:
        """What it is, in words."""
        if self.stage == "pretrain":
            return self.name.replace("-", " ").replace("seed", "seed ")
        what = "from scratch" if self.stage == "scratch" else f"fine-tune {self.method}"
        return f"{what}, {self.labels} labels, seed {self.seed}"

    def run(self) -> dict[str, Any]:
        """Run it and return its result in JSON-like values; files of a killed run are continued from."""
        return _pretrain(self) if self.stage == "pretrain" else _on_target(self)


def run_cell(cell: Any) -> dict[str, Any]:
    """Run one cell, of the ready parts or of the user's own, and leave the global generators as they were."""
    with generators_kept():  # they are the user's where the cell runs in the user's process
        result: dict[str, Any] = cell.run()
        return result


def _pretrain(cell: Cell) -> dict[str, Any]:
    start = time.perf_counter()
    data = _data(cell).use("pretrain")
    module = _module(cell, data, data.source_classes)
    if "lautum" in module.penalties:
        module.lautum.fit_inputs(_InputsOnly(data))
    module.add_noise()
    fitted = _fit(cell, module, data)
    write_tensors(cell.folder / "weights.pt", _plain(module))
    return {
        "curve": fitted.curve,
        "source": _scores(fitted.test),
        "seconds": time.perf_counter() - start,
    }


def _on_target(cell: Cell) -> dict[str, Any]:
    start = time.perf_counter()
    data = _data(cell).use("fine_tune")
    module = _module(cell, data, data.target_classes)
    initial = _plain(module)
    if cell.stage == "fine_tune":
        module.backbone.load_state_dict(_backbone(load_weights(cell.source.folder / "weights.pt")))
    begun = _plain(module)
    before = _measure(cell, data, begun, information=initial)
    overlap = _overlap(cell, data, module) if cell.stage == "fine_tune" else None
    module.freeze_for(0)
    module.add_noise()
    with cell.experiment.log.run(cell.name, _describe(cell), _pretraining(cell)) as run:
        run.log({"before": before, "outside_span": _outside(overlap)}, step=0)
        fitted = _fit(cell, module, data, logger=run.logger)
        ended = _plain(module)
        after = _measure(cell, data, ended, information=initial, added=begun)
        added = after.pop("added")
        run.log({"after": after, "added": added})
        run.end(fitted.curve)
    write_tensors(cell.folder / "weights.pt", ended)
    return {
        "curve": fitted.curve,
        "test": _scores(fitted.test),
        "missed_share": fitted.test["test_squared_error"] / _label_variance(data),
        "information": {
            "before": before["information"],
            "after": after["information"],
            "added": added,
        },
        "fisher_trace": {"before": before["fisher_trace"], "after": after["fisher_trace"]},
        "overlap": overlap,
        "seconds": time.perf_counter() - start,
    }


class _InputsOnly:
    """The unlabelled inputs, batch by batch, as often as they are asked for."""

    def __init__(self, data: TransferDataModule) -> None:
        self.data = data

    def __iter__(self) -> Any:
        return (x for x, _ in self.data.unlabeled_dataloader())


def _backbone(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {n.removeprefix("backbone."): w for n, w in weights.items() if n.startswith("backbone.")}


def _pretraining(cell: Cell) -> list[dict[str, float]]:
    """Rows of the pretraining's epochs, to stand in the log of every run that starts from it."""
    path = cell.experiment.result(cell.source.name)
    return read_result(path)["curve"] if cell.stage == "fine_tune" and path.exists() else []


def _outside(overlap: Mapping[str, Any] | None) -> dict[str, float]:
    return {} if overlap is None else dict(zip(overlap["layers"], overlap["outside"], strict=True))


def _data(cell: Cell) -> TransferDataModule:
    arguments = {**cell.experiment.data, "seed": cell.seed}
    if isinstance(arguments["labels"], int):  # otherwise the labelled rows are given
        arguments["labels"] = cell.labels
    data = TransferDataModule(**arguments)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TaskInfoWarning)  # heard before the first cell
        data.setup()
    return data


def _module(
    cell: Cell, data: TransferDataModule, num_classes: int, method: str | None = None
) -> Any:
    """A network whose initial weights depend on the seed alone: those of a pretraining are those of scratch."""
    experiment, stages = cell.experiment, cell.experiment.stages
    reseed(cell.seed, STREAMS["backbone"])
    backbone = make_backbone(experiment.backbone, data.image_shape)
    reseed(cell.seed, STREAMS["head"])
    rate = stages.fine_tune_learning_rate if cell.stage == "fine_tune" else None
    return CLASSES[experiment.namespace](
        backbone,
        num_classes,
        data.image_shape,
        method=cell.method if method is None else method,
        stage=cell.stage,
        weights=check_weights(experiment.weights),
        fine_tune=stages.fine_tune,
        learning_rate=rate or stages.learning_rate,
        weight_decay=stages.weight_decay,
        num_labeled=len(data.source if cell.stage == "pretrain" else data.labeled),
        num_unlabeled=len(data.unlabeled),
        num_indices=data.num_indices,
        epochs=stages.epochs(cell.stage),
        seed=cell.seed,
    )


def _fit(cell: Cell, module: Any, data: TransferDataModule, logger: Any = None) -> Any:
    experiment = cell.experiment
    options = {"max_epochs": cell.epochs, "accelerator": experiment.accelerator, "devices": 1}
    return fit_stage(
        module,
        folder=cell.folder,
        seeds=(cell.seed, STREAMS[cell.stage]),
        fit={"datamodule": data},
        test={"datamodule": data},
        options={**options, "logger": logger or False, "log_every_n_steps": 10},
        namespace=experiment.namespace,
    )


def _plain(module: Any) -> dict[str, Tensor]:
    """Weights and buffers of backbone and head, without noise, on the processor."""
    return {
        f"{part}.{name}": tensor.detach().cpu().clone()
        for part in ("backbone", "head")
        for name, tensor in plain_state_dict(getattr(module, part)).items()
    }


def _measure(
    cell: Cell,
    data: TransferDataModule,
    weights: Mapping[str, Tensor],
    **origins: Mapping[str, Tensor],
) -> dict[str, Any]:
    """The trace of the Fisher information, and the information in the weights from each of some origins, by name."""
    model = _module(cell, data, data.target_classes, method="standard")
    model.load_state_dict(dict(weights))
    inputs, _ = data.unlabeled.__getitems__(range(min(MEASURED, len(data.unlabeled))))
    fisher = fisher_of(model, inputs, data.target_classes, seed=cell.seed)
    nats = {
        name: information_by_layer(fisher, weights, w0, len(data.labeled))
        for name, w0 in origins.items()
    }
    return {"fisher_trace": trace_by_layer(fisher), **nats}


def _overlap(cell: Cell, data: TransferDataModule, module: Any) -> dict[str, Any] | None:
    return overlap_of(
        module.backbone, *data.labeled.__getitems__(range(len(data.labeled)))[0], seed=cell.seed
    )


def _label_variance(data: TransferDataModule) -> float:
    assert data.target_test.y is not None
    shares = data.target_test.y.bincount(minlength=data.target_classes) / len(data.target_test)
    return float(1 - shares.square().sum())


def _scores(test: Mapping[str, float]) -> dict[str, float]:
    return {"accuracy": test["test_accuracy"], "loss": test["test_loss"]}


def _describe(cell: Cell) -> dict[str, Any]:
    method, stages = cell.name.split("-")[0], asdict(cell.experiment.stages)
    return {"method": method, "labels": cell.labels, "seed": cell.seed, **stages}


MAX_EXACT_CLASSES = 20  # their cost grows with the classes: beyond, labels are sampled
PRIOR_STD = 0.1
ByLayer = dict[str, Any]
"""``{"total": value, "layers": {name: value}}``."""


def fisher_of(
    model: nn.Module, inputs: Tensor, num_classes: int, *, seed: int = 0
) -> dict[str, Tensor]:
    """Return the diagonal Fisher information of a classifier, a mean over ``inputs``."""
    exact = num_classes <= MAX_EXACT_CLASSES
    generator = torch.Generator(inputs.device).manual_seed(seed)
    was_training = model.training
    try:
        model.eval()
        return fisher_diagonal(
            model, inputs, labels="exact" if exact else "sampled", generator=generator
        )
    finally:
        model.train(was_training)


def trace_by_layer(fisher: Mapping[str, Tensor]) -> ByLayer:
    """Return the trace of the Fisher information, whole and by layer.

    Example:
        >>> trace_by_layer({"head.weight": torch.ones(2, 2), "head.bias": torch.ones(2)})
        {'total': 6.0, 'layers': {'head': 6.0}}
    """
    return _by_layer({name: float(f.double().sum()) for name, f in fisher.items()})


def information_by_layer(
    fisher: Mapping[str, Tensor],
    weights: Mapping[str, Tensor],
    center: Mapping[str, Tensor],
    num_samples: int,
) -> ByLayer:
    r"""Return the information in the weights in nats, whole and by layer.

    :math:`\mathrm{KL}(Q \| P)` for :math:`P = N(w_0, 0.1^2 I)`, with :math:`\beta = 1`; see
    :func:`~lightning_taskinfo.functional.information.information_in_weights`.

    Args:
        fisher: Diagonal Fisher information, a mean over samples, by parameter.
        weights: The weights.
        center: Centre :math:`w_0` of the pre-distribution.
        num_samples: Number of training samples :math:`N`.
    """
    nats = {
        name: float(
            information_in_weights(
                num_samples * f, weights[name] - center[name], prior_std=PRIOR_STD, beta=1.0
            ).kl
        )
        for name, f in fisher.items()
    }
    return _by_layer(nats)


def overlap_of(
    backbone: nn.Module, inputs: Tensor, labels: Tensor, *, seed: int
) -> dict[str, Any] | None:
    """Return the overlap of a backbone's features with target labels as JSON-like values.

    Args:
        backbone: The pretrained network, without its head.
        inputs: Labelled target inputs.
        labels: Their classes.
        seed: Of the order in which folds are taken.

    Returns:
        ``None`` with fewer than 20 labels, which are too few for five folds.
    """
    if len(labels) < 20:
        return None
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    found = feature_overlap(backbone, [(inputs[order], labels[order])])
    return {
        "layers": list(found.layers),
        "outside": found.outside.tolist(),
        "standard_error": found.standard_error.tolist(),
        "onset": None,
    }


def onset_of(
    overlap: Mapping[str, Any], labels: int, curve: Mapping[int, float], *, layer: int = -1
) -> list[float] | None:
    """Return lower end, middle and upper end of the predicted number of labels at which transfer starts to hurt.

    Args:
        overlap: As :func:`overlap_of` returns it.
        labels: Number of labels it was measured with.
        curve: By number of labels, the share of the labels' variance that training from scratch missed.
        layer: Which layer's features.

    Returns:
        ``None`` where scratch was measured at fewer than two numbers of labels, or its error does not fall.
    """
    try:
        law = fitted_curve(curve)
    except ValueError:
        return None
    share, error = (
        torch.tensor(overlap[key][layer], dtype=torch.float64)
        for key in ("outside", "standard_error")
    )
    found = FeatureOverlap(("",), share, error, labels)
    low, high = found.interval()
    return [end.item() for end in crossings(low, found.outside, high, law)]


def _by_layer(values: Mapping[str, float]) -> ByLayer:
    layers: dict[str, float] = {}
    for name, value in values.items():
        layer = name.rpartition(".")[0] or name
        layers[layer] = layers.get(layer, 0.0) + value
    return {"total": sum(layers.values()), "layers": layers}
