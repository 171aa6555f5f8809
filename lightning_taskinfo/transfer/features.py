"""Features of a frozen network on labelled samples: which layers, what they put out, and the source head's say."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from lightning_taskinfo._batches import (
    BatchFn,
    Forward,
    NoLogitsError,
    call_on,
    described,
    joined,
    moved,
    read_batch,
    read_by,
    sample_count,
    take,
    tensors,
)
from lightning_taskinfo._observe import observing
from lightning_taskinfo._ranges import check_finite
from lightning_taskinfo.callbacks.report import spread
from lightning_taskinfo.functional.readout import pooled

MAX_CHUNK = 64  # samples of a forward pass, where the user's batches are larger


class Labelled(NamedTuple):
    """Labelled samples of the target.

    Attributes:
        inputs: A tensor, or tuples, lists and dicts of tensors.
        labels: Classes ``[N]``, or real values ``[N, ...]``.
        chunk: Samples of a forward pass.
    """

    inputs: Any
    labels: Tensor
    chunk: int

    @property
    def few(self) -> Any:
        """Inputs of two samples, to find things out with."""
        return take(self.inputs, itemgetter(slice(2)))


def read_labelled(data: Any, batch_fn: BatchFn | None) -> Labelled:
    """Return all samples of one batch, or of an iterable of batches.

    Raises:
        ValueError: If there is no batch, or one has no inputs and labels, or not finite ones.
    """
    parts = [_read(batch, batch_fn) for batch in _batches(data)]
    if not parts:
        raise ValueError("`data` must yield batches (inputs, labels), got none.")
    inputs = joined([some for some, _ in parts])
    labels = [some for _, some in parts]
    longest = max(map(len, labels))
    return Labelled(inputs, torch.cat(labels), chunk=min(MAX_CHUNK, longest))


def _batches(data: Any) -> Iterable[Any]:
    if isinstance(data, Mapping):
        return [data]
    several = isinstance(data, list | tuple)
    if several and any(isinstance(part, Tensor) for part in data):
        if len(data) != 2:
            raise ValueError(
                f"`data` must be a batch (inputs, labels), or yield such, got {described(data)}."
            )
        return [data]
    return cast(Iterable[Any], data)


def _read(batch: Any, batch_fn: BatchFn | None) -> tuple[Any, Tensor]:
    rule = "`data` must yield batches (inputs, labels), got"
    if batch_fn is not None:
        inputs, labels = read_by(batch_fn, batch)
    else:
        try:
            inputs, labels = read_batch(batch)
        except ValueError as error:
            raise ValueError(f"{rule} {described(batch)}: {error}") from error
    if labels is None:
        raise ValueError(f"{rule} {described(batch)} without labels.")
    n = sample_count(inputs)
    one_each = labels.ndim > 0 and len(labels) == n
    several_classes = labels.ndim > 1 and not labels.is_floating_point()
    if not one_each or several_classes:
        raise ValueError(
            f"`data` must yield batches with a class index or real values for each input, got labels of shape "
            f"{list(labels.shape)} for {n} inputs; a dataset of single samples goes into a DataLoader first."
        )
    for tensor in tensors((inputs, labels)):
        check_finite("data", tensor)
    return inputs, labels.detach().cpu()


class Frozen(NamedTuple):
    """What a frozen network makes of samples.

    Attributes:
        features: By layer, shape ``[N, D]`` each, float32 or better, on the CPU.
        logits: Output of the source head, shape ``[N, Z]``; ``None`` where the network ends in
            something else.
    """

    features: dict[str, Tensor]
    logits: Tensor | None


@dataclass(frozen=True)
class ObservedNetwork:
    """A network, how it is called, and what a pass over two samples showed.

    Attributes:
        model: The network.
        run: Returns its outputs on inputs.
        seen: What modules put out, in the order in which they finished; one entry per call.
        head: Name of the linear layer whose output is the network's; ``None`` where it ends in
            something else.
    """

    model: nn.Module
    run: Callable[[Any], Any]
    seen: Mapping[str, Sequence[Any]]
    head: str | None

    @classmethod
    def of(cls, model: nn.Module, few: Any, forward_fn: Forward | None) -> "ObservedNetwork":
        """Find out how a network is called on inputs like these, and look at one pass.

        Raises:
            ValueError: If it cannot be called on them.
        """
        run = caller(model, few, forward_fn)
        modules = dict(model.named_modules())
        seen: dict[str, list[Tensor | None]] = {}

        def note(name: str, output: Any) -> None:
            block = isinstance(output, Tensor | tuple)  # not a whole model
            found = first_tensor(output) if block else None
            seen.setdefault(name, []).append(found)

        with hooked(modules, note), observing(model), torch.no_grad():
            output = first_tensor(run(few))
        head = None
        if output is not None:
            linear = [name for name in seen if isinstance(modules[name], nn.Linear)]
            heads = (name for name in linear if seen[name][-1] is output)
            head = next(heads, None)
        seen.pop("", None)
        return cls(model, run, seen, head)

    def read(
        self,
        samples: Labelled,
        layers: Sequence[str] | None,
        max_features: int | None,
    ) -> Frozen:
        """Return pooled features of some layers; the network is only observed.

        No more than one pass is in memory beside them.

        Args:
            samples: The samples.
            layers: Names of modules; all that have no children, run and put out a tensor where
                ``None``.
            max_features: Most of a layer, see
                :func:`~lightning_taskinfo.functional.readout.pooled`.

        Raises:
            ValueError: If a layer is unknown, does not run once a pass, or has no finite row for
                each sample.
        """
        modules = dict(self.model.named_modules())
        names = layers
        if names is None:
            names = [name for name, module in modules.items() if not any(module.children())]
        for name in names:
            if name not in modules:
                raise ValueError(
                    f"`layers` must name modules of the model, got {name!r}; there are {list(modules)}."
                )
        n = len(samples.labels)
        found: dict[str, Tensor] = {}  # a tensor a layer: small ones between large ones hold memory
        logits: list[Tensor] = []
        place = slice(0)  # of one pass, as its inputs and the layers it has seen
        inputs: Any = None
        seen: set[str] = set()

        def keep(name: str, output: Any) -> None:
            values = first_tensor(output)
            if values is None or not values.ndim:
                return
            part = pooled(values.detach(), max_features, mask=_mask(inputs))
            if name not in found:
                dtype = torch.promote_types(part.dtype, torch.float32)
                found[name] = torch.empty(n, part.shape[1], dtype=dtype)
            room = found[name][place]
            if name in seen or room.shape[1] != part.shape[1]:
                raise _not_once(name)
            if len(room) != len(part):
                raise ValueError(
                    f"`layers` must put out one row for each sample, got {len(part)} rows for {len(room)} samples "
                    f"from {name!r}."
                )
            room.copy_(part)
            seen.add(name)

        with (
            hooked({name: modules[name] for name in names}, keep),
            observing(self.model),
            torch.no_grad(),
        ):
            for begin in range(0, n, samples.chunk):
                place = slice(begin, begin + samples.chunk)
                inputs = take(samples.inputs, itemgetter(place))
                output = first_tensor(self.run(inputs))
                if self.head is not None and output is not None and output.ndim == 2:
                    logits.append(output.double().cpu())
                for name in found if layers is None else names:
                    if name not in seen:
                        raise _not_once(name)
                seen.clear()
        if not found:
            raise ValueError("`layers` must name at least one module, got none.")
        for name, values in found.items():
            if count := int((~values.isfinite()).sum()):
                raise ValueError(
                    f"`model` must have finite features, got {count} values that are not in layer {name!r}."
                )
        features = {name: found[name] for name in names if name in found}
        whole = sum(map(len, logits)) == n
        return Frozen(features, torch.cat(logits) if whole else None)

    def spread_layers(self, number: int) -> list[str]:
        """Return names of up to ``number`` layers over the depth, the last one before the head among them.

        The tree of modules is opened from the top, always the module with the most weights, until
        enough of them run once and put out a tensor with a row for each sample; of these, evenly
        spaced ones are taken. The head is left out, and so are modules whose output the next one
        hands on, and those that run before all weights.
        """
        modules = dict(self.model.named_modules())
        end = None
        if self.head is not None:
            end = self.seen[self.head][-1]
        usable: dict[str, Tensor] = {}
        begun = False  # what runs before the first weights shows the inputs, not the network
        for name, outputs in self.seen.items():
            begun = begun or _weights(modules[name]) > 0
            values = outputs[0]
            # Not the head, and no module that does nothing but return its output.
            if begun and len(outputs) == 1 and _has_rows(values) and values is not end:
                usable[name] = values
        order = {name: place for place, name in enumerate(self.seen)}  # in which they finished
        frontier = sorted(_opened_until(modules, usable, number), key=order.__getitem__)
        last = {usable[name].data_ptr(): name for name in frontier}
        names = sorted(last.values(), key=order.__getitem__)
        if not names:
            raise ValueError(
                "`layers` must be given: no module of the model runs once and has a row for each sample."
            )
        if len(names) <= number:
            return names
        if number == 1:
            return names[-1:]
        return [names[i] for i in spread(len(names), number)]


def _not_once(layer: str) -> ValueError:
    return ValueError(
        f"`layers` must have one tensor as output and run once a pass, got {layer!r}."
    )


def _mask(inputs: Any) -> Tensor | None:
    """The positions of sequences that count, where the inputs say so."""
    if not isinstance(inputs, Mapping):
        return None
    mask = inputs.get("attention_mask")
    return mask if isinstance(mask, Tensor) and mask.ndim == 2 else None


@contextmanager
def hooked(modules: Mapping[str, nn.Module], note: Callable[[str, Any], None]) -> Iterator[None]:
    """Call a function with the name and the output of every module that runs."""

    def noting(name: str) -> Callable[..., None]:
        return lambda _module, _inputs, output: note(name, output)

    handles = []
    for name, module in modules.items():
        handles.append(module.register_forward_hook(noting(name)))
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


def _has_rows(values: Any) -> bool:
    """Whether a module put out a row for each of two samples."""
    return isinstance(values, Tensor) and values.ndim > 1 and len(values) == 2


def _opened_until(
    modules: Mapping[str, nn.Module],
    usable: Mapping[str, Tensor],
    number: int,
) -> list[str]:
    """Open modules from the top until ``number`` usable ones are found, or all are open."""
    frontier = [""]
    while True:
        # What cannot be used is opened anyway: a list of blocks, a model within the model.
        closed = [name for name in frontier if name not in usable and _children(modules, name)]
        found = [name for name in frontier if name in usable]
        if not closed and len(found) < number:
            inner = [name for name in found if _children(modules, name)]
            closed = sorted(inner, key=lambda name: -_weights(modules[name]))
        if not closed:
            return found
        at = frontier.index(closed[0])
        frontier[at : at + 1] = _children(modules, closed[0])


def _children(modules: Mapping[str, nn.Module], name: str) -> list[str]:
    found = []
    for child, _ in modules[name].named_children():
        whole = f"{name}.{child}".lstrip(".")
        if whole in modules:
            found.append(whole)
    return found


def _weights(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def caller(model: nn.Module, few: Any, forward_fn: Forward | None) -> Callable[[Any], Any]:
    """Find out how a network is called on inputs like these; return a function of inputs that returns its outputs.

    Inputs go to the network's device. A network without logits, such as an encoder, only has to
    run.

    Raises:
        ValueError: If it cannot be called on them.
    """
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    call = forward_fn
    if call is None:
        try:
            with torch.no_grad():
                call = call_on(model, moved(few, device))
        except NoLogitsError:
            call = _plainly
        except Exception as error:
            raise ValueError(
                f"`forward_fn` must say how to call a {type(model).__name__} on {described(few)}; by itself that "
                f"failed ({type(error).__name__}: {error})."
            ) from error

    def run(inputs: Any) -> Any:
        try:
            return call(model, moved(inputs, device))
        except NoLogitsError:  # it ran, and its layers were seen
            return None

    return run


def _plainly(model: nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, Mapping):
        return model(**inputs)
    if isinstance(inputs, list | tuple):
        return model(*inputs)
    return model(inputs)
