"""The options that a message names are those that the code takes: messages beside annotations."""

import ast
import importlib
import inspect
import re
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest

import lightning_taskinfo

PACKAGE = Path(lightning_taskinfo.__file__).parent


def words_of(hint: Any) -> set[str]:
    """The words that an annotation allows, those inside of unions and sequences too."""
    if get_origin(hint) is Literal:
        return {word for word in get_args(hint) if isinstance(word, str)}
    return set().union(*map(words_of, get_args(hint))) if get_args(hint) else set()


def options_in(module: Any) -> dict[str, list[set[str]]]:
    """What the functions and classes defined in a module take, by name of the argument."""
    found: dict[str, list[set[str]]] = {}
    for thing in vars(module).values():
        if getattr(thing, "__module__", None) != module.__name__ or not callable(thing):
            continue
        functions = (
            [thing.__init__, *filter(inspect.isfunction, vars(thing).values())]
            if inspect.isclass(thing)
            else [thing]
        )
        for function in functions:
            try:
                hints = get_type_hints(inspect.unwrap(function))
            except Exception:  # names that only type checkers import
                continue
            for name, hint in hints.items():
                if words := words_of(hint):
                    found.setdefault(name, []).append(words)
    return found


def messages_in(path: Path) -> list[tuple[str, set[str]]]:
    """Argument and quoted words of every "`argument` must be … 'word' …, got" in a file, without values."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if (
            not isinstance(node, ast.Raise)
            or not isinstance(node.exc, ast.Call)
            or not node.exc.args
        ):
            continue
        text = "".join(
            p.value
            for p in ast.walk(node.exc.args[0])
            if isinstance(p, ast.Constant) and isinstance(p.value, str)
        )
        rule = re.match(r"`(\w+)` must be (.*?)(, got|$)", text, re.DOTALL)
        if rule and (words := set(re.findall(r"'([\w-]+)'", rule[2]))):
            found.append((rule[1], words))
    return found


FILES = [path for path in sorted(PACKAGE.rglob("*.py")) if messages_in(path)]


def test_there_are_messages_to_compare():
    assert len(FILES) > 5


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_messages_name_the_options_that_the_code_takes(path):
    name = ".".join(
        ("lightning_taskinfo", *path.relative_to(PACKAGE).with_suffix("").parts)
    ).removesuffix(".__init__")
    taken = options_in(importlib.import_module(name))
    for argument, words in messages_in(path):
        known = taken.get(argument, [words])
        assert any(words <= options for options in known), (
            f"`{argument}` takes {known}, the message names {words}"
        )
