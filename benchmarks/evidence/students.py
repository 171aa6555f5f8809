r"""Transfer whose answer is known exactly: shallow ReLU students of ReLU teachers.

The target teacher has some features, the source teacher what is left of them after a fraction was
removed. A student learns the source from a stream of fresh samples, then the target from ``n``
samples. Its risk is exact: squared distances between ReLU networks over Gaussian inputs have a
closed form. Many repetitions are simulated at once.

A network :math:`f(x) = \frac1m \sum_i c_i\, (w_i^\top x)_+` on inputs :math:`x \sim \mathcal N(0, I_d)` spans, with
its first layer frozen, the functions :math:`(w_i^\top x)_+`. Norms and projections in :math:`L^2` of the inputs need
only the mean products of two such features (Tahir, Ganguli, Rotskoff, *Features are fate*, arXiv:2410.08194,
appendix C).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import repeat
from typing import NamedTuple

import torch
from torch import Generator, Tensor

from lightning_taskinfo._ranges import check_positive


class SpanNorms(NamedTuple):
    """Squared norm of a target function and of its two parts; ``total = inside + outside``.

    Attributes:
        total: Squared norm of the function, shape ``[...]``.
        inside: Of its projection on the span of the features.
        outside: Of the rest.
    """

    total: Tensor
    inside: Tensor
    outside: Tensor


def relu_kernel(
    weights: Tensor,
    others: Tensor,
) -> Tensor:
    r"""Mean product of two ReLU features over Gaussian inputs, for all pairs.

    .. math::
        \big\langle (w^\top x)_+\, (v^\top x)_+ \big\rangle
            = \frac{\|w\|\,\|v\|}{2\pi} \Big[ \sqrt{1-u^2} + u\,(\pi - \arccos u) \Big],
        \qquad u = \frac{w^\top v}{\|w\|\,\|v\|}

    A zero vector gives zeros. Not differentiable by autograd where two vectors are parallel.

    Args:
        weights: First-layer weights, shape ``[..., m, d]``.
        others: More of them, shape ``[..., k, d]``.

    Returns:
        The products, shape ``[..., m, k]``.

    Example:
        >>> relu_kernel(torch.eye(2), torch.tensor([[2.0, 0.0], [-1.0, 0.0]]))
        tensor([[1.0000, 0.0000],
                [0.3183, 0.1592]])

    References:
        Cho, Saul, *Kernel methods for deep learning*, NeurIPS 2009.
    """
    rows = weights.norm(dim=-1).unsqueeze(-1)  # [..., m, 1]
    columns = others.norm(dim=-1).unsqueeze(-2)  # [..., 1, k]
    norms = rows * columns
    tiny = torch.finfo(norms.dtype).tiny
    u = (weights @ others.mT / norms.clamp(min=tiny)).clamp(-1, 1)
    bracket = (1 - u.square()).sqrt() + u * (torch.pi - u.arccos())
    return norms / (2 * torch.pi) * bracket


def span_norms(
    model: Tensor,
    target: Tensor,
    coefficients: Tensor,
) -> SpanNorms:
    r"""Squared norms of a target network inside and outside the span of a model's features.

    .. math::
        \|f\|^2 = \tfrac{1}{m_*} c^\top K_* c, \qquad
        \|P_\parallel f\|^2 = \tfrac{1}{m_*} c^\top \tilde K^\top K^{+} \tilde K c, \qquad
        \|P_\perp f\|^2 = \|f\|^2 - \|P_\parallel f\|^2

    .. math:: K = \frac{\langle\phi\phi^\top\rangle}{m}, \quad
        \tilde K = \frac{\langle\phi\,\phi_*^\top\rangle}{\sqrt{m\, m_*}}, \quad
        K_* = \frac{\langle\phi_*\phi_*^\top\rangle}{m_*}

    with the pseudo-inverse of :math:`K`, which is singular when features repeat. Use float64: in float32 the
    out-of-span norm is accurate to about :math:`10^{-6}` of the norm.

    Args:
        model: First-layer weights of the model, shape ``[..., m, d]``.
        target: First-layer weights of the target, shape ``[..., m*, d]``.
        coefficients: Last layer of the target, whose output is the **mean** of its neurons, shape ``[..., m*]``.

    Returns:
        The squared norms, each of shape ``[...]``.

    Raises:
        ValueError: If there is not one coefficient a target feature.

    Example:
        >>> features = torch.eye(3)
        >>> total, inside, outside = span_norms(features[:2], features[1:], torch.tensor([2.0, 0.0]))
        >>> total, outside < 1e-6
        (tensor(0.5000), tensor(True))
    """
    if coefficients.shape[-1] != target.shape[-2]:
        raise ValueError(
            f"`coefficients` must have one entry a target feature ({target.shape[-2]}), got {coefficients.shape[-1]}."
        )
    m, width = model.shape[-2], target.shape[-2]
    K = relu_kernel(model, model) / m  # [..., m, m]
    K_cross = relu_kernel(model, target) / (m * width) ** 0.5  # [..., m, m*]
    K_target = relu_kernel(target, target) / width  # [..., m*, m*]
    c = coefficients.unsqueeze(-1)  # [..., m*, 1]
    v = K_cross @ c  # [..., m, 1]
    inverse = torch.linalg.pinv(K, hermitian=True)
    total = (c.mT @ K_target @ c).squeeze((-2, -1)) / width
    inside = (v.mT @ inverse @ v).squeeze((-2, -1)) / width
    outside = (total - inside).clamp(min=0)  # rounding may leave a small negative number
    return SpanNorms(total, total - outside, outside)


def ablate(
    weights: Tensor,
    fraction: float,
    *,
    generator: Generator | None = None,
) -> Tensor:
    r"""Remove a fraction :math:`\mu` of the features, at random.

    The ablated set-up: the source teacher has what is left of the target's features, a model that learned the source
    has no others. Draws with equally seeded generators are nested: what :math:`\mu` removes, a larger one removes too.

    Args:
        weights: First-layer weights, shape ``[..., m, d]``.
        fraction: :math:`\mu`; ``round(fraction * m)`` features go.
        generator: Source of randomness; torch's own if not given.

    Returns:
        The remaining features in their order, shape ``[..., m - round(fraction * m), d]``.

    Raises:
        ValueError: If ``fraction`` is outside [0, 1) or leaves no feature.

    Example:
        >>> ablate(torch.eye(4), 0.5).shape
        torch.Size([2, 4])
    """
    m = weights.shape[-2]
    gone = round(fraction * m)
    if not 0 <= fraction < 1 or gone == m:
        raise ValueError(
            f"`fraction` must be in [0, 1) and leave a feature of {m}, got {fraction}."
        )
    device = None if generator is None else generator.device
    order = torch.randperm(m, generator=generator, device=device)
    kept = order[gone:].sort().values
    return weights.index_select(-2, kept.to(weights.device))


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
        last_layer = self.coefficients.unsqueeze(-1)
        sums = torch.bmm(self.features(inputs), last_layer)
        return sums.squeeze(-1) / self.weights.shape[1]

    def features(self, inputs: Tensor) -> Tensor:
        """Return the hidden layer, ``[R, n, m]``."""
        return torch.bmm(inputs, self.weights.mT).relu()


@dataclass(frozen=True)
class StudentTeacherRisks:
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

    scratch: Tensor
    linear: Tensor
    fine_tune: Tensor
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
    unit = weights / weights.norm(dim=-1, keepdim=True)
    return ReLUNetworks(unit, coefficients)


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
    squares = c.mT @ kernel @ c  # [R, 1, 1]
    return squares.flatten().clamp(min=0)


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
        of_weights = torch.bmm(slope.mT, inputs)
        of_coefficients = torch.bmm(hidden.mT, residual).squeeze(-1)
        weights = now.weights - scale * of_weights
        coefficients = now.coefficients - scale * of_coefficients
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
    n = inputs.shape[1]
    m = networks.weights.shape[1]
    hidden = networks.features(inputs)
    penalty = ridge * torch.eye(m, dtype=inputs.dtype)
    gram = torch.bmm(hidden.mT, hidden) / n + penalty
    right = torch.bmm(hidden.mT, labels.unsqueeze(-1)) / n
    factor = torch.linalg.cholesky(gram)
    solved = torch.cholesky_solve(right, factor).squeeze(-1)
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
    last_layer = target.coefficients.unsqueeze(-1)
    features = torch.cat([target.weights, last_layer], -1)
    kept = ablate(features, fraction, generator=generator)
    weights = kept[..., :-1]
    coefficients = kept[..., -1]
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
