"""Numbers in their range: the one place that refuses negative, infinite and undefined arguments."""

import math
from collections.abc import Iterable, Mapping
from numbers import Integral
from typing import Any

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
