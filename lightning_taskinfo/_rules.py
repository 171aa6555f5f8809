"""An annotation read as a rule: what an argument must be, in words, and whether a value is that."""

import math
import operator
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin

SHOWN = 60  # characters of a value in a message


class Rule(NamedTuple):
    """What a value must be.

    Attributes:
        words: What one is called, and
        many: several of them.
        holds: Whether a value is one.
    """

    words: str
    many: str
    holds: Callable[[Any], bool]


def rule_of(hint: Any) -> Rule | None:
    """Return the rule of an annotation; ``None`` where it allows anything or cannot be checked.

    Numbers of numpy and torch are numbers, ``True`` is none. Any sequence stands for a list or tuple. Of a ``Literal``
    only the kind is checked: a function says itself which words it knows.

    Example:
        >>> rule = rule_of(int | Sequence[float] | None)
        >>> rule.words, rule.holds(3), rule.holds([0.5]), rule.holds("3")
        ('a whole number, a sequence of numbers or None', True, True, False)
    """
    if hint in _SIMPLE:
        return _SIMPLE[hint]
    origin, parts = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return _any_of([rule_of(part) for part in parts])
    if origin is Literal:
        kinds = tuple({type(part) for part in parts})
        return Rule(_or([repr(part) for part in parts]), "", lambda value: isinstance(value, kinds))
    if origin is tuple and Ellipsis not in parts:
        rules = [rule_of(part) for part in parts]
        what = rules[0].many if rules[0] is not None and len({*parts}) == 1 else "values"
        return _sequence(rules, f"a sequence of {len(parts)} {what}", length=len(parts))
    kind = origin or hint
    if kind in (tuple, list, Sequence):
        rule = rule_of(parts[0]) if parts else None
        return _sequence([rule], f"a sequence of {rule.many}" if rule else "a sequence")
    if kind is Mapping:
        rule = rule_of(parts[1]) if parts else None
        return Rule(
            f"a mapping to {rule.many}" if rule else "a mapping", "mappings", _maps_to(rule)
        )
    if kind in _ABSTRACT:
        return _ABSTRACT[kind]
    if (
        not isinstance(kind, type)
        or kind is object
        or getattr(kind, "_is_protocol", False)
        or kind.__name__ in _DUCKS
    ):
        return None
    article = "an" if kind.__name__[0] in "AEIOU" else "a"
    return Rule(
        f"{article} {kind.__name__}", f"{kind.__name__}s", lambda value: isinstance(value, kind)
    )


def shown(value: Any) -> str:
    """Return a value as a message shows it: in one short line.

    Example:
        >>> import torch
        >>> shown("0.1"), shown(torch.zeros(2, 3))
        ("'0.1'", 'a Tensor of shape (2, 3)')
    """
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"a {type(value).__name__} of shape {tuple(value.shape)}"
    text = repr(value)
    return text if len(text) <= SHOWN and "\n" not in text else f"a {type(value).__name__}"


def finite(value: Any) -> bool:
    """Whether a value has no NaN and no infinity: a number, or a list, tuple or mapping of them; others are not read.

    Example:
        >>> finite(1.0), finite([0.1, float("nan")]), finite("inf")
        (True, False, True)
    """
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, Mapping):
        value = list(value.values())
    return not isinstance(value, list | tuple) or all(finite(part) for part in value)


def _whole(value: Any) -> bool:
    if _truth(value):
        return False
    try:
        operator.index(value)
    except (TypeError, ValueError, RuntimeError):
        return False
    return True


def _number(value: Any) -> bool:
    return not _truth(value) and (hasattr(type(value), "__float__") or _whole(value))


def _truth(value: Any) -> bool:
    return isinstance(value, bool) or type(value).__name__ in ("bool_", "bool")  # numpy's


_SIMPLE = {
    int: Rule("a whole number", "whole numbers", _whole),
    float: Rule("a number", "numbers", _number),
    bool: Rule("True or False", "True and False", _truth),
    str: Rule("a string", "strings", lambda value: isinstance(value, str)),
    None: Rule("None", "None", lambda value: value is None),
    type(None): Rule("None", "None", lambda value: value is None),
    Any: None,
}
_DUCKS = ("Dataset", "DataLoader")  # torch takes anything that walks like one
_ABSTRACT = {
    Callable: Rule("a function", "functions", callable),
    Iterable: Rule(
        "iterable",
        "iterables",
        lambda value: hasattr(value, "__iter__") or hasattr(value, "__getitem__"),
    ),
}


def _any_of(rules: Sequence[Rule | None]) -> Rule | None:
    known = [rule for rule in rules if rule is not None]
    if len(known) < len(rules):
        return None
    words, many = _or([rule.words for rule in known]), _or([rule.many for rule in known])
    return Rule(words, many, lambda value: any(rule.holds(value) for rule in known))


def _sequence(rules: Sequence[Rule | None], words: str, length: int | None = None) -> Rule:
    """A sequence whose values keep one rule, or one rule each where its length is given."""

    def holds(value: Any) -> bool:
        if isinstance(value, str):
            return rules[0] is _SIMPLE[str]
        if isinstance(value, Mapping) or not (
            hasattr(value, "__len__") and hasattr(value, "__getitem__")
        ):
            return False
        if not isinstance(
            value, list | tuple
        ):  # an array has one kind of values, and a dataset is not gone through
            return True
        each = rules if length is not None else [rules[0]] * len(value)
        return len(each) == len(value) and all(
            r is None or r.holds(v) for r, v in zip(each, value, strict=True)
        )

    return Rule(words, "sequences", holds)


def _maps_to(rule: Rule | None) -> Callable[[Any], bool]:
    def holds(value: Any) -> bool:
        return isinstance(value, Mapping) and (
            rule is None or all(rule.holds(v) for v in value.values())
        )

    return holds


def _or(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"
