r"""The autograd graph of a forward pass: its operations, which of them use which weights, and gradients pulled back.

The graph of a forward pass knows every use of every parameter. Going from a parameter towards the
outputs, one meets operations that know nothing of the samples (a transposed weight, a table looked
up at the same positions for all, a weight that is normed or computed from two others) and then one
whose output has rows of single samples. That one is the *use*: what flows into it is a weight,
computed from parameters alone, and what flows out belongs to samples. Which is which is shown in
:mod:`~lightning_taskinfo.fisher.proof`.
"""

import re
import warnings
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cache, cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge as Edge

from lightning_taskinfo._nested import tensors

# Operations whose output has entries of one input, each once at most: of a weight they make a
# weight.
MOVE_ENTRIES = re.compile(
    r"(T|Transpose|Permute|View|UnsafeView|ReshapeAlias|Unsqueeze|Squeeze|Alias|Clone|Slice|Select|Split|"
    r"SplitWithSizes|UnsafeSplit|Unbind|Narrow|Diagonal)Backward\d"
)
# Operations that let the gradient of some entries pass, and that of others not, by their values.
SELECT = re.compile(
    r"(Where|MaskedFill|Relu|Threshold|Clamp|ClampMin|ClampMax|Hard\w+|Softshrink|Maximum|Minimum|Fmax|Fmin|Max|Min|"
    r"\w*MaxPool\dD\w*)Backward\d"
)
WHOLE = (int, tuple)  # kinds of settings that may say where rows go
CHECKPOINT = "torch.utils.checkpoint"  # computes again what was kept, and gives it once in a pass

Source = tuple[int, int]  # number of an operation, and which of its outputs
Uses = dict[int, dict[int, Source]]  # numbers of operations, with weights by place
Signature = list[tuple[Any, ...]]
Note = Callable[[int, Sequence[Tensor | None]], None]  # takes gradients of an operation


class Graph:
    """The autograd graph of a forward pass, its operations numbered in the order of a walk from the outputs.

    Attributes:
        nodes: The operations.
        signature: Of each operation the kind, the shapes of its outputs, where each of its inputs comes from (None for
            a constant), the name if it is a parameter, and its settings that are whole numbers, such as the row that
            is selected. Graphs of one signature differ in the numbers of tensors only.
        leaves: The parameters' places by name.
        opaque: Why nothing can be shown about the graph; empty if something can.
    """

    def __init__(
        self,
        outputs: Tensor,
        parameters: Mapping[str, nn.Parameter],
    ) -> None:
        self.outputs = outputs
        names = {id(p): name for name, p in parameters.items()}
        first: Any = outputs.grad_fn
        self.nodes: list[Any] = [first]
        self.signature: Signature = []
        self.leaves: dict[str, int] = {}
        self.opaque = ""
        numbers = {first: 0}
        for number, node in enumerate(self.nodes):  # which grow
            sources: list[Source | None] = []
            for source, output in node.next_functions:
                if source is not None and source not in numbers:
                    numbers[source] = len(self.nodes)
                    self.nodes.append(source)
                sources.append(source and (numbers[source], output))
            variable = None if sources else getattr(node, "variable", None)
            name = names.get(id(variable))
            if name is not None:
                self.leaves[name] = number
            kind = node.name()
            if "CheckpointFunction" in kind:  # a backward pass goes to the parameters only
                self.opaque = "reentrant checkpointing"
            if kind == "NativeBatchNormBackward0" and len(outputs) == 1:
                node.register_prehook(_with_gaps)
            outputs_of = node._input_metadata
            if any(like.is_nested_tensor for like in outputs_of):
                self.opaque = "nested tensors"
            shapes = [tuple(like.shape) for like in outputs_of]
            self.signature.append((type(node), shapes, sources, name, _settings(node)))

    def edge(
        self,
        number: int,
        output: int = 0,
    ) -> Edge:
        """Return an output of an operation as a place that gradients can be pulled back to."""
        return Edge(self.nodes[number], output)

    def kind(self, number: int) -> str:
        """Return the name of an operation's kind."""
        return self.signature[number][0].__name__

    def sources(self, number: int) -> list[int]:
        """Return the operations that an operation takes its inputs from."""
        return [source[0] for source in self.signature[number][2] if source is not None]

    @cached_property
    def dtypes(self) -> set[torch.dtype]:
        """The types of what the operations put out."""
        return {out.dtype for node in self.nodes for out in node._input_metadata}

    @cached_property
    def functions(self) -> list[Any]:
        """The functions of the user's."""
        return [node for node in self.nodes if isinstance(node, BackwardCFunction)]

    def sparse(self, number: int) -> bool:
        """Whether an operation multiplies by a sparse matrix, whose zeros hide infinite gradients."""
        node = self.nodes[number]
        if fetched_by(node):
            return False
        factors = [getattr(node, f"_saved_{name}", None) for name in ("self", "mat1", "mat2")]
        return any(getattr(x, "layout", torch.strided) != torch.strided for x in factors)

    def without_masks(self) -> AbstractContextManager[None]:
        """Let gradients pass by selections in backward passes, as if every mask selected everything."""

        def pass_on(
            node: Any,
            inputs: tuple[Tensor | None, ...],
            outputs: tuple[Tensor | None, ...],
        ) -> Any:
            g = outputs[0]
            if g is None:
                return None
            pooled = re.search(r"MaxPool(\d)D", type(node).__name__)
            if pooled is not None:
                g = g.sum([*range(-int(pooled[1]), 0)], keepdim=True)
            elif not getattr(node, "_saved_keepdim", True):  # the largest along an axis
                axis = node._saved_dim
                g = g.unsqueeze(axis if axis < 2**63 else axis - 2**64)  # -1 as an unsigned number
            return tuple(x if x is None else _spread(g, x) for x in inputs)

        nodes = [node for node in self.nodes if SELECT.fullmatch(type(node).__name__)]
        return removed([node.register_hook(partial(pass_on, node)) for node in nodes])

    @cached_property
    def consumers(self) -> dict[int, list[tuple[int, int, int]]]:
        """By operation: who uses its output, at which place, and which of its outputs."""
        found = defaultdict(list)
        for number, operation in enumerate(self.signature):
            for place, source in enumerate(operation[2]):
                if source is not None:
                    found[source[0]].append((number, place, source[1]))
        return found

    def uses(self, mixed: set[int]) -> Uses:
        """Return the first operations on the ways from parameters that put out rows of samples, with their weights.

        Args:
            mixed: Operations whose outputs are no such rows.
        """
        found: Uses = {}
        stack = [*self.leaves.values()]
        seen = {*stack}
        while stack:
            number = stack.pop()
            for consumer, place, output in self.consumers[number]:
                if consumer not in mixed and not self._moves_entries(consumer):
                    found.setdefault(consumer, {})[place] = (number, output)
                elif consumer not in seen:
                    seen.add(consumer)
                    stack.append(consumer)
        return found

    def behind(
        self,
        numbers: Iterable[int],
        blocked: Collection[int] = (),
    ) -> set[int]:
        """Return the operations between some and the outputs, without those behind ``blocked``."""
        return _reached(numbers, lambda i: [found[0] for found in self.consumers[i]], blocked)

    def lowest(self, numbers: Collection[int]) -> list[int]:
        """Return those of some operations that none of the others is below."""
        above = self.behind(numbers)
        return [number for number in numbers if number not in above]

    def below(self, number: int) -> set[int]:
        """Return an operation, and all that it was computed from."""
        return {number} | _reached([number], self.sources)

    def roots(self, number: int) -> set[str]:
        """Return the names of the parameters that something was computed from."""
        below = self.below(number)
        return {name for name, leaf in self.leaves.items() if leaf in below}

    def unusual(self, number: int) -> bool:
        """Whether the output gradient of a use does not tell the gradients of its weights by sample."""
        # How often an index occurs in the whole batch divides the gradient.
        by_frequency = getattr(self.nodes[number], "_saved_scale_grad_by_freq", False)
        outputs = {output for _, _, output in self.consumers[number]}
        if number == 0:
            outputs.add(self.outputs.output_nr)
        return by_frequency or not outputs <= {0}

    def _moves_entries(self, number: int) -> bool:
        """Whether an operation only moves the entries of its one input, or shifts them by a number."""
        kind = self.kind(number)
        _, shapes, sources, *_ = self.signature[number]
        if kind == "ToCopyBackward0":  # to another precision, as autocast does
            nodes = [self.nodes[i] for i in (number, *self.sources(number))]
            return not any(like.dtype.is_complex for node in nodes for like in node._input_metadata)
        if kind == "AddBackward0" and sources[0] is not None and sources[1] is None:
            return bool(self.signature[sources[0][0]][1] == shapes)
        return MOVE_ENTRIES.fullmatch(kind) is not None

    def way(self, source: Source) -> tuple[str, ...] | None:
        """Return the kinds of the operations from a weight to its parameter if they only move entries."""
        way = []
        number, _ = source
        while sources := self.sources(number):
            if not self._moves_entries(number):
                return None
            if self.kind(number) != "ToCopyBackward0":
                way.append(self.kind(number))
            number = sources[0]
        return tuple(way) if self._unchanged(source, number) else None

    def _unchanged(
        self,
        source: Source,
        leaf: int,
    ) -> bool:
        """Whether entries of a gradient arrive at a parameter as they are: no hook on the way masks or scales them."""
        if source[0] == leaf:
            return True
        weight = self.edge(*source)
        large = 2.0**14  # what clips gradients changes it
        entries = torch.full((), large, dtype=like(weight).dtype, device=like(weight).device)
        (found,) = pulled_back(weight, [self.edge(leaf)], entries.expand(shape_of(weight)))
        if found is None:
            return False
        return bool((found == large).all())


def _spread(
    gradient: Tensor,
    other: Tensor,
) -> Tensor:
    """Return a gradient in the shape of another one, repeated or added up as broadcasting tells."""
    return (gradient + torch.zeros_like(other)).sum_to_size(other.shape).to(other.dtype)


def _with_gaps(gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    """Return gradients with gaps between their entries.

    On a CPU, torch's batch norm of one sample reads a transposed gradient as if it were laid out like the input, and
    returns wrong ones: not where there are gaps.
    """
    return tuple(g if g is None else torch.stack([g, g], -1)[..., 0] for g in gradients)


def _settings(node: Any) -> list[Any]:
    """Return the whole numbers that an operation has kept beside its tensors, such as axes, indices and sizes."""
    kind: Any = type(node)
    values = [getattr(node, name) for name in _settings_names(kind)]
    return [value for value in values if isinstance(value, WHOLE)]


@cache
def _settings_names(kind: Any) -> list[str]:
    names = {*dir(kind)}
    return sorted(
        name for name in names if name.startswith("_saved_") and f"_raw{name}" not in names
    )


def fetched_by(node: Any) -> set[str]:
    """Return the modules whose functions fetch what an operation has kept, such as checkpointing; none as a rule."""
    kind: Any = type(node)
    kept: list[Any] = []
    for name in _kept_names(kind):
        raw = getattr(node, name)
        kept += raw if isinstance(raw, list | tuple) else [raw]
    # Older versions of torch do not tell: then there may be a function.
    functions = [getattr(x, "unpack_hook", x) for x in kept if x is not None]
    return {function.__module__ for function in functions if function is not None}


@cache
def _kept_names(kind: Any) -> list[str]:
    return [name for name in dir(kind) if name.startswith("_raw_saved_")]


def _reached(
    numbers: Iterable[int],
    following: Callable[[int], list[int]],
    blocked: Collection[int] = (),
) -> set[int]:
    """Return all that follows some operations, without what is blocked or only follows that."""
    found: set[int] = set()
    stack = [*numbers]
    while stack:
        for number in following(stack.pop()):
            if number not in found and number not in blocked:
                found.add(number)
                stack.append(number)
    return found


# --- Gradients that are pulled back through a graph, or a part of it


@contextmanager
def removed(handles: Sequence[Any]) -> Iterator[None]:
    """Remove hooks afterwards, also on an exception."""
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def hooked(
    graph: "Graph",
    numbers: Iterable[int],
    note: Note,
) -> AbstractContextManager[None]:
    """Note the gradients by the outputs of some operations as backward passes arrive at them."""
    nodes = graph.nodes
    return removed([nodes[i].register_prehook(partial(note, i)) for i in numbers])


@contextmanager
def restored(functions: Sequence[Any]) -> Iterator[None]:
    """Run a backward pass, and put back what functions of the user's have saved, or keep in their context.

    Fused kernels overwrite it, and the gradients that they get, with the gradients that they return. Another pass, that
    of a training among them, would be wrong; and so are gradients of this one, unless they are copied before.
    """
    contexts = [dict(vars(node)) for node in functions]
    saved = [x for node in functions for x in node.saved_tensors if x is not None]
    saved += tensors(contexts)
    before = [x.detach().clone() for x in saved]
    counted = tuple(x for x in saved if not x.is_inference())
    handles = [node.register_prehook(lambda got: tuple(map(copied, got))) for node in functions]
    try:
        with removed(handles), torch.autograd._unsafe_preserve_version_counter(counted):
            yield
    finally:
        for node, context in zip(functions, contexts, strict=True):
            vars(node).clear()
            vars(node).update(context)
        for x, kept in zip(saved, before, strict=True):
            # What shares memory within itself, as by `expand`, nobody can have overwritten.
            if x.layout != torch.strided or not torch.equal(x, kept):
                x.data.copy_(kept)


def pulled_back(
    output: Tensor | Edge,
    sources: Sequence[Edge],
    gradient: Tensor,
    *,
    retain_graph: bool = True,
    batched: bool = False,
) -> tuple[Tensor | None, ...]:
    """Pull a gradient back to some places; None where none arrives."""
    return torch.autograd.grad(
        [output],  # type: ignore[arg-type]
        sources,
        [gradient],
        retain_graph=retain_graph,
        allow_unused=True,
        is_grads_batched=batched,
    )


def copied(gradient: Tensor | None) -> Tensor | None:
    """Return a copy that has no graph."""
    return None if gradient is None else gradient.detach().clone()


def several_pulled_back(
    output: Tensor | Edge,
    sources: Sequence[Edge],
    gradients: Tensor,
    functions: Sequence[Any] = (),
) -> list[Tensor | None]:
    """Pull gradients ``[S, ...]`` back to some places, ``[S, ...]`` each, in one pass, or in many where vmap fails.

    Functions of the user's on the way take one gradient after the other.
    """
    if len(gradients) > 1 and not functions:
        # An error of an operation of the user's comes again if it is no matter of vmap.
        with suppress(Exception), warnings.catch_warnings():
            # What vmap takes one by one is no slower than without.
            warnings.filterwarnings("ignore", message="There is a performance drop")
            return [*pulled_back(output, sources, gradients, batched=True)]
    one_by_one = []
    for gradient in gradients:
        with restored(functions):
            found = pulled_back(output, sources, gradient)
            one_by_one.append([*map(copied, found)] if functions else found)
    several = []
    for parts in zip(*one_by_one, strict=True):
        known = [part.detach().to_dense() for part in parts if part is not None]
        several.append(torch.stack(known) if known else None)
    return several


def pulled_to_input(
    node: Any,
    place: int,
    source: Edge,
    gradient: Tensor,
) -> Tensor:
    """Pull a gradient of an operation's output back to one of its inputs, by the operation's own backward alone.

    A pass of autograd would also come there on other ways, and run hooks. To be called
    :func:`inside_a_pass`; in one that is on its way, an operation computes what that one needs.

    Args:
        node: The operation.
        place: The input's place.
        source: What put it out.
        gradient: Of the operation's output.
    """
    others = [None] * (len(node._input_metadata) - 1)  # of outputs that nobody uses
    own = isinstance(node, BackwardCFunction)
    run = node.apply if own else node
    with restored([node] if own else []):
        found = run(gradient.to(node._input_metadata[0].dtype), *others)
        of_input = found[place] if isinstance(found, tuple) else found
        if of_input is None:
            return gradient.new_zeros(shape_of(source))
        of_weight = of_input.to_dense().sum_to_size(shape_of(source))
        return of_weight.detach().clone() if own else of_weight


def inside_a_pass(function: Callable[[], None]) -> None:
    """Call a function in a backward pass of its own, in which checkpointed regions run once for all that it reads."""
    with torch.enable_grad():
        output = torch.zeros((), device="cpu", requires_grad=True) * 1.0
        output.register_hook(lambda _: function())
        output.backward()


def shape_of(edge: Edge) -> torch.Size:
    """Return the shape of what an operation put out."""
    return torch.Size(like(edge).shape)


def like(edge: Edge) -> Any:
    """Return shape, type and device of what an operation put out."""
    return edge.node._input_metadata[edge.output_nr]
