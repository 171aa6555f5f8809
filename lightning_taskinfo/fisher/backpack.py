"""What BackPACK computes for us: Kronecker factors of chains of layers."""

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from operator import itemgetter
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lightning_taskinfo._batches import sample_count, take
from lightning_taskinfo._observe import (
    at_least_float32,
    full_precision,
    observing,
    parts,
    trainable_parameters,
)
from lightning_taskinfo.fisher.fallback import Forward
from lightning_taskinfo.fisher.measure import Request

# Layers whose Kronecker factors BackPACK has, or through which it can pass them on.
KNOWN = (
    nn.Linear,
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ReLU,
    nn.Sigmoid,
    nn.Tanh,
    nn.MaxPool2d,
    nn.AvgPool2d,
    nn.ZeroPad2d,
    nn.Flatten,
    nn.Dropout,
    nn.Identity,
)


class NotCoveredError(Exception):
    """BackPACK cannot serve this network; the text says why."""


class Sums(Protocol):
    """The sums of one parameter."""

    def add(self, rows: Tensor, columns: Tensor | None, places: int) -> None:
        """Add sums of ``b bᵀ`` and of ``a aᵀ`` over so many places."""
        ...


def add_factors(
    sums: Mapping[str, Sums],
    model: nn.Module,
    inputs: Any,
    targets: Tensor | None,
    request: Request,
) -> None:
    """Let BackPACK pass the output scores backwards, chunk by chunk, and add what it finds for each parameter.

    Raises:
        NotCoveredError: If BackPACK does not serve the network; the generator is then as it was.
        ModuleNotFoundError: If BackPACK is not installed.
    """
    generator = request.generator
    state = None if generator is None else generator.get_state()
    step = request.chunk_size or 128
    try:
        with observing(model), full_precision(parts(model)):
            chain = ChainFactors(model, request.forward)
            for start in range(0, sample_count(inputs), step):
                chunk = slice(start, start + step)
                some = take(inputs, itemgetter(chunk))
                outputs = chain.outputs(take(some, at_least_float32))
                of_chunk = None if targets is None else targets[chunk]
                counted = False  # whether the inputs are
                for scores, last in request.scores(outputs, of_chunk):
                    found = chain.factors(outputs, scores, keep=not last)
                    for name, rows, columns, places in found:
                        sums[name].add(rows, None if counted else columns, places)
                    counted = True
    except NotCoveredError:
        if generator is not None and state is not None:
            generator.set_state(state)  # so that the labels of the first chunks are drawn again
        raise


class ChainFactors:
    r"""Kronecker factors of a chain of layers, by BackPACK.

    BackPACK finds what it passes backwards by the memory address of tensors, and would not notice an operation in
    place, or a view, between two layers. So it is only asked where every layer was seen to get the very tensor that
    the layer before it returned.

    Two parts of BackPACK are replaced. The square root of the loss's curvature, which its backward pass starts from, is
    made of **our** output scores: so labels, likelihood and random numbers are the caller's. And the output factor of a
    convolution is that of KFC, :math:`\sum_t b_t b_t^\top`; BackPACK takes the block of the bias there, in which
    positions are summed before they are squared.

    Args:
        model: The network, in eval mode; a copy of it is run.
        forward: How to get the outputs.

    Raises:
        NotCoveredError: If a layer is not one of those that BackPACK knows.
        ModuleNotFoundError: If BackPACK is not installed.
    """

    def __init__(self, model: nn.Module, forward: Forward) -> None:
        _, extend = _backpack()
        _check_layers(model)
        self.model = copy.deepcopy(model)
        self.forward = forward
        for layer in _leaves(self.model).values():
            extend(layer)  # and no container, of which BackPACK would have to know the class
        self.loss = extend(nn.MSELoss(reduction="sum"))

    def outputs(self, inputs: Any) -> Tensor:
        """Run the copy, and return its outputs.

        Raises:
            NotCoveredError: If it is no plain chain of layers.
        """
        self.places: dict[str, int] = {}
        with _watching(self.model, self.places) as chain:
            try:
                outputs = self.forward(self.model, take(inputs, _with_gradient))
            except RuntimeError as error:  # an operation in place on what BackPACK's hooks hand on
                raise NotCoveredError(str(error)) from error
        if not chain or not chain[-1].holds(outputs):
            raise NotCoveredError("the outputs are not those of the last layer as they are")
        return outputs

    def factors(
        self, outputs: Tensor, scores: list[Tensor], *, keep: bool
    ) -> Iterator[tuple[str, Tensor, Tensor | None, int]]:
        """Yield each parameter's name, BackPACK's factors as sums over samples, and the number of places.

        Args:
            outputs: What :meth:`outputs` returned, ``N`` samples.
            scores: Scores of these outputs.
            keep: Whether more scores of them will follow.

        Raises:
            NotCoveredError: If BackPACK fails.
        """
        backpack, _ = _backpack()
        # A new one: it keeps what it has passed backwards.
        extension = _factors_from(torch.stack(scores))
        try:
            with backpack(extension, retain_graph=keep):
                loss = self.loss(outputs, torch.zeros_like(outputs))
                loss.backward(retain_graph=keep)
        except (AssertionError, AttributeError, IndexError, RuntimeError) as error:
            raise NotCoveredError(str(error)) from error
        n = len(outputs)
        for name, p in trainable_parameters(self.model).items():
            found = getattr(p, extension.savefield, None)
            if found is None:
                raise NotCoveredError(f"there are no factors of {name!r}")
            delattr(p, extension.savefield)
            p.grad = None
            of_rows, *of_columns = (part.detach() for part in found)
            columns = n * of_columns[0] if of_columns else None  # it has the mean of inputs
            layer, _, _ = name.rpartition(".")
            yield name, of_rows, columns, self.places[layer]


class Link:
    """A tensor at a moment: an operation in place makes another link of it."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.version = tensor._version

    def holds(self, x: Any) -> bool:
        """Whether ``x`` has the same memory and shape, unchanged; hooks hand on aliases of tensors."""
        own = self.tensor
        if not isinstance(x, Tensor) or x.data_ptr() != own.data_ptr():
            return False
        same_shape = x.shape == own.shape and x.stride() == own.stride()
        return same_shape and x._version == self.version


def _check_layers(model: nn.Module) -> None:
    owned: list[int] = []
    for module in model.modules():
        owned += [id(p) for p in module.parameters(recurse=False)]
    if len(set(owned)) < len(owned):
        raise NotCoveredError("weights are tied")
    for name, layer in model.named_modules():
        if type(layer) not in KNOWN:
            if [*layer.parameters(recurse=False)]:
                raise NotCoveredError(f"{name!r} is a {type(layer).__name__}")
            continue
        unusual = (
            getattr(layer, "padding_mode", "zeros") != "zeros"
            or isinstance(getattr(layer, "padding", 0), str)
            or getattr(layer, "groups", 1) != 1
            or getattr(layer, "inplace", False)
        )
        if unusual:
            raise NotCoveredError(f"{name!r} is {layer}")


def _leaves(model: nn.Module) -> dict[str, nn.Module]:
    return {name: layer for name, layer in model.named_modules() if type(layer) in KNOWN}


@contextmanager
def _watching(model: nn.Module, places: dict[str, int]) -> Iterator[list[Link]]:
    """Note what each layer returns, and at how many places of a sample it is applied; raise where the chain breaks."""
    chain: list[Link] = []

    def before(layer: nn.Module, args: tuple[Any, ...]) -> None:
        unbroken = len(args) == 1 and (not chain or chain[-1].holds(args[0]))
        if not unbroken:
            raise NotCoveredError(
                f"{layer} does not get the output of the layer before it as it is"
            )

    def after(name: str) -> Any:
        def hook(layer: nn.Module, args: tuple[Tensor], output: Tensor) -> None:
            if name in places:
                raise NotCoveredError(f"{name!r} is called twice")
            if isinstance(layer, nn.Linear) and output.dim() != 2:
                raise NotCoveredError(f"{name!r} is applied to sequences")
            places[name] = len(output) * output.shape[2:].numel()
            chain.append(Link(output))

        return hook

    handles = []
    for name, layer in _leaves(model).items():
        handles.append(layer.register_forward_pre_hook(before))
        handles.append(layer.register_forward_hook(after(name)))
    try:
        yield chain
    finally:
        for handle in handles:
            handle.remove()


def _factors_from(scores: Tensor) -> Any:
    """Return BackPACK's extension for Kronecker factors, with the two parts replaced.

    Args:
        scores: What its backward pass starts from, ``[scores, N, C]``.
    """
    from backpack.extensions import KFLR
    from backpack.extensions.secondorder.hbp.convnd import HBPConvNd
    from backpack.extensions.secondorder.hbp.losses import HBPMSELoss

    class Scores(HBPMSELoss):
        def backpropagate(
            self,
            ext: Any,
            module: nn.Module,
            g_inp: Any,
            g_out: Any,
            backproped: Any,
        ) -> Tensor:
            return scores

    class KFC(HBPConvNd):
        def weight(
            self,
            ext: Any,
            module: nn.Module,
            g_inp: Any,
            g_out: Any,
            backproped: Tensor,
        ) -> list[Tensor]:
            _, A = super().weight(ext, module, g_inp, g_out, backproped)
            b = backproped.flatten(3)  # [scores, N, channels, positions]
            return [torch.einsum("snit,snjt->ij", b, b), A]

    extension = KFLR()
    extension.set_module_extension(nn.MSELoss, Scores(), overwrite=True)
    for dims, kind in enumerate((nn.Conv1d, nn.Conv2d, nn.Conv3d), start=1):
        extension.set_module_extension(kind, KFC(dims), overwrite=True)
    return extension


def _with_gradient(x: Tensor) -> Tensor:
    """BackPACK's hooks warn about inputs without a gradient."""
    return x.detach().requires_grad_() if x.is_floating_point() else x


def _backpack() -> tuple[Any, Any]:
    try:
        from backpack import backpack, extend
    except ImportError as error:
        raise ModuleNotFoundError(
            "Install BackPACK for this: `pip install lightning-taskinfo[backpack]`."
        ) from error
    return backpack, extend
