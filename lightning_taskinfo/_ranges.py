"""Numbers in their range: the one place that refuses negative, infinite and undefined arguments."""

import math
from collections.abc import Callable, Iterable, Mapping
from functools import reduce
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

Numbers = float | Iterable[float]


def check_counts(**arguments: int | None) -> None:
    """Refuse arguments that are not whole numbers of at least 1. ``None`` stands for "not given".

    Raises:
        TypeError: If an argument is no whole number; ``True`` is none.
        ValueError: If it is less than 1.

    Example:
        >>> check_counts(max_samples=8, every_n_steps=0)
        Traceback (most recent call last):
        ValueError: `every_n_steps` must be at least 1, got 0.
    """
    for name, value in arguments.items():
        if value is None:
            continue
        if not isinstance(value, Integral) or isinstance(value, bool):
            raise TypeError(f"`{name}` must be a whole number, got {value!r}.")
        if value < 1:
            raise ValueError(f"`{name}` must be at least 1, got {value}.")


def check_seed(seed: int) -> None:
    """Refuse a seed that torch would refuse later on, when a generator is made of it.

    Raises:
        TypeError: If it is no whole number.
        ValueError: If it is out of torch's range.
    """
    if not isinstance(seed, Integral):
        raise TypeError(f"`seed` must be a whole number, got {seed!r}.")
    if not -(2**63) <= seed < 2**64:
        raise ValueError(f"`seed` must be at least -2**63 and less than 2**64, got {seed}.")


def check_positive(**arguments: Numbers | None) -> None:
    """Refuse arguments that are not positive and finite; NaN is neither. ``None`` stands for "not given".

    Args:
        **arguments: Each argument by its name, a number or several; several are at least one.

    Raises:
        ValueError: Naming the argument and its value.

    Example:
        >>> check_positive(beta=1.0, prior_stds=[0.1, float("nan")])
        Traceback (most recent call last):
        ValueError: `prior_stds` must be positive numbers, got [0.1, nan].
    """
    for name, value in arguments.items():
        if isinstance(value, Iterable):
            numbers = list(value)
            if not numbers or not all(0 < number < math.inf for number in numbers):
                raise ValueError(f"`{name}` must be positive numbers, got {numbers}.")
        elif value is not None and not 0 < value < math.inf:
            rule = "finite" if value == math.inf else "positive"
            raise ValueError(f"`{name}` must be {rule}, got {value}.")


def check_not_negative(**arguments: float | None) -> None:
    """Refuse arguments that are negative, infinite or NaN. ``None`` stands for "not given".

    Raises:
        ValueError: Naming the argument and its value.

    Example:
        >>> check_not_negative(weight_decay=-1.0)
        Traceback (most recent call last):
        ValueError: `weight_decay` must not be negative, got -1.0.
    """
    for name, value in arguments.items():
        if value is not None and not 0 <= value < math.inf:
            rule = "be finite" if value == math.inf else "not be negative"
            raise ValueError(f"`{name}` must {rule}, got {value}.")


def check_finite_tensors(argument: str, tensors: Mapping[str, Any]) -> None:
    """Refuse tensors with a NaN or an infinite number in them.

    Args:
        argument: What the user calls them.
        tensors: Tensors by name; anything else is passed over.

    Raises:
        ValueError: Naming the argument and the first such tensor.
    """
    for name, tensor in tensors.items():
        if hasattr(tensor, "isfinite") and not bool(tensor.isfinite().all()):
            raise ValueError(f"`{argument}` must hold finite numbers, got others in {name!r}.")


def check_probability(**arguments: float) -> None:
    """Refuse arguments that are not above 0 and below 1.

    Raises:
        ValueError: Naming the argument and its value.

    Example:
        >>> check_probability(delta=1.0)
        Traceback (most recent call last):
        ValueError: `delta` must be in (0, 1), got 1.0.
    """
    for name, value in arguments.items():
        if not 0 < value < 1:
            raise ValueError(f"`{name}` must be in (0, 1), got {value}.")


def check_finite(argument: str, tensor: Any) -> None:
    """Raise a ``ValueError`` if ``tensor`` holds NaN or infinity."""
    count = int((~tensor.isfinite()).sum())
    if count:
        raise ValueError(
            f"`{argument}` must be finite, got {count} values that are not: clean the data."
        )


RULES: dict[str, Callable[[Tensor], Tensor]] = {  # what is said of a tensor -> where it holds
    "above 0.5": lambda t: t > 0.5,
    "at least 1": lambda t: t >= 1,
    "at least 8": lambda t: t >= 8,
    "greater than 2": lambda t: t > 2,
    "in (0, 1)": lambda t: (t > 0) & (t < 1),
    "in [0, 1]": lambda t: (t >= 0) & (t <= 1),
    "in [0, pi]": lambda t: (t >= 0) & (t <= math.pi + 1e-6),
    "non-negative": lambda t: t >= 0,
    "non-negative and finite": lambda t: (t >= 0) & t.isfinite(),
    "positive": lambda t: t > 0,
    "positive and finite": lambda t: (t > 0) & t.isfinite(),
}


def check_values(rule: str, **tensors: Tensor) -> None:
    """Raise a ``ValueError`` that names the tensor, the rule, and the first value that breaks it.

    Args:
        rule: One of ``RULES``.
        **tensors: Each tensor by its name.
    """
    for name, tensor in tensors.items():
        holds = RULES[rule](tensor)
        if not holds.all():
            wrong = tensor[~holds].flatten()[0].item()
            raise ValueError(f"`{name}` must be {rule}, got {wrong}.")


def checked_tensors(rules: Mapping[str, str], dtype: Any = None, **values: Any) -> list[Tensor]:
    """Return numbers and tensors as tensors of one shape, dtype and device, or say which one breaks its rule.

    Args:
        rules: The rule of each argument, one of ``RULES``.
        dtype: What they are converted to. By default that of the tensors among them: numbers are never rounded to a
            smaller one.
        **values: Each argument by its name.

    Example:
        >>> checked_tensors({"risk": "in [0, 1]"}, risk=2)
        Traceback (most recent call last):
        ValueError: `risk` must be in [0, 1], got 2.0.
    """
    given = [value for value in values.values() if isinstance(value, Tensor)]
    if dtype is None:
        dtypes = [value.dtype for value in given if value.is_floating_point()]
        dtype = reduce(torch.promote_types, dtypes or [torch.get_default_dtype()])
    device = given[0].device if given else "cpu"
    tensors = []
    for name, value in values.items():
        tensor = torch.as_tensor(value, dtype=dtype, device=device)
        check_values(rules[name], **{name: tensor})
        tensors.append(tensor)
    return list(torch.broadcast_tensors(*tensors))
