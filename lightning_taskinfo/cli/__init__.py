"""The command line, ``taskinfo …``: a command is a documented function, alone in a module of its name.

It is imported when it is called, so that what all of them offer is listed without waiting for torch and Lightning.
"""

import re
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import NoReturn

COMMANDS = {  # name -> what its docstring begins with; `tests/test_cli.py` keeps them equal
    "certify": "Bound the true error of a trained network turned stochastic; nothing is retrained.",
    "complexity": "Trace the structure function of tasks: how much loss a nat in the weights of a small network buys.",
    "distance": (
        "Measure the distance from each task to each other: what a small network must learn in addition, in nats."
    ),
    "embed": (
        "Embed tasks by the Fisher information of a small probe, draw them on a map, and name the nearest source of "
        "each."
    ),
    "phase-diagram": (
        "Draw when transfer hurts a deep linear network: surface, signed map, and slices with simulated points."
    ),
    "rank": (
        "Rank checkpoints as starts for a target task by linear read-outs of their frozen features; nothing is trained."
    ),
    "transfer": (
        "Pretrain on a source, fine-tune on a few target labels, compare with training from scratch, and report."
    ),
}

HINT = "Several values stand in brackets, '[a,b]'; a dash in an option is as good as an underscore."
LISTS = {"<class 'list'>", "<class 'tuple'>"}


def main(args: Sequence[str] | None = None) -> int:
    """Run one command and write what it returns; ``taskinfo --help`` lists them.

    Args:
        args: Arguments of the command line; those of the process if not given. Dashes in the names of options are as
            good as underscores.

    Returns:
        0 if all went well, 1 if a package is missing, a file cannot be written or a computation fails, 2 if an
        argument is wrong or names a file that is not there, 130 if it was interrupted.
    """
    try:
        from jsonargparse import CLI, ArgumentParser
    except ImportError:
        return _fail(
            "the command line needs jsonargparse: pip install 'lightning-taskinfo[cli]'", 1
        )

    class Parser(ArgumentParser):
        def error(self, message: str, ex: Exception | None = None) -> NoReturn:
            if sentence := _without_brackets(message):
                self.exit(2, f"taskinfo: error: {sentence}\n")
            if any(f"Expected a {kind}" in message for kind in LISTS):
                message += "\n  Several values stand in brackets: '[a,b]'."
            super().error(message, ex)

    words = _underscored(args)
    try:
        text = CLI(
            _components(words),
            args=words,
            as_positional=False,
            prog="taskinfo",
            description=HINT,
            parser_class=Parser,
        )
    except (ValueError, FileNotFoundError) as error:
        return _fail(str(error), 2)
    except (ImportError, OSError, RuntimeError) as error:
        return _fail(str(error), 1)
    except KeyboardInterrupt:
        sys.stderr.write(
            "taskinfo: interrupted; transfer, complexity and distance go on with the same command.\n"
        )
        return 130
    sys.stdout.write(f"{text}\n")
    return 0


def load_command(name: str) -> Callable[..., str]:
    """Import the command ``name`` of :data:`COMMANDS`."""
    function = name.replace("-", "_")
    command: Callable[..., str] = getattr(import_module(f"{__name__}.{function}"), function)
    return command


def _components(words: list[str]) -> dict[str, Callable[..., str]]:
    """Return the commands, those alone with their arguments that ``words`` can be about."""
    first = words[0] if words else ""
    if first.startswith("--") and not "--help".startswith(
        first
    ):  # a configuration may be about any
        return {name: load_command(name) for name in COMMANDS}
    return {
        name: load_command(name) if name == first else _listed(summary)
        for name, summary in COMMANDS.items()
    }


def _listed(summary: str) -> Callable[..., str]:
    """Return a command that is listed, and not called."""

    def command() -> str:
        raise NotImplementedError

    command.__doc__ = summary
    return command


def _without_brackets(message: str) -> str | None:
    """What to say in place of jsonargparse's message, if that is of a list and nothing else."""
    kinds = set(re.findall(r"Expected a (.+?)(?:\.|$)", message, re.MULTILINE))
    named = re.search(r'Parser key "(.+?)"', message)
    given = re.search(r"(?:Got|Given) value: (.*)", message)
    if not named or not given or not kinds & LISTS or kinds - LISTS - {"<class 'NoneType'>"}:
        return None
    return f"`{named[1]}` must be a list in brackets, got {given[1]}: write '[{given[1]}]'."


def _underscored(args: Sequence[str] | None) -> list[str]:
    """Spell ``--prior-origin=a-b`` as jsonargparse does, ``--prior_origin=a-b``."""
    split = (arg.partition("=") for arg in (sys.argv[1:] if args is None else args))
    return [
        (f"--{name[2:].replace('-', '_')}" if name.startswith("--") else name) + equals + value
        for name, equals, value in split
    ]


def _fail(message: str, code: int) -> int:
    sys.stderr.write(f"taskinfo: error: {message}\n")
    return code
