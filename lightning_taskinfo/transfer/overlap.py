"""What frozen features of a network know about target labels, and how much of the task lies outside their span."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_taskinfo._batches import BatchFn, read_batch, read_by
from lightning_taskinfo._calls import Call, Forward, NoLogitsError, call_on
from lightning_taskinfo._fields import is_labeled
from lightning_taskinfo._nested import IGNORED, joined, moved, pick, sample_count, tensors
from lightning_taskinfo._observe import observing
from lightning_taskinfo._ranges import check_finite, check_values
from lightning_taskinfo._tables import Cells, Tabled
from lightning_taskinfo._warn import first_line, warn
from lightning_taskinfo.callbacks.report import spread
from lightning_taskinfo.functional.features import fit_power_law
from lightning_taskinfo.functional.readout import held_out_readout, pooled

REACH = 10  # times the measured numbers of labels, to which a learning curve is followed silently
LARGEST_SHARE = 4.0  # that of always being sure of the wrong one of two classes; more is no share
MAX_FEATURES = 1024  # of a layer, after pooling
CHUNK = 32  # samples of a forward pass
Data = Iterable[Any] | Mapping[str, Any]


@dataclass(frozen=True)
class FeatureOverlap(Tabled):
    """Share of the target labels' variance that a linear read-out of frozen features misses, layer by layer.

    Held-out shares: they count what lies outside the span and what the given number of labels
    cannot pin down, so they are above the out-of-span share and fall towards it with more labels.

    Attributes:
        layers: Names of the layers.
        outside: Missed shares, shape ``[K]``; 0 is all explained, 1 nothing (more is possible on
            held-out labels).
        standard_error: Over samples, the folds' models taken as given, shape ``[K]``.
        samples: Number of labels used.
    """

    layers: tuple[str, ...]
    outside: Tensor
    standard_error: Tensor
    samples: int

    def reading(self) -> str:
        """Return one sentence on the layer that misses least."""
        best = int(self.outside.argmin())
        share, error = (100 * values[best].item() for values in (self.outside, self.standard_error))
        return (
            f"The features of {self.layers[best]} miss the least: {share:.1f} % of the labels' variance "
            f"(standard error {error:.1f}), from {self.samples} labels."
        )

    def _cells(self) -> Cells:
        layers = zip(self.layers, self.outside, self.standard_error, strict=True)
        rows = [[layer, f"{share:.3f}", f"{error:.3f}"] for layer, share, error in layers]
        return ["layer", "missed share", "standard error"], rows


def shown_count(number: float) -> str:
    """Return a number of labels with two digits, or in words.

    Example:
        >>> shown_count(5.43), shown_count(24_600), shown_count(math.inf)
        ('5.4', '25,000', 'never')
    """
    if math.isinf(number):
        return "never"
    return f"{float(f'{number:.2g}'):,g}"


def fitted_curve(curve: Mapping[int, float]) -> tuple[Tensor, Tensor]:
    """Fit a falling power law to errors of training from scratch by number of labels: amplitude and exponent.

    Raises:
        ValueError: If there are fewer than two, one is no positive share, or they do not fall.
    """
    shares = all(0 < error <= LARGEST_SHARE for error in curve.values())
    if len(curve) < 2 or min(curve) <= 0 or not shares:
        raise ValueError(
            "`curve` must hold positive shares, not in per cent, at two or more numbers of labels, got "
            f"{dict(curve)}."
        )
    law = fit_power_law(*torch.tensor([*curve.items()], dtype=torch.float64).T)
    if law[1] <= 0:
        raise ValueError(f"`curve` must fall with the number of labels, got {dict(curve)}.")
    return law


def is_far(onset: float, measured: Sequence[float]) -> bool:
    """Whether a learning curve measured at some numbers of labels is followed far to an onset; infinity is none.

    Example:
        >>> is_far(400, [50, 100]), is_far(2000, [50, 100]), is_far(4, [50, 100])
        (False, True, True)
    """
    near = min(measured) / REACH <= onset <= max(measured) * REACH
    return math.isfinite(onset) and not near


def feature_overlap(
    model: nn.Module,
    data: Data,
    *,
    layers: Sequence[str] | None = None,
    folds: int = 5,
    max_features: int = MAX_FEATURES,
    forward_fn: Forward | None = None,
    batch_fn: BatchFn | None = None,
) -> FeatureOverlap:
    """Measure, by cross-validation, what share of the labels' variance the features of each layer leave unexplained.

    Ridge regression on the features of one layer predicts the labels (one-hot for classes) of a
    fold from the others; its penalty is picked by the exact leave-one-out error within those, so
    that no held-out label takes part in it. The share is the squared error over that of the mean
    label. The model is only observed. Beside the inputs, what is kept of a sample is at most
    ``4 * max_features`` bytes for each layer.

    Args:
        model: The pretrained network.
        data: Batches ``(inputs, labels)`` of the target task, or one, labels as class indices or as
            real values; a mapping has them in its field ``labels``, ``label``, ``targets``,
            ``target`` or ``y``. Shuffled: folds are taken in turns, sample by sample.
        layers: Names of modules that run once a pass and put out one tensor, with a row for each
            sample; if not given, all such modules without children.
        folds: Number of folds.
        max_features: Most features of a layer: larger ones are averaged over neighbouring pixels or
            over tokens, see :func:`~lightning_taskinfo.functional.readout.pooled`.
        forward_fn: How to call the model, ``forward_fn(model, inputs)``; otherwise on the inputs,
            those of a mapping by name.
        batch_fn: Picks ``(inputs, labels)`` out of a batch.

    Returns:
        The shares, with standard errors.

    Raises:
        ValueError: If a layer is unknown or not as above, there are fewer than two folds or four
            samples per fold, all labels are the same, or inputs, labels or features are not finite.

    Example:
        >>> x = torch.randn(60, 3, generator=torch.Generator().manual_seed(0))
        >>> net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
        >>> _ = nn.init.eye_(net[0].weight)
        >>> bool(feature_overlap(net, [(x, x.sum(1))], layers=["0"]).outside < 1e-6)
        True
    """
    samples = read_labelled(data, batch_fn, folds)
    network = ObservedNetwork(model, samples.inputs, forward_fn)
    features, _ = network.read(samples, layers, max_features)
    fold = torch.arange(len(samples.labels)) % folds
    found = [held_out_readout(values, samples.columns, fold) for values in features.values()]
    shares = torch.stack([one.missed for one in found])
    errors = torch.stack([one.standard_error for one in found])
    return FeatureOverlap(tuple(features), shares, errors, len(fold))


class Labelled(NamedTuple):
    """Labelled samples of the target.

    Attributes:
        inputs: A tensor, or tuples, lists and dicts of tensors.
        labels: Classes ``[N]``, or real values ``[N, ...]``.
        columns: Real labels as columns, classes as indicators of those that occur, shape
            ``[N, C]``.
    """

    inputs: Any
    labels: Tensor
    columns: Tensor


def read_labelled(data: Any, batch_fn: BatchFn | None, folds: int) -> Labelled:
    """Return all samples of one batch, or of an iterable of batches.

    Raises:
        ValueError: If there is no batch, one has no inputs and labels, or not finite ones, or the
            labels cannot be predicted fold by fold.
    """
    if isinstance(data, Mapping) or is_labeled(data):
        data = [data]
    given = []
    targets = []
    for batch in data:
        inputs, labels = read_batch(batch) if batch_fn is None else read_by(batch_fn, batch)
        n = sample_count(inputs)
        shape = [] if labels is None else list(labels.shape)
        if labels is None or shape[:1] != [n] or (shape[1:] and not labels.is_floating_point()):
            raise ValueError(
                "`data` must yield batches with a class index or real values for each input, got labels of shape "
                f"{shape} for {n} inputs; a dataset of single samples goes into a DataLoader first."
            )
        labels = labels.detach().cpu()
        if not labels.is_floating_point():
            labelled = (labels != IGNORED).nonzero().flatten()
            inputs, labels = pick((inputs, labels), labelled)
        if len(labels):
            given.append(inputs)
            targets.append(labels)
    if not given:
        raise ValueError("`data` must yield batches (inputs, labels), got none.")
    try:
        samples, whole = joined(given), torch.cat(targets)
    except RuntimeError as error:
        rule = "must have batches of one shape, or an `attention_mask` beside padded sequences"
        raise ValueError(f"`data` {rule} ({first_line(error)}).") from error
    for tensor in tensors((samples, whole)):
        check_finite("data", tensor)
    return Labelled(samples, whole, _columns(whole, folds))


def _columns(labels: Tensor, folds: int) -> Tensor:
    """Labels as columns, refused if they cannot be predicted fold by fold."""
    if labels.is_floating_point():
        columns = labels.double().reshape(len(labels), -1)
        if columns.shape[1] == 1 and torch.equal(columns, columns.round()):
            warn(
                "The labels of `data` are whole numbers of a floating type, and are taken as real values; convert "
                "them with .long() if they are classes."
            )
    else:
        _, classes = labels.unique(return_inverse=True)
        columns = nn.functional.one_hot(classes).double()
    n = len(columns)
    check_values("at least 2", folds=folds)
    if n < 4 * folds:
        raise ValueError(
            f"`data` must have at least {4 * folds} samples, 4 for each of {folds} folds, got {n}."
        )
    if not (columns != columns[0]).any():
        raise ValueError(
            f"`data` must have labels that differ (of two classes at least), got {n} equal ones."
        )
    return columns


class ObservedNetwork:
    """A network, how it is called, and what a pass over two samples showed; it is only observed.

    Args:
        model: The network.
        inputs: Inputs of some samples.
        forward_fn: How to call it, if the user says so.

    Attributes:
        modules: Its modules by name.
        seen: What those put out that ran once and have a row for each of two samples, in the order
            in which they finished.
        head: Name of the linear layer whose output is the network's; ``None`` where it ends in
            something else.
        end: The output of the head.
    """

    def __init__(self, model: nn.Module, inputs: Any, forward_fn: Forward | None) -> None:
        few = pick(inputs, slice(2))
        self.model = model
        self.modules = dict(model.named_modules())
        self.forward = forward_fn or _way_to_call(model, few)
        calls = {}

        def note(name: str, _module: nn.Module, _inputs: Any, output: Any) -> None:
            calls[name] = None if name in calls else output

        with self._watched(self.modules, note):
            end = self.run(model, few)
        self.seen = {}
        self.head = self.end = None
        for name, output in calls.items():
            shape = getattr(first_tensor(output), "shape", ())
            if shape[:1] == (2,):
                self.seen[name] = output
                if isinstance(self.modules[name], nn.Linear) and output is end:
                    self.head = name
                    self.end = end

    def run(self, model: nn.Module, inputs: Any) -> Any:
        """Return the output of the network, or of one of its kind; ``None`` where there are no logits."""
        try:
            return first_tensor(self.forward(model, moved(inputs, device_of(model))))
        except NoLogitsError:  # it ran, and its layers were seen
            return None

    @contextmanager
    def _watched(self, names: Iterable[str], hook: Callable[..., None]) -> Iterator[None]:
        """Call a hook with the name of every module that runs, then the module, its inputs and its output."""
        with ExitStack() as hooks, observing(self.model), torch.no_grad():
            for name in names:
                handle = self.modules[name].register_forward_hook(partial(hook, name))
                hooks.enter_context(handle)
            yield

    def read(
        self,
        samples: Labelled,
        layers: Sequence[str] | None,
        max_features: int,
    ) -> tuple[dict[str, Tensor], Tensor | None]:
        """Return pooled features of some layers, and the output of the source head.

        No more than one pass is in memory beside them.

        Args:
            samples: The samples.
            layers: Names of modules; all of ``seen`` that have no children where ``None``.
            max_features: Most of a layer, see
                :func:`~lightning_taskinfo.functional.readout.pooled`.

        Returns:
            Features by layer, shape ``[N, D]`` each, float32 or better, on the CPU; and logits,
            shape ``[N, Z]``, or ``None`` where the network ends in something else.

        Raises:
            ValueError: If a layer is unknown, does not run once a pass, or has no finite row for
                each sample.
        """
        if layers is None:
            found_once = [name for name in self.modules if name in self.seen]
            layers = [name for name in found_once if not any(self.modules[name].children())]
        for name in layers:
            if name not in self.seen:
                raise ValueError(
                    "`layers` must name modules that run once a pass and put out one tensor with a row for each "
                    f"sample, got {name!r}; there are {list(self.seen)}."
                )
        if not layers:
            raise ValueError("`layers` must name at least one module, got none.")
        n = len(samples.labels)
        found = {}  # a tensor a layer: small ones between large ones hold memory
        logits = []
        place = slice(0)  # of one pass, as its inputs
        inputs = None

        def keep(name: str, _module: nn.Module, _inputs: Any, output: Any) -> None:
            mask = inputs.get("attention_mask") if isinstance(inputs, Mapping) else None
            values = pooled(first_tensor(output), max_features, mask=mask)
            if name not in found:
                dtype = torch.promote_types(values.dtype, torch.float32)
                found[name] = torch.empty(n, values.shape[1], dtype=dtype)
            found[name][place] = values

        with self._watched({*layers}, keep):
            for begin in range(0, n, CHUNK):
                place = slice(begin, begin + CHUNK)
                inputs = pick(samples.inputs, place)
                output = self.run(self.model, inputs)
                if self.head is not None and output.ndim == 2:
                    logits.append(output.double().cpu())
        for name in layers:
            check_finite(f"features of {name}", found[name])
        features = {name: found[name] for name in layers}
        return features, torch.cat(logits) if logits else None

    def spread_layers(self, number: int) -> list[str]:
        """Return names of up to ``number`` layers over the depth, the last one before the head among them.

        The tree of modules is opened from the top, always the module with the most weights, until
        enough of them can be read; of these, evenly spaced ones are taken. The head is left out,
        and so are modules whose output the next one hands on, and those that run before all
        weights.
        """
        usable = {}
        begun = False  # what runs before the first weights shows the inputs, not the network
        for name, output in self.seen.items():
            begun = begun or self._weights(name) > 0
            values = first_tensor(output)
            block = isinstance(output, Tensor | tuple)  # not a whole model
            if name and begun and block and values.ndim > 1 and values is not self.end:
                usable[name] = values
        opened = self._opened([*usable], number)
        finished = [name for name in usable if name in opened]
        # Of modules that hand on one output, the last.
        last = {usable[name].data_ptr(): name for name in finished}
        names = [name for name in finished if name in last.values()]
        if not names:
            raise ValueError(
                "`layers` must be given: no module of the model runs once and has a row for each sample."
            )
        number = min(number, len(names))
        return names[-1:] if number == 1 else [names[i] for i in spread(len(names), number)]

    def _opened(self, usable: Sequence[str], number: int) -> list[str]:
        """Open modules from the top until ``number`` usable ones are found, or all are open."""
        opened = _outermost(usable)
        while len(opened) < number:
            inside = {}
            for name in opened:
                inside[name] = _outermost([one for one in usable if one.startswith(f"{name}.")])
            largest = max(filter(inside.get, opened), key=self._weights, default=None)
            if largest is None:
                break
            opened = [name for name in opened if name != largest] + inside[largest]
        return opened

    def _weights(self, name: str) -> int:
        return sum(p.numel() for p in self.modules[name].parameters())


def _outermost(names: Sequence[str]) -> list[str]:
    """Names of modules that are in no other of them; a list of blocks, which never runs, hides none."""
    nested = tuple(f"{name}." for name in names)
    return [name for name in names if not name.startswith(nested)]


def _way_to_call(model: nn.Module, few: Any) -> Forward:
    """Find out how a network is called; one without logits, such as an encoder, only has to run."""
    try:
        return call_on(model, moved(few, device_of(model)))
    except NoLogitsError:
        return Call(how="named" if isinstance(few, Mapping) else "spread")


def device_of(model: nn.Module) -> torch.device:
    """Return where the weights of a network are."""
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def first_tensor(output: Any) -> Any:
    """Return an output that is a tensor, its ``logits``, or the first tensor of a tuple or mapping.

    Example:
        >>> first_tensor((None, torch.ones(1))), first_tensor("text")
        (tensor([1.]), None)
    """
    logits = getattr(output, "logits", None)
    if isinstance(logits, Tensor):
        return logits
    return next(tensors(output), None)
