"""Features of a frozen network on labelled batches: which layers, what they put out, and the source head's say."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor, nn

from lightning_taskinfo._batches import (
    BatchFn,
    Forward,
    call_on,
    described,
    read_batch,
    read_by,
    sample_count,
    take,
    tensors,
)
from lightning_taskinfo._model_calls import NoLogitsError
from lightning_taskinfo._observe import observing
from lightning_taskinfo.functional.readout import pooled


@dataclass(frozen=True)
class Frozen:
    """What a frozen network makes of labelled samples.

    Attributes:
        features: By layer, in the order in which they ran, shape ``[N, D]`` each, float32 or better, on the CPU.
        labels: Classes ``[N]``, or real values ``[N, ...]``.
        logits: Output of the source head, shape ``[N, Z]``; ``None`` where the network does not end in a linear layer.
    """

    features: dict[str, Tensor]
    labels: Tensor
    logits: Tensor | None


def collect(
    model: nn.Module,
    data: Any,
    layers: Sequence[str] | None,
    *,
    max_features: int | None,
    forward_fn: Forward | None = None,
    batch_fn: BatchFn | None = None,
) -> Frozen:
    """Run a network over batches, and keep pooled features of some layers; the network is only observed.

    Args:
        model: The network.
        data: One batch, or an iterable of batches.
        layers: Names of modules; all that have no children, run and put out a tensor where ``None``.
        max_features: Most features of a layer, see :func:`~lightning_taskinfo.functional.readout.pooled`.
        forward_fn: How to call the network, ``forward_fn(model, inputs)``.
        batch_fn: Picks inputs and labels out of a batch.
    """
    modules = dict(model.named_modules())
    names = (
        [name for name, m in modules.items() if not any(m.children())]
        if layers is None
        else list(layers)
    )
    if unknown := [name for name in names if name not in modules]:
        raise ValueError(
            f"`layers` must name modules of the model, got {unknown[0]!r}; there are {list(modules)}."
        )
    kept: dict[str, Rows] = {}
    targets, logits = [], []
    ends: list[Tensor] = []  # what linear layers put out in one pass
    mask: list[Tensor] = []

    def keep(name: str, output: object) -> None:
        values = first_tensor(output)
        if values is not None and values.ndim:
            rows = pooled(values.detach(), max_features, mask=mask[0] if mask else None)
            if name in kept and rows.shape[1] != kept[name].width:
                raise ValueError(
                    f"`layers` must have one tensor as output and run once a pass, got {name!r}."
                )
            kept.setdefault(name, Rows()).append(rows)

    linear = {name: m for name, m in modules.items() if isinstance(m, nn.Linear)}
    watched: list[tuple[nn.Module, Any]] = []
    watched += [(modules[name], lambda _m, _i, out, name=name: keep(name, out)) for name in names]
    watched += [(module, lambda _m, _i, out: ends.append(out)) for module in linear.values()]
    parts = (read(batch, batch_fn) for batch in batches(data))
    first = next(parts, None)
    if first is None:
        raise ValueError("`data` must yield batches (inputs, labels), got none.")
    run = caller(model, first[0], forward_fn)  # before the hooks, which would see it being tried
    with _hooked(watched), observing(model), torch.no_grad():
        for inputs, labels in chain([first], parts):
            mask[:] = _mask(inputs)
            ends.clear()
            outputs = first_tensor(run(inputs))
            targets.append(labels.detach().cpu())
            if outputs is not None and outputs.ndim == 2 and any(outputs is end for end in ends):
                logits.append(outputs.double().cpu())
    for name in names if layers is not None else kept:
        if name not in kept or kept[name].parts != len(targets):
            raise ValueError(
                f"`layers` must have one tensor as output and run once a pass, got {name!r}."
            )
    if not kept:
        raise ValueError("`layers` must name at least one module, got none.")
    features = {name: kept[name].whole() for name in names if name in kept}
    labels = torch.cat(targets)
    _check_rows(features, len(labels))
    return Frozen(features, labels, torch.cat(logits) if len(logits) == len(targets) else None)


class Rows:
    """Rows of several parts in one tensor on the CPU, float32 or better.

    It grows by doubling. A list of parts would do, were it not that small tensors made between large ones keep the
    memory of the large ones from being used again: half a gigabyte where six megabytes are kept.
    """

    def __init__(self) -> None:
        self.parts = 0
        self._size = 0
        self._held = torch.empty(0, 0)

    @property
    def width(self) -> int:
        """Number of columns."""
        return self._held.shape[1]

    def append(self, rows: Tensor) -> None:
        """Copy rows ``[n, D]`` behind those that are there."""
        needed = self._size + len(rows)
        if needed > len(self._held):
            dtype = torch.promote_types(rows.dtype, torch.float32)
            grown = torch.empty(max(needed, 2 * len(self._held)), rows.shape[1], dtype=dtype)
            if self._size:
                grown[: self._size] = self._held[: self._size]
            self._held = grown
        self._held[self._size : needed] = rows
        self._size = needed
        self.parts += 1

    def whole(self) -> Tensor:
        """Return all rows."""
        return self._held[: self._size]


def _check_rows(features: Mapping[str, Tensor], samples: int) -> None:
    for name, values in features.items():
        if len(values) != samples:
            raise ValueError(
                f"`layers` must put out one row for each sample, got {len(values)} rows for {samples} samples from "
                f"{name!r}."
            )
        if count := int((~values.isfinite()).sum()):
            raise ValueError(
                f"`model` must have finite features, got {count} values that are not in layer {name!r}."
            )


@contextmanager
def _hooked(watched: Iterable[tuple[nn.Module, Any]]) -> Iterator[None]:
    handles = [module.register_forward_hook(hook) for module, hook in watched]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def first_tensor(output: Any) -> Tensor | None:
    """Return an output that is a tensor, its ``logits``, or the first tensor of a tuple or mapping.

    Example:
        >>> first_tensor((None, torch.ones(1))), first_tensor("text")
        (tensor([1.]), None)
    """
    if isinstance(output, Tensor):
        return output
    logits = getattr(output, "logits", None)
    if isinstance(logits, Tensor):
        return logits
    return next(tensors(output), None)


# Which layers to look at, where nobody says: the ends of the largest blocks that are enough of them.


def spread_layers(
    model: nn.Module, inputs: Any, forward_fn: Forward | None, number: int
) -> list[str]:
    """Return names of up to ``number`` layers over the depth of a network, the last one before its head among them.

    The tree of modules is opened from the top, always the module with the most weights, until enough of them run once
    and put out a tensor with a row for each sample; of these, evenly spaced ones are taken. The head, a linear layer
    whose output is the network's, is left out, and so are modules whose output the next one hands on, and those that
    run before all weights.

    Args:
        model: The network.
        inputs: Two samples or more.
        forward_fn: How to call the network.
        number: Most layers.
    """
    modules = dict(model.named_modules())
    samples = sample_count(inputs)
    output, seen = _one_pass(model, inputs, forward_fn)
    usable = {
        name: values[0]
        for name, values in seen.items()
        if len(values) == 1 and _has_rows(values[0], samples)
    }
    for name in seen:  # what runs before the first weights shows the inputs, not the network
        if _weights(modules[name]):
            break
        usable.pop(name, None)
    with_head = any(
        isinstance(modules[name], nn.Linear) and values is output for name, values in usable.items()
    )
    if with_head:  # and with it every module that does nothing but return its output
        usable = {name: values for name, values in usable.items() if values is not output}
    frontier = _opened_until(modules, usable, number)
    order = {name: position for position, name in enumerate(seen)}  # in which they finished
    last = {usable[name].data_ptr(): name for name in sorted(frontier, key=order.__getitem__)}
    names = sorted(last.values(), key=order.__getitem__)
    if not names:
        raise ValueError(
            "`layers` must be given: no module of the model runs once and has a row for each sample."
        )
    if len(names) <= number:
        return names
    if number == 1:
        return names[-1:]
    return [names[round(i * (len(names) - 1) / (number - 1))] for i in range(number)]


def _one_pass(
    model: nn.Module, inputs: Any, forward_fn: Forward | None
) -> tuple[Any, dict[str, list[Any]]]:
    """Return the output of a network, and those of all its modules in the order in which they finished."""
    seen: dict[str, list[Any]] = {}

    def note(name: str, output: Any) -> None:
        values = (
            first_tensor(output) if isinstance(output, Tensor | tuple) else None
        )  # blocks, not whole models
        seen.setdefault(name, []).append(values)

    watched = [
        (module, lambda _m, _i, out, name=name: note(name, out))
        for name, module in model.named_modules()
        if name
    ]
    run = caller(model, inputs, forward_fn)
    with _hooked(watched), observing(model), torch.no_grad():
        return first_tensor(run(inputs)), seen


def _has_rows(values: Any, samples: int) -> bool:
    return isinstance(values, Tensor) and values.ndim > 1 and len(values) == samples


def _opened_until(
    modules: Mapping[str, nn.Module], usable: Mapping[str, Tensor], number: int
) -> list[str]:
    """Open modules from the top until ``number`` usable ones are found, or all are open."""
    frontier = [""]
    while True:
        # What cannot be used is opened anyway: a list of blocks, a model within the model.
        closed = [name for name in frontier if name not in usable and _children(modules, name)]
        found = [name for name in frontier if name in usable]
        if not closed and len(found) < number:
            closed = sorted(
                (name for name in found if _children(modules, name)),
                key=lambda n: -_weights(modules[n]),
            )
        if not closed:
            return found
        at = frontier.index(closed[0])
        frontier[at : at + 1] = _children(modules, closed[0])


def _children(modules: Mapping[str, nn.Module], name: str) -> list[str]:
    names = [f"{name}.{child}".lstrip(".") for child, _ in modules[name].named_children()]
    return [child for child in names if child in modules]


def _weights(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


# Batches: the one place here that knows what they look like.


def batches(data: Any) -> Iterator[Any]:
    """Yield batches: those of an iterable, or one that is given as it is."""
    if isinstance(data, list | tuple) and any(isinstance(part, Tensor) for part in data):
        if len(data) != 2:
            raise ValueError(
                f"`data` must be a batch (inputs, labels), or yield such, got {described(data)}."
            )
        data = [data]
    elif isinstance(data, Mapping):
        data = [data]
    yield from cast(Iterable[Any], data)


def read(batch: Any, batch_fn: BatchFn | None) -> tuple[Any, Tensor]:
    """Return inputs and labels of a batch, checked; the same ones for all networks."""
    if batch_fn is not None:
        inputs, labels = read_by(batch_fn, batch)
    else:
        try:
            inputs, labels = read_batch(batch)
        except ValueError as error:
            raise ValueError(
                f"`data` must yield batches (inputs, labels), got {described(batch)}: {error}"
            ) from error
    if labels is None:
        raise ValueError(
            f"`data` must yield batches (inputs, labels), got {described(batch)} without labels."
        )
    n = sample_count(inputs)
    if not labels.ndim or len(labels) != n or (labels.ndim > 1 and not labels.is_floating_point()):
        raise ValueError(
            f"`data` must yield batches with a class index or real values for each input, got labels of shape "
            f"{list(labels.shape)} for {n} inputs; a dataset of single samples goes into a DataLoader first."
        )
    if count := sum(int((~x.isfinite()).sum()) for x in tensors((inputs, labels))):
        raise ValueError(f"`data` must be finite, got {count} values that are not.")
    return inputs, labels


def caller(model: nn.Module, inputs: Any, forward_fn: Forward | None) -> Callable[[Any], Any]:
    """Find out how a network is called on inputs like these; return a function of inputs that returns its outputs.

    Inputs go to the network's device. A network without logits, such as an encoder, only has to run.

    Raises:
        ValueError: If it cannot be called on them.
    """
    device = next((p.device for p in model.parameters()), torch.device("cpu"))

    def moved(inputs: Any) -> Any:
        return take(inputs, lambda x: x.to(device))

    if forward_fn is not None:
        return lambda inputs: forward_fn(model, moved(inputs))
    few = take(moved(inputs), lambda x: x[:2])
    try:
        with torch.no_grad():
            found = call_on(model, few)
    except NoLogitsError:
        return lambda inputs: _plainly(model, moved(inputs))
    except Exception as error:
        raise ValueError(
            f"`forward_fn` must say how to call a {type(model).__name__} on {described(few)}; by itself that failed "
            f"({type(error).__name__}: {error})."
        ) from error

    def run(inputs: Any) -> Any:
        try:
            return found(model, moved(inputs))
        except NoLogitsError:  # it ran, and its layers were seen
            return None

    return run


def _plainly(model: nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, list | tuple) else model(inputs)


def _mask(inputs: Any) -> list[Tensor]:
    """The positions of sequences that count, where the inputs say so."""
    mask = inputs.get("attention_mask") if isinstance(inputs, Mapping) else None
    return [mask] if isinstance(mask, Tensor) and mask.ndim == 2 else []
