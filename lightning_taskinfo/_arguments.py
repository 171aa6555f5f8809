"""Arguments are checked where they are given: an unknown one gets the nearest name, another kind the annotation's."""

import functools
import inspect
import re
from abc import ABCMeta
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

from lightning_taskinfo._rules import Rule, finite, rule_of, shown

F = TypeVar("F", bound=Callable[..., Any])


def checked_arguments(function: F) -> F:
    """Decorate a function whose arguments are to be what their annotations say.

    Raises:
        TypeError: In the decorated function, if an argument is unknown or of another kind.
        ValueError: If a number, or one in a list, is NaN or infinite.

    Example:
        >>> @checked_arguments
        ... def half(number: float): return number / 2
        >>> half("3")
        Traceback (most recent call last):
        TypeError: `number` must be a number, got '3'.
        >>> half(nummer=3)
        Traceback (most recent call last):
        TypeError: half has no argument `nummer`; did you mean `number`?
    """

    @functools.wraps(function)
    def call(*args: Any, **arguments: Any) -> Any:
        known = _parameters(function)
        for name in arguments:
            if name not in known.names and not known.takes_others:
                raise TypeError(_unknown(function.__name__, name, known.names))
        known.check(args, arguments)
        return function(*args, **arguments)

    return cast(F, call)


def check_counts(**counts: int | None) -> None:
    """Raise a ``ValueError`` for what is given and is less than 1."""
    for argument, value in counts.items():
        if value is not None and value < 1:
            raise ValueError(f"`{argument}` must be at least 1, got {value}.")


class ArgumentsByName(ABCMeta):
    """Metaclass of classes whose arguments are to be what their annotations say, those of bases' ``__init__`` too.

    Python would blame a base for an argument that none of them knows. Signatures are those of ``__init__``.
    """

    if not TYPE_CHECKING:  # type checkers go on reading `__init__`

        def __call__(cls, *args: Any, **arguments: Any) -> Any:
            _parameters_of_class(cls).check(args, arguments)
            try:
                # Not `super()`: Lightning looks for frames with a `__class__` when it collects hyperparameters.
                return ABCMeta.__call__(cls, *args, **arguments)
            except (TypeError, ValueError) as error:
                if (unknown := _refused(str(error), cls)) not in arguments:
                    raise
                raise TypeError(
                    _unknown(cls.__name__, unknown, _parameters_of_class(cls).names)
                ) from None

        @property
        def __signature__(cls) -> inspect.Signature:
            whole = inspect.signature(cls.__init__)
            return whole.replace(
                parameters=[*whole.parameters.values()][1:],
                return_annotation=inspect.Signature.empty,
            )


def argument_names(cls: type) -> list[str]:
    """Return the names of all arguments that a class takes, those of its bases too."""
    return list(_parameters_of_class(cls).names)


class Parameters(NamedTuple):
    """The arguments that a function or class takes.

    Attributes:
        names: All that can be given by name.
        positional: Those that can be given by position.
        rules: What they must be, where that can be checked.
        takes_others: Whether any other name goes as well.
    """

    names: list[str]
    positional: list[str]
    rules: Mapping[str, Rule]
    takes_others: bool

    def check(self, args: Iterable[Any], arguments: Mapping[str, Any]) -> None:
        """Raise an error that names the first argument of another kind, NaN or infinite, or too large a seed."""
        for name, value in [*zip(self.positional, args, strict=False), *arguments.items()]:
            rule = self.rules.get(name)
            if rule is None:
                continue
            if not rule.holds(value):
                raise TypeError(f"`{name}` must be {rule.words}, got {shown(value)}.")
            if not finite(value):
                raise ValueError(f"`{name}` must be finite, got {shown(value)}.")
            if name == "seed" and value is not None and not -(2**63) <= int(value) < 2**64:
                raise ValueError(
                    f"`seed` must be at least -2**63 and less than 2**64, as for torch, got {value}."
                )


@functools.cache
def _parameters(function: Callable[..., Any], skip: int = 0) -> Parameters:
    parameters = [*inspect.signature(function).parameters.values()][skip:]
    positional = [
        p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    names = [p.name for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)]
    hints = {p.name: p.annotation for p in parameters if p.annotation is not p.empty}
    rules = {name: rule_of(hint) for name, hint in hints.items() if not isinstance(hint, str)}
    return Parameters(
        names,
        positional,
        {
            name: rule
            for name, rule in rules.items()
            if rule is not None and name in {*names, *positional}
        },
        any(p.kind is p.VAR_KEYWORD for p in parameters),
    )


@functools.cache
def _parameters_of_class(cls: type) -> Parameters:
    """The arguments of a class: its own, and its bases' as long as they are handed on.

    Example:
        >>> class Base:
        ...     def __init__(self, *, seed=0): ...
        >>> class Mine(Base):
        ...     def __init__(self, *, name, **others): ...
        >>> _parameters_of_class(Mine).names
        ['name', 'seed']
    """
    names: list[str] = []
    rules: dict[str, Rule] = {}
    levels = []
    for init in (vars(base)["__init__"] for base in cls.__mro__ if "__init__" in vars(base)):
        levels.append(_parameters(init, skip=1))
        new = [name for name in levels[-1].names if name not in names]
        names += new
        rules |= {name: rule for name, rule in levels[-1].rules.items() if name in new}
        if not levels[-1].takes_others:
            break
    return Parameters(names, levels[0].positional, rules, takes_others=levels[-1].takes_others)


def _refused(message: str, cls: type) -> str:
    """The argument that Python, or torchmetrics, says no ``__init__`` of a class knows; or nothing."""
    if found := re.match(r"(.+)\.__init__\(\) got an unexpected keyword argument '(.+?)'", message):
        return found[2] if found[1] in {base.__qualname__ for base in cls.__mro__} else ""
    found = re.match("Unexpected keyword arguments: `(.+?)`", message)
    return found[1] if found else ""


def _unknown(owner: str, argument: str, known: list[str]) -> str:
    near = get_close_matches(argument, known, n=1)
    hint = f"did you mean `{near[0]}`?" if near else f"it takes {', '.join(known)}."
    return f"{owner} has no argument `{argument}`; {hint}"
