"""The network that a certificate is about, the samples it is certified on, draws of its weights, and their errors.

An error, and a disagreement, is one class per sample, or one per token of a sequence.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Generator, Tensor, nn

from lightning_taskinfo._calls import outputs_of
from lightning_taskinfo._nested import IGNORED, pick, split, take
from lightning_taskinfo._observe import HALVES, at_least_float32, trainable_parameters
from lightning_taskinfo._ranges import check_choice
from lightning_taskinfo.certificates.samples import Samples
from lightning_taskinfo.distributions import WeightGaussian
from lightning_taskinfo.fisher.measure import Forward
from lightning_taskinfo.variational import noisy_weights

Index = Tensor | slice
Loss = Callable[[Tensor, Tensor], Tensor]
ErrorKind = Literal["class", "token", "sequence"]
CHUNK = 1024  # samples that go through the network at a time


@dataclass
class Subject:
    """A trained network and the samples it is certified on; it is called inside ``observing``.

    Args:
        model: The network.
        samples: All inputs, ``N`` of them, and their labels.
        seed: Seed of all random draws.
        error: What counts as an error.
        loss_fn: Loss of each sample from outputs and targets, instead of the error.
        forward_fn: How to get the outputs; ``model(inputs)`` by default.

    Raises:
        ValueError: If the network has no plain weights to draw, or its outputs do not fit the labels.
    """

    model: nn.Module
    samples: Samples
    seed: int = 0
    error: ErrorKind = "class"
    loss_fn: Loss | None = None
    forward_fn: Forward | None = None

    def __post_init__(self) -> None:
        self.device = check_certifiable(self.model)
        self.inputs, self.targets = self.samples
        self.n = len(self.targets)
        self.generator = Generator(self.device).manual_seed(self.seed)
        if self.loss_fn is None:
            with torch.no_grad():
                few = self.outputs(self.inputs, slice(2))
            check_scores(self.error, few, self.targets[:2], self.targets)
            self.own = self.predictions(self.inputs)

    def outputs(self, inputs: Any, index: Index = slice(None)) -> Tensor:
        """Run the network on some inputs the way its user does.

        A drawn network is in float32: rounded draws would be those of another post-distribution
        than the one whose KL is paid for.
        """
        inputs = pick(inputs, index, self.device)
        if not any(p.dtype in HALVES for p in self.model.parameters()):
            inputs = take(inputs, at_least_float32)
        return outputs_of(self.model, inputs, self.forward_fn)

    @torch.no_grad()
    def predictions(self, inputs: Any) -> Tensor:
        """Return the predictions of the network's present weights for many inputs."""
        return torch.cat([predictions(self.outputs(part)) for part in split(inputs, CHUNK)])

    def all_losses(self) -> Tensor:
        """Return the losses of all samples under the network's present weights."""
        chunks = torch.arange(self.n, device="cpu").split(CHUNK)
        return torch.cat([self.losses(index)[0] for index in chunks])

    @torch.no_grad()
    def losses(self, index: Index) -> Tensor:
        """Return the losses of some samples under the present weights, and their disagreement with the network.

        A loss of the user's own knows no disagreement: it is infinite.

        Returns:
            Both, shape ``[2, samples]``, float64.
        """
        targets = pick(self.targets, index, self.device)
        outputs = self.outputs(self.inputs, index)
        if self.loss_fn is None:
            predicted = predictions(outputs)
            own = pick(self.own, index, self.device)
            counted = targets != IGNORED
            both = [differences(predicted, other, counted, self.error) for other in (targets, own)]
            return torch.stack(both)
        values = self.loss_fn(outputs, targets)
        if values.shape != targets.shape[:1]:
            raise ValueError(
                f"`loss_fn` must return a value for each of {len(targets)}, got shape {list(values.shape)}."
            )
        # An output that is no number is an error.
        losses = torch.nan_to_num(values.double(), nan=1.0)
        return torch.stack([losses, torch.full_like(losses, torch.inf)])

    def draw_losses(self, post: WeightGaussian, size: int) -> Tensor:
        """Draw one network; return its losses and disagreements on ``size`` random samples, or on all there are."""
        index: Index = slice(None)
        if size < self.n:
            index = torch.randint(self.n, (size,), generator=self.generator, device=self.device)
        with post.with_weights(self.model, self.generator):
            return self.losses(index)


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
        ValueError: If the shapes do not fit, or the targets are no class indices.

    Example:
        >>> zero_one_loss(torch.tensor([[2.0, 1.0], [2.0, 1.0]]), torch.tensor([0, 1]))
        tensor([0., 1.])
    """
    check_scores("class", outputs, targets)
    return (predictions(outputs) != targets).to(outputs.dtype)


def check_certifiable(model: nn.Module) -> torch.device:
    """Return where the weights are; raise a ``ValueError`` if there are none to put a Gaussian around."""
    if any(noisy_weights(model)):
        raise ValueError(
            "`model` must have plain weights, got noisy ones: `remove_weight_noise` gives them back."
        )
    for weight in trainable_parameters(model).values():
        return weight.device
    raise ValueError(
        "`model` must have trainable weights, got none: frozen ones have nothing to certify."
    )


def check_scores(
    error: str,
    outputs: Tensor,
    targets: Tensor | None,
    all_targets: Tensor | None = None,
    *,
    who: str = "a certificate",
) -> None:
    """Raise a ``ValueError`` if outputs and labels do not fit the kind of error.

    Args:
        error: What counts as an error.
        outputs: Outputs for some samples.
        targets: Labels of the same samples.
        all_targets: Labels of all samples, if there are more.
        who: What needs them, for messages.
    """
    check_choice(get_args(ErrorKind), error=error)
    axes = "[N, C]" if error == "class" else "[N, T, V]"
    *shape, C = outputs.shape
    if len(shape) != axes.count(",") or C < 2:
        raise ValueError(
            f"{who}: where `error` is {error!r}, `model` must return logits {axes} of at least 2 classes, got "
            f"{[*shape, C]}; set `forward_fn` to a function of (model, inputs) that returns them."
        )
    given = "none" if targets is None else f"{targets.dtype} of shape {list(targets.shape)}"
    if (
        targets is None
        or not torch.can_cast(targets.dtype, torch.int64)
        or [*targets.shape] != shape
    ):
        raise ValueError(
            f"{who} needs class indices (integers) of shape {shape} as targets, got {given}."
        )
    named = targets if all_targets is None else all_targets
    if error != "class":
        named = named[named != IGNORED]
    if not len(named):
        raise ValueError(f"{who} needs labels to count errors by, got none but {IGNORED}.")
    wrong = named[(named < 0) | (named >= C)]
    if len(wrong):
        raise ValueError(
            f"{who} needs targets from 0 to {C - 1}, as `model` returns {C} logits, got {wrong[0]}."
        )
