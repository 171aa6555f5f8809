"""The network that a certificate is about, the samples it is certified on, draws of its weights, and their errors.

An error, and a disagreement, is one class per sample, or one per token of a sequence.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Generator, Tensor, nn

from lightning_taskinfo._batches import IGNORED, outputs_of, sample_count, take
from lightning_taskinfo._observe import HALVES, at_least_float32, trainable_parameters
from lightning_taskinfo.distributions import WeightGaussian
from lightning_taskinfo.fisher.fallback import Forward
from lightning_taskinfo.variational import noisy_weights

Loss: TypeAlias = Callable[[Tensor, Tensor], Tensor]
ErrorKind: TypeAlias = Literal["class", "token", "sequence"]
CHUNK = 1024  # samples that go through the network at a time


@dataclass(frozen=True)
class Subject:
    """A trained network and the samples it is certified on.

    Attributes:
        model: The network, in eval mode.
        inputs: All inputs, ``N`` of them: a tensor, or tuples, lists and dicts of tensors.
        targets: Their labels.
        generator: Where all random draws come from, on the model's device.
        error: What counts as an error.
        loss_fn: Loss of each sample from outputs and targets, instead of the error.
        forward_fn: How to get the outputs; ``model(inputs)`` by default.
        own: The network's own predictions for all samples; ``None`` with a loss of the user's own.
        float32: Whether half-precision inputs become float32.
    """

    model: nn.Module
    inputs: Any
    targets: Tensor
    generator: Generator
    error: ErrorKind = "class"
    loss_fn: Loss | None = None
    forward_fn: Forward | None = None
    own: Tensor | None = field(default=None, repr=False)
    float32: bool = False

    @classmethod
    def of(
        cls,
        model: nn.Module,
        samples: tuple[Any, Tensor],
        *,
        seed: int,
        error: ErrorKind = "class",
        loss_fn: Loss | None = None,
        forward_fn: Forward | None = None,
    ) -> "Subject":
        """Seed the generator, see that outputs fit the labels, and keep the network's own predictions."""
        check_certifiable(model)
        inputs, targets = samples
        weights = trainable_parameters(model)
        first = next(iter(weights.values()))
        generator = Generator(first.device).manual_seed(seed)
        subject = cls(model, inputs, targets, generator, error, loss_fn, forward_fn)
        if loss_fn is not None:
            return subject
        with torch.no_grad():
            few = subject.outputs(subject.some(slice(2)))
        check_error(error, few, targets[:2], targets)
        return replace(subject, own=subject.predictions(inputs))

    @property
    def n(self) -> int:
        """Return the number of samples."""
        return len(self.targets)

    @property
    def device(self) -> torch.device:
        """Return where the network is."""
        return self.generator.device

    def some(self, index: Tensor | slice) -> Any:
        """Return some inputs, on the model's device."""
        return pick(self.inputs, index, self.device)

    @contextmanager
    def drawn(self, post: WeightGaussian) -> Iterator["Subject"]:
        """Draw one network; inside, the subject runs that one.

        A network with trainable weights in half precision runs in float32 then: rounded draws would
        be those of another post-distribution than the one whose KL is paid for.
        """
        weights = trainable_parameters(self.model).values()
        rounded = any(p.dtype in HALVES for p in weights)
        with post.with_weights(self.model, self.generator):
            yield replace(self, float32=rounded)

    def outputs(self, inputs: Any) -> Tensor:
        """Run the network the way its user does."""
        if self.float32:
            inputs = take(inputs, at_least_float32)
        return outputs_of(self.model, inputs, self.forward_fn)

    @torch.no_grad()
    def predictions(self, inputs: Any) -> Tensor:
        """Return the predictions of the network's present weights for many inputs."""
        parts = []
        for index in _chunks(sample_count(inputs)):
            outputs = self.outputs(pick(inputs, index, self.device))
            parts.append(predictions(outputs))
        return torch.cat(parts)

    def all_losses(self) -> Tensor:
        """Return the losses of all samples under the network's present weights."""
        parts = []
        for index in _chunks(self.n):
            losses, _ = self.losses(index)
            parts.append(losses)
        return torch.cat(parts)

    @torch.no_grad()
    def losses(self, index: Tensor | slice) -> tuple[Tensor, Tensor | None]:
        """Return the losses of some samples under the present weights, and their disagreement with the network."""
        targets = pick(self.targets, index, self.device)
        outputs = self.outputs(self.some(index))
        if self.loss_fn is None:
            assert self.own is not None
            predicted = predictions(outputs)
            named = self.counted(targets)
            own = pick(self.own, index, self.device)
            wrong = differences(predicted, targets, named, self.error)
            return wrong, differences(predicted, own, named, self.error)
        values = self.loss_fn(outputs, targets)
        if values.shape != targets.shape[:1]:
            raise ValueError(
                f"`loss_fn` must return a value for each of {len(targets)}, got shape {list(values.shape)}."
            )
        # An output that is no number is an error.
        return torch.nan_to_num(values.double(), nan=1.0), None

    def counted(self, targets: Tensor) -> Tensor:
        """Return where a label counts: everywhere but in padding."""
        if self.error == "class":
            return torch.ones_like(targets, dtype=torch.bool)
        return targets != IGNORED

    def draw_losses(self, post: WeightGaussian, size: int) -> tuple[Tensor, Tensor | None]:
        """Draw one network; return its losses and disagreements on ``size`` random samples, or on all there are."""
        index: Tensor | slice = slice(None)
        if size < self.n:
            index = torch.randint(self.n, (size,), generator=self.generator, device=self.device)
        with self.drawn(post) as one:
            return one.losses(index)


def _chunks(n: int) -> tuple[Tensor, ...]:
    return torch.arange(n, device="cpu").split(CHUNK)


def check_certifiable(model: nn.Module) -> None:
    """Raise a ``ValueError`` for a network that has no weights to put a Gaussian around, or has one already."""
    if any(noisy_weights(model)):
        raise ValueError(
            "`model` must have plain weights, got noisy ones: `remove_weight_noise` gives them back."
        )
    if not trainable_parameters(model):
        raise ValueError(
            "`model` must have trainable weights, got none: frozen ones have nothing to certify."
        )


def pick(values: Any, index: Tensor | slice, device: torch.device) -> Any:
    """Return some of many samples, on a device."""

    def some(x: Tensor) -> Tensor:
        rows = index
        if isinstance(index, Tensor):
            rows = index.to(x.device)
        return x[rows].to(device)

    return take(values, some)


def predictions(outputs: Tensor) -> Tensor:
    """Return the class with the highest score; -1, which is always wrong, where a score is no number.

    Args:
        outputs: Scores, shape ``[..., C]``.

    Example:
        >>> predictions(torch.tensor([[2.0, 1.0], [torch.nan, 1.0]]))
        tensor([ 0, -1])
    """
    no_number = outputs.isnan().any(-1)
    return outputs.argmax(-1).masked_fill(no_number, -1)


def differences(predicted: Tensor, reference: Tensor, counted: Tensor, kind: ErrorKind) -> Tensor:
    """Return how far predictions differ from labels, or from another network's predictions, for each sample.

    For one class per sample, or a whole sequence, that is 0 or 1; for tokens, the share that
    differs. All three obey the triangle inequality, on which the bound for the network itself
    rests.

    Args:
        predicted: Predicted classes, shape ``[N]`` or ``[N, T]``.
        reference: What they are compared with, of the same shape.
        counted: Where a difference counts, of the same shape, boolean.
        kind: ``"class"``, ``"token"`` (share of the tokens that differ) or ``"sequence"`` (whether
            any does).

    Returns:
        A value in [0, 1] for each sample, float64, shape ``[N]``.

    Example:
        >>> ours, theirs = torch.tensor([[1, 2, 3]]), torch.tensor([[1, 5, -100]])
        >>> differences(ours, theirs, theirs != -100, "token")
        tensor([0.5000], dtype=torch.float64)
        >>> differences(ours, theirs, theirs != -100, "sequence")
        tensor([1.], dtype=torch.float64)
    """
    differs = (predicted != reference) & counted
    if kind == "class":
        return differs.double()
    if kind == "sequence":
        return differs.any(-1).double()
    count = counted.sum(-1).clamp_min(1)
    return differs.sum(-1).double() / count


def zero_one_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return 1 for each wrong class and 0 for each right one.

    Args:
        outputs: Scores of the classes, shape ``[N, C]``; a sample with a score that is no number is
            wrong.
        targets: Indices of the right classes, integers of shape ``[N]``.

    Raises:
        ValueError: If the shapes do not fit, or the targets are no integers.

    Example:
        >>> zero_one_loss(torch.tensor([[2.0, 1.0], [2.0, 1.0]]), torch.tensor([0, 1]))
        tensor([0., 1.])
    """
    if outputs.ndim != 2 or targets.shape != outputs.shape[:1]:
        shapes = f"{list(outputs.shape)} and {list(targets.shape)}"
        raise ValueError(f"`outputs` and `targets` must have shapes [N, C] and [N], got {shapes}.")
    check_labels("`targets`", targets)
    return (predictions(outputs) != targets).to(outputs.dtype)


def check_labels(what: str, targets: Tensor) -> None:
    """Raise a ``ValueError`` for targets that are no class indices."""
    if targets.is_floating_point() or targets.is_complex():
        raise ValueError(
            f"{what} must be class indices (integers) of shape [N], got {targets.dtype} of shape {list(targets.shape)}."
        )


def check_error(kind: ErrorKind, outputs: Tensor, targets: Tensor, all_targets: Tensor) -> None:
    """Raise a ``ValueError`` if outputs and labels do not fit the kind of error, before anything is measured.

    Args:
        kind: What the user counts.
        outputs: Outputs for a few samples.
        targets: The labels of the same samples.
        all_targets: The labels of all samples.
    """
    if kind not in get_args(ErrorKind):
        raise ValueError(f"`error` must be one of {get_args(ErrorKind)}, got {kind!r}.")
    check_labels("targets of `data`", targets)
    shape = list(outputs.shape)
    if kind == "class" and outputs.ndim == 3 and targets.ndim == 2:
        raise ValueError(
            f"`error` must be 'token' or 'sequence' where `model` returns {shape}, got 'class'."
        )
    wanted = "[N, C]" if kind == "class" else "[N, T, V]"
    axes = wanted.count(",") + 1
    if outputs.ndim != axes or outputs.shape[-1] < 2:
        raise ValueError(
            f"`model` must return scores {wanted} of at least 2 classes for `error` = {kind!r}, got {shape}."
        )
    if targets.shape != outputs.shape[:-1]:
        raise ValueError(
            f"targets of `data` must have shape {shape[:-1]} where `model` returns {shape}, got {list(targets.shape)}."
        )
    named = all_targets if kind == "class" else all_targets[all_targets != IGNORED]
    low = int(named.min())
    high = int(named.max())
    C = outputs.shape[-1]
    if low < 0 or high >= C:
        wrong = low if low < 0 else high
        raise ValueError(
            f"targets of `data` must be classes from 0 to {C - 1}, as `model` returns {C} scores, got {wrong}."
        )
