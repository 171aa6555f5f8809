r"""Transfer whose answer is known: deep linear networks, and shallow ReLU students of ReLU teachers.

Both are simulated many repetitions at once. :func:`simulate_transfer` draws samples of a linear
target task and takes the points at which gradient flow ends, which are known in closed form for
each draw.

:func:`simulate_student_teacher` is the ablated set-up: the target teacher has some features, the
source teacher what is left of them after a fraction was removed. A student learns the source from a
stream of fresh samples, then the target from ``n`` samples. Its risk is exact: squared distances
between ReLU networks over Gaussian inputs have a closed form.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import repeat

import torch
from torch import Generator, Tensor

from lightning_taskinfo._ranges import check_counts, check_positive
from lightning_taskinfo.functional.features import ablate, relu_kernel, span_norms


@dataclass(frozen=True)
class TransferRisks:
    """Risks of three ways to learn a target task, one entry a repetition, without the irreducible noise.

    Attributes:
        scratch: Trained on the target alone.
        linear: Only the last layer is fitted on top of pretrained features.
        fine_tune: All layers are trained, from the pretrained ones.
    """

    scratch: Tensor
    linear: Tensor
    fine_tune: Tensor


@dataclass(frozen=True)
class LinearTasks:
    """Linear target tasks and samples of them, for ``R`` repetitions of ``A`` angles.

    Attributes:
        source: Unit source teachers, shape ``[R, d]``.
        target: Unit target teachers, shape ``[R, A, d]``.
        inputs: Gaussian inputs, shape ``[R, n, d]``, the same for all angles.
        labels: Noisy labels, shape ``[R, n, A]``.
    """

    source: Tensor
    target: Tensor
    inputs: Tensor
    labels: Tensor


def draw_tasks(
    theta: Tensor,
    n: int,
    sigma: float,
    *,
    dimension: int = 200,
    repetitions: int = 20,
    generator: Generator | None = None,
) -> LinearTasks:
    """Draw teachers at the angles ``theta`` and ``n`` noisy samples of each target, in the dtype of ``theta``.

    Args:
        theta: Angles between source and target, shape ``[A]``.
        n: Number of samples.
        sigma: Standard deviation of the label noise.
        dimension: Dimension ``d`` of the inputs.
        repetitions: Number ``R`` of independent draws.
        generator: Source of randomness; torch's own if not given.

    Returns:
        The draws.

    Raises:
        ValueError: If ``n`` or ``repetitions`` is below 1 or ``dimension`` below 2.

    Example:
        >>> draw_tasks(torch.tensor([0.0, 1.0]), 3, 0.1, dimension=5, repetitions=7).labels.shape
        torch.Size([7, 3, 2])
    """
    check_counts(n=n, repetitions=repetitions)
    if dimension < 2:
        raise ValueError(f"`dimension` must be at least 2, got {dimension}.")

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=theta.dtype, device=theta.device)

    plane = torch.linalg.qr(randn(repetitions, dimension, 2)).Q.mT  # [R, 2, d], orthonormal
    target = torch.stack([theta.cos(), theta.sin()], -1) @ plane  # [R, A, d]
    inputs = randn(repetitions, n, dimension)
    labels = inputs @ target.mT + sigma * randn(repetitions, n, 1)
    return LinearTasks(plane[:, 0], target, inputs, labels)


def simulate_transfer(
    theta: Tensor | float,
    gamma: float,
    sigma: float,
    *,
    dimension: int = 200,
    repetitions: int = 20,
    depth: int = 2,
    ridge: float = 0.0,
    generator: Generator | None = None,
) -> TransferRisks:
    r"""Risks on drawn target samples of networks that gradient flow has trained to the end.

    Scratch training ends in the minimum-norm solution :math:`\beta_{sc} = X^+ y`; linear transfer
    in ridge regression on :math:`\beta_s^\top x`; fine-tuning in
    :math:`\beta_{sc} + b^{L-1} (I - P)\beta_s` with :math:`P` the projection onto the samples and :math:`b` the layers'
    norm, :math:`b^{2L} = \|\beta_{sc}\|^2 + b^{2(L-1)}\,\|(I-P)\beta_s\|^2`.

    Args:
        theta: Angles between source and target, any shape ``[...]``; all angles see the same inputs
            and noise.
        gamma: Samples per dimension; ``n`` is ``gamma * dimension``, rounded.
        sigma: Standard deviation of the label noise.
        dimension: Dimension of the inputs.
        repetitions: Number ``R`` of independent draws.
        depth: Number of layers.
        ridge: Penalty ``n * ridge`` on the squared last layer in linear transfer.
        generator: Source of randomness; torch's own if not given.

    Returns:
        Risks of shape ``[..., R]``.

    Raises:
        ValueError: If an argument is outside its domain.

    Example:
        >>> risks = simulate_transfer(0.0, 2.0, 0.0, dimension=20, repetitions=3)
        >>> risks.fine_tune.shape, bool((risks.fine_tune < 1e-6).all())
        (torch.Size([3]), True)
    """
    if not isinstance(theta, Tensor):
        theta = torch.tensor(float(theta))
    draws = draw_tasks(
        theta.flatten(),
        round(gamma * dimension),
        sigma,
        dimension=dimension,
        repetitions=repetitions,
        generator=generator,
    )
    scratch, unseen = minimum_norm(draws)
    factor = _layer_product(scratch, unseen, depth)  # [R, A]
    tuned = scratch + factor.unsqueeze(-1) * unseen.unsqueeze(1)
    last_layer = _ridge_on_feature(draws, ridge)  # [R, A]
    linear = last_layer.unsqueeze(-1) * draws.source.unsqueeze(1)

    def risk(beta: Tensor) -> Tensor:
        squares = (beta - draws.target).square().sum(-1)  # [R, A]
        return squares.mT.reshape(*theta.shape, -1)

    return TransferRisks(risk(scratch), risk(linear), risk(tuned))


def minimum_norm(draws: LinearTasks) -> tuple[Tensor, Tensor]:
    """Minimum-norm least-squares solutions, and the part of the source teachers that the samples do not see.

    Args:
        draws: LinearTasks of target tasks.

    Returns:
        ``[R, A, d]`` solutions and ``[R, d]`` unseen parts, which are 0 where there are at least
        ``d`` samples.
    """
    X, y = draws.inputs, draws.labels
    if X.shape[1] < X.shape[2]:  # n < d: (I - P) v = v - Xᵀ (X Xᵀ)⁻¹ X v
        factor = torch.linalg.cholesky(X @ X.mT)
        seen = X @ draws.source.unsqueeze(-1)
        right = torch.cat([y, seen], -1)
        solved = (X.mT @ torch.cholesky_solve(right, factor)).mT  # [R, A + 1, d]
        return solved[:, :-1], draws.source - solved[:, -1]
    factor = torch.linalg.cholesky(X.mT @ X)
    return torch.cholesky_solve(X.mT @ y, factor).mT, torch.zeros_like(draws.source)


def _ridge_on_feature(draws: LinearTasks, ridge: float) -> Tensor:
    """Last layers ``[R, A]`` fitted to the one pretrained feature."""
    z = draws.inputs @ draws.source.unsqueeze(-1)  # [R, n, 1]
    scale = z.square().sum(1, keepdim=True) + z.shape[1] * ridge
    return (z.mT @ draws.labels / scale).squeeze(1)


def _layer_product(scratch: Tensor, unseen: Tensor, depth: int) -> Tensor:
    """Products ``b^(L-1)``, ``[R, A]``, by bisection in ``b²``: slower than Newton's method, and independent of it."""
    s = scratch.square().sum(-1)  # [R, A]
    u = unseen.square().sum(-1, keepdim=True)  # [R, 1]
    low = u.expand_as(s)
    high = u + s.pow(1 / depth)
    for _ in range(60):
        middle = 0.5 * (low + high)
        above = middle.pow(depth - 1) * (middle - u) > s
        low = torch.where(above, low, middle)
        high = torch.where(above, middle, high)
    return (0.5 * (low + high)).pow(0.5 * (depth - 1))


@dataclass(frozen=True)
class ReLUNetworks:
    """Shallow networks ``x -> mean_i c_i · relu(w_i · x)``, one a repetition.

    Attributes:
        weights: First layers, shape ``[R, m, d]``.
        coefficients: Last layers, shape ``[R, m]``.
    """

    weights: Tensor
    coefficients: Tensor

    def __call__(self, inputs: Tensor) -> Tensor:
        """Return the outputs, ``[R, n]``, on inputs ``[R, n, d]``."""
        sums = torch.bmm(self.features(inputs), self.coefficients.unsqueeze(-1))
        return sums.squeeze(-1) / self.weights.shape[1]

    def features(self, inputs: Tensor) -> Tensor:
        """Return the hidden layer, ``[R, n, m]``."""
        return torch.bmm(inputs, self.weights.mT).relu()


@dataclass(frozen=True)
class StudentTeacherRisks(TransferRisks):
    """Risks of the students, and the part of the target outside the span of features, one entry a repetition.

    Attributes:
        scratch: Risk of a student trained on the target's samples alone.
        linear: Risk after a new last layer on the pretrained student's features.
        fine_tune: Risk after all layers were trained on.
        outside: Squared out-of-span norm for the pretrained student's features; no linear transfer
            gets below it.
        outside_source: The same for the source teacher's features, what a perfect student would
            have.
    """

    outside: Tensor
    outside_source: Tensor


def random_networks(
    repetitions: int,
    width: int,
    dimension: int,
    *,
    generator: Generator | None = None,
) -> ReLUNetworks:
    """Networks with features of unit norm, uniform on the sphere, and standard normal last layers.

    Example:
        >>> random_networks(3, 5, 2)(torch.zeros(3, 7, 2, dtype=torch.float64)).shape
        torch.Size([3, 7])
    """
    shape = (repetitions, width)
    weights = torch.randn(*shape, dimension, generator=generator, dtype=torch.float64)
    coefficients = torch.randn(shape, generator=generator, dtype=torch.float64)
    return ReLUNetworks(weights / weights.norm(dim=-1, keepdim=True), coefficients)


def squared_distance(networks: ReLUNetworks, others: ReLUNetworks) -> Tensor:
    """Mean squared difference of outputs over Gaussian inputs, exactly, shape ``[R]``.

    Example:
        >>> networks = random_networks(2, 3, 4)
        >>> twice = ReLUNetworks(networks.weights, 2 * networks.coefficients)
        >>> zero = ReLUNetworks(networks.weights, 0 * networks.coefficients)
        >>> torch.allclose(squared_distance(twice, networks), squared_distance(networks, zero))
        True
    """
    weights = torch.cat([networks.weights, others.weights], 1)
    ours = networks.coefficients / networks.weights.shape[1]
    theirs = others.coefficients / others.weights.shape[1]
    c = torch.cat([ours, -theirs], 1).unsqueeze(-1)
    kernel = relu_kernel(weights, weights)
    return (c.mT @ kernel @ c).flatten().clamp(min=0)


def train_networks(
    networks: ReLUNetworks,
    batches: Iterable[tuple[Tensor, Tensor]],
    *,
    learning_rate: float = 0.5,
) -> ReLUNetworks:
    """Gradient descent of both layers on half the mean squared error, one step per batch.

    Rates are in units of the width, as in the mean-field limit: features move as far in a wide
    network as in a narrow.

    Args:
        networks: Where to start; left as they are.
        batches: Inputs ``[R, n, d]`` and labels ``[R, n]``; the same pair again and again for
            full-batch descent.
        learning_rate: Step size over the width.

    Returns:
        The trained networks.

    Raises:
        ValueError: If ``learning_rate`` is not positive.

    Example:
        >>> inputs = torch.ones(1, 1, 1, dtype=torch.float64)
        >>> start = ReLUNetworks(inputs, inputs[0])
        >>> train_networks(start, [(inputs, torch.zeros(1, 1))], learning_rate=0.5).coefficients
        tensor([[0.5000]], dtype=torch.float64)
    """
    check_positive(learning_rate=learning_rate)
    now = networks
    for inputs, labels in batches:
        scale = learning_rate / inputs.shape[1]
        hidden = now.features(inputs)
        residual = (now(inputs) - labels).unsqueeze(-1)  # [R, n, 1]
        slope = residual * (hidden > 0) * now.coefficients.unsqueeze(1)  # [R, n, m]
        weights = now.weights - scale * torch.bmm(slope.mT, inputs)
        coefficients = now.coefficients - scale * torch.bmm(hidden.mT, residual).squeeze(-1)
        now = ReLUNetworks(weights, coefficients)
    return now


def fit_last_layer(
    networks: ReLUNetworks,
    inputs: Tensor,
    labels: Tensor,
    *,
    ridge: float = 1e-4,
) -> ReLUNetworks:
    """Linear transfer: ridge regression of the labels on the frozen features.

    Args:
        networks: Networks whose first layers are kept.
        inputs: Inputs, shape ``[R, n, d]``.
        labels: Labels, shape ``[R, n]``.
        ridge: Penalty ``n * ridge`` on the squared weights of the features.

    Returns:
        The networks with new last layers.

    Raises:
        ValueError: If ``ridge`` is not positive.
    """
    check_positive(ridge=ridge)
    n, m = inputs.shape[1], networks.weights.shape[1]
    hidden = networks.features(inputs)
    penalty = ridge * torch.eye(m, dtype=inputs.dtype)
    gram = torch.bmm(hidden.mT, hidden) / n + penalty
    right = torch.bmm(hidden.mT, labels.unsqueeze(-1)) / n
    solved = torch.cholesky_solve(right, torch.linalg.cholesky(gram)).squeeze(-1)
    return ReLUNetworks(networks.weights, m * solved)


def simulate_student_teacher(
    fraction: float,
    n: int,
    *,
    sigma: float = 0.0,
    dimension: int = 10,
    teacher_width: int = 8,
    student_width: int = 40,
    repetitions: int = 10,
    steps: int = 2000,
    ridge: float = 1e-4,
    generator: Generator | None = None,
) -> StudentTeacherRisks:
    """Pretrain students on ablated teachers and transfer them to the whole ones.

    Args:
        fraction: Fraction of the target teacher's features that the source teacher lacks.
        n: Number of target samples.
        sigma: Standard deviation of the label noise on the target.
        dimension: Dimension of the inputs.
        teacher_width: Number of features of the target teacher.
        student_width: Number of features of the students.
        repetitions: Number ``R`` of independent draws.
        steps: Steps of gradient descent, for pretraining, scratch training and fine-tuning each.
        ridge: See :func:`fit_last_layer`.
        generator: Source of randomness; torch's own if not given.

    Returns:
        Risks and out-of-span norms, each of shape ``[R]``.

    Raises:
        ValueError: If an argument is outside its domain.

    Example:
        >>> simulate_student_teacher(0.5, 20, repetitions=2, steps=5).linear.shape
        torch.Size([2])
    """
    target = random_networks(repetitions, teacher_width, dimension, generator=generator)
    features = torch.cat([target.weights, target.coefficients.unsqueeze(-1)], -1)
    kept = ablate(features, fraction, generator=generator)
    weights, coefficients = kept[..., :-1], kept[..., -1]
    source = ReLUNetworks(weights.contiguous(), coefficients.contiguous())
    student = random_networks(repetitions, student_width, dimension, generator=generator)
    pretrained = train_networks(student, _stream(source, steps, generator))
    inputs = torch.randn(repetitions, n, dimension, generator=generator, dtype=torch.float64)
    noise = torch.randn(repetitions, n, generator=generator, dtype=torch.float64)
    labels = target(inputs) + sigma * noise
    scratch = train_networks(student, repeat((inputs, labels), steps))
    linear = fit_last_layer(pretrained, inputs, labels, ridge=ridge)
    fine_tuned = train_networks(pretrained, repeat((inputs, labels), steps))

    def outside(features: Tensor) -> Tensor:
        return span_norms(features, target.weights, target.coefficients).outside

    return StudentTeacherRisks(
        scratch=squared_distance(scratch, target),
        linear=squared_distance(linear, target),
        fine_tune=squared_distance(fine_tuned, target),
        outside=outside(pretrained.weights),
        outside_source=outside(source.weights),
    )


def _stream(
    teacher: ReLUNetworks,
    steps: int,
    generator: Generator | None,
) -> Iterable[tuple[Tensor, Tensor]]:
    """Fresh samples of a teacher, a batch of 256 a step: the population loss, as far as a step can see it."""
    repetitions, _, dimension = teacher.weights.shape
    for _ in range(steps):
        shape = (repetitions, 256, dimension)
        inputs = torch.randn(shape, generator=generator, dtype=teacher.weights.dtype)
        yield inputs, teacher(inputs)
