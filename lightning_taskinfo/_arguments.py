"""A mistyped argument is told to the user under the name of the class that was written, with the nearest one."""

import inspect
import re
from abc import ABCMeta
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any


class ArgumentsByName(ABCMeta):
    """Metaclass of classes whose ``__init__`` hands keyword arguments on to that of a base.

    Python would blame the base for an argument that none of them knows. Signatures are those of ``__init__``.
    """

    if not TYPE_CHECKING:  # type checkers go on reading `__init__`

        def __call__(cls, *args: Any, **arguments: Any) -> Any:
            try:
                return super().__call__(*args, **arguments)
            except TypeError as error:
                found = re.match(r"(.+)\.__init__\(\) got an unexpected keyword argument '(.+?)'", str(error))
                owners = {base.__qualname__ for base in cls.__mro__}
                if found is None or found[1] not in owners or found[2] not in arguments:
                    raise
                raise TypeError(_unknown(cls, found[2])) from None

        @property
        def __signature__(cls) -> inspect.Signature:
            whole = inspect.signature(cls.__init__)
            return whole.replace(parameters=[*whole.parameters.values()][1:], return_annotation=inspect.Signature.empty)


def argument_names(cls: type) -> list[str]:
    """Return the keyword arguments of a class: its own, and its bases' as long as they are handed on.

    Example:
        >>> class Base:
        ...     def __init__(self, *, seed=0): ...
        >>> class Mine(Base):
        ...     def __init__(self, *, name, **others): ...
        >>> argument_names(Mine)
        ['name', 'seed']
    """
    names: list[str] = []
    for init in (vars(base)["__init__"] for base in cls.__mro__ if "__init__" in vars(base)):
        parameters = [*inspect.signature(init).parameters.values()][1:]
        names += [p.name for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)]
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            break
    return [*dict.fromkeys(names)]


def _unknown(cls: type, argument: str) -> str:
    known = argument_names(cls)
    near = get_close_matches(argument, known, n=1)
    hint = f"did you mean `{near[0]}`?" if near else f"it takes {', '.join(known)}."
    return f"{cls.__name__} has no argument `{argument}`; {hint}"
