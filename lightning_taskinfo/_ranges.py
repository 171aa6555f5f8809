"""Numbers in their range: the one place that refuses negative, infinite and undefined arguments."""

import math
from collections.abc import Callable, Iterable, Mapping, ValuesView
from functools import partial, reduce
from numbers import Integral
from typing import Any

import torch
from torch import Tensor


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
        _check_whole(name, value)
        if value < 1:
            raise ValueError(f"`{name}` must be at least 1, got {value}.")


def check_seed(seed: int) -> None:
    """Refuse a seed that torch would refuse later on, when a generator is made of it.

    Raises:
        TypeError: If it is no whole number.
        ValueError: If it is out of torch's range.
    """
    _check_whole("seed", seed)
    if not -(2**63) <= seed < 2**64:
        raise ValueError(f"`seed` must be at least -2**63 and less than 2**64, got {seed}.")


def _check_whole(name: str, value: Any) -> None:
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise TypeError(f"`{name}` must be a whole number, got {value!r}.")


def check_choice(options: Iterable[str], **arguments: Any) -> None:
    """Refuse words that are not among the options.

    Raises:
        ValueError: Naming the argument, the options and the word.

    Example:
        >>> check_choice(["logits", "jacobian"], proxy="none")
        Traceback (most recent call last):
        ValueError: `proxy` must be one of logits, jacobian, got 'none'.
    """
    for name, value in arguments.items():
        if value not in options:
            raise ValueError(f"`{name}` must be one of {', '.join(options)}, got {value!r}.")


RULES: dict[str, Callable[[Tensor], Tensor]] = {  # what is said of numbers -> where it holds
    "above 0.5": lambda t: t > 0.5,
    "at least 1": lambda t: t >= 1,
    "at least 2": lambda t: t >= 2,
    "at least 8": lambda t: t >= 8,
    "greater than 2": lambda t: t > 2,
    "in (0, 1)": lambda t: (t > 0) & (t < 1),
    "in [0, 1)": lambda t: (t >= 0) & (t < 1),
    "in [0, 1]": lambda t: (t >= 0) & (t <= 1),
    "in [0, pi]": lambda t: (t >= 0) & (t <= math.pi + 1e-6),
    "non-negative": lambda t: t >= 0,
    "non-negative and finite": lambda t: (t >= 0) & t.isfinite(),
    "positive": lambda t: (t > 0) & t.isfinite(),
}


def check_values(rule: str, **arguments: Any) -> None:
    """Refuse numbers that break a rule; NaN breaks all of them. ``None`` stands for "not given".

    Args:
        rule: One of ``RULES``.
        **arguments: Each argument by its name: a number, several, at least one, or a tensor.

    Raises:
        ValueError: Naming the argument, the rule, and the first value that breaks it.

    Example:
        >>> check_values("in [0, 1]", risk=0.5, targets=torch.tensor([0.0, 2.0]))
        Traceback (most recent call last):
        ValueError: `targets` must be in [0, 1], got 2.0.
    """
    for name, value in arguments.items():
        if value is None:
            continue
        if isinstance(value, ValuesView):  # of a dict
            value = [*value]
        numbers = value
        if not isinstance(value, Tensor):
            numbers = torch.tensor(value, dtype=torch.float64, device="cpu")
        wrong = numbers[~RULES[rule](numbers)]
        if len(wrong):
            got = value if isinstance(value, int | float) else wrong[0].item()
            raise ValueError(f"`{name}` must be {rule}, got {got}.")
        if numbers is not value and not numbers.numel():
            raise ValueError(f"`{name}` must be {rule}, got {value}.")


check_positive = partial(check_values, "positive")
check_not_negative = partial(check_values, "non-negative and finite")
check_probability = partial(check_values, "in (0, 1)")


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


def check_finite(argument: str, tensor: Any) -> None:
    """Raise a ``ValueError`` if ``tensor`` holds NaN or infinity."""
    count = int((~tensor.isfinite()).sum())
    if count:
        raise ValueError(
            f"`{argument}` must be finite, got {count} values that are not: clean the data."
        )
