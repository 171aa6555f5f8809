"""Parsers made of signatures: those of a command, and of the classes that a user names for its model and data."""

import argparse
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_taskinfo.cli import COMMANDS

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser

Maker = Callable[..., Any]  # of an object: a class or a function
HELP = """\
usage: taskinfo COMMAND [OPTION] …

Several values stand in brackets, '[a,b]'. A command lists its options: taskinfo rank --help.
"""


def run(words: Sequence[str]) -> str:
    """Run the command that the words of a command line are about, and return what it says."""
    from jsonargparse import ArgumentParser

    name, *rest = words or [""]
    if name in ("-h", "--help"):
        listed = [f"\n{command}\n  {summary}" for command, (_, summary) in COMMANDS.items()]
        return HELP + "".join(listed)
    if name not in COMMANDS:
        raise ValueError(f"the command must be one of {', '.join(COMMANDS)}, got {name!r}.")
    command = load_command(name)
    _, summary = COMMANDS[name]
    parser = ArgumentParser(
        prog=f"taskinfo {name}", description=summary, exit_on_error=False, allow_abbrev=False
    )
    with current_folder_imported():
        return command(**parse(parser, command, rest))


def load_command(name: str) -> Callable[..., str]:
    """Import a command of :data:`COMMANDS`."""
    module, _ = COMMANDS[name]
    imported = import_module(f"lightning_taskinfo.cli.{module}")
    return getattr(imported, name.replace("-", "_"))


@contextmanager
def current_folder_imported() -> Iterator[None]:
    """Let modules of the current folder be imported, by processes too that are started meanwhile.

    A console script does not look there by itself.
    """
    folder = os.getcwd()
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path.remove(folder)


def parse(parser: "ArgumentParser", command: Callable[..., str], words: Sequence[str]) -> Any:
    """Return what a command is called with; a network is made later, anew for each use.

    Classes that the words name for its model and data are looked up first, so that
    ``--model.width 64`` is an option like any other, with the class's own help.

    Args:
        parser: Without options as yet.
        command: Whose arguments become options.
        words: The command line, without the name of the command.
    """
    from lightning_taskinfo.cli._own import DataModule, Network, made

    known = inspect.signature(command).parameters
    given, rest = _picked(words)
    makers = {}
    for name, text in given.items():
        named = name == "model" or (name == "data" and is_import_path(text))
        if named and name in known:
            makers[name] = find(text, name)
        else:
            rest.append(f"--{name}={text}")
    parser.add_argument("--config", action="config", help="A YAML file of arguments.")
    parser.add_function_arguments(command, as_group=False, skip=set(makers))
    for name, maker in makers.items():
        group = parser.add_argument_group(f"--{name} {given[name]}")
        add_arguments(group, maker, name)
    if "model" in makers and "checkpoint" in given:
        parser.set_defaults(_kept(makers["model"], given["checkpoint"]))
    config = parser.parse_args(rest)
    own = {}
    for name, maker in makers.items():
        arguments = config.pop(name, None)
        own[name] = Network(maker, arguments.as_dict() if arguments else {})
    if "data" in own:
        own["data"] = made(DataModule, own["data"].maker, own["data"].arguments, "data")
    try:
        ready = parser.instantiate(config)
    except Exception as error:  # of a class among the options
        # Its own words are behind those of the parser.
        raise ValueError(str(error.__cause__ or error)) from error
    ready.pop("config", None)
    return {**ready, **own}


def _picked(words: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Return model, data and checkpoint as far as they are named, and the other words."""
    parser = argparse.ArgumentParser(
        add_help=False,
        allow_abbrev=False,
        exit_on_error=False,
        argument_default=argparse.SUPPRESS,
    )
    for name in ("model", "data", "checkpoint"):
        parser.add_argument(f"--{name}")
    given, rest = parser.parse_known_args(list(words))
    return vars(given), rest


def add_arguments(parser: Any, maker: Maker, key: str) -> None:
    """Add the arguments of a class or function as options ``--key.argument``."""
    is_class = inspect.isclass(maker)
    add = parser.add_class_arguments if is_class else parser.add_function_arguments
    add(maker, key, as_group=False, fail_untyped=False)


def is_import_path(text: str) -> bool:
    """Whether a text names something in a module, and no file or dataset."""
    parts = text.split(".")
    if len(parts) == 1 or not all(map(str.isidentifier, parts)):
        return False
    if Path(text).exists():
        return False
    return find_spec(parts[0]) is not None


def find(path: str, argument: str) -> Maker:
    """Return the class or function that an import path names."""
    rule = f"`{argument}` must be the import path of a class or function, got {path!r}"
    module, _, name = path.rpartition(".")
    try:
        found = getattr(import_module(module), name)
    except Exception as error:  # of the user's own file
        reason = error if module else f"no dot in it: module.{path}"
        raise ValueError(f"{rule} ({reason}).") from error
    if not callable(found):
        raise ValueError(f"{rule}, a {type(found).__name__}.")
    return found


def _kept(maker: Maker, checkpoint: str) -> dict[str, Any]:
    """Return the arguments of a network that Lightning kept in its checkpoint."""
    from lightning_taskinfo._files import read_checkpoint

    known = inspect.signature(maker).parameters
    kept = read_checkpoint("checkpoint", checkpoint).content.get("hyper_parameters", {})
    return {f"model.{name}": value for name, value in kept.items() if name in known}
