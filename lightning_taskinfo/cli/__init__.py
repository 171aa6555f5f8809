"""The command line, ``taskinfo …``: a command is a documented function in :data:`COMMANDS`, and nothing else."""

import re
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from lightning_taskinfo.cli.certify import certify
from lightning_taskinfo.cli.complexity import complexity
from lightning_taskinfo.cli.distance import distance
from lightning_taskinfo.cli.embed import embed
from lightning_taskinfo.cli.phase_diagram import phase_diagram
from lightning_taskinfo.cli.transfer import transfer

COMMANDS: dict[str, Callable[..., str]] = {
    "certify": certify,
    "complexity": complexity,
    "distance": distance,
    "embed": embed,
    "phase-diagram": phase_diagram,
    "transfer": transfer,
}

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
        return _fail("the command line needs jsonargparse: pip install 'lightning-taskinfo[cli]'", 1)

    class Parser(ArgumentParser):
        def error(self, message: str, ex: Exception | None = None) -> NoReturn:
            if sentence := _without_brackets(message):
                self.exit(2, f"taskinfo: error: {sentence}\n")
            if any(f"Expected a {kind}" in message for kind in LISTS):
                message += "\n  Several values stand in brackets: '[a,b]'."
            super().error(message, ex)

    try:
        text = CLI(COMMANDS, args=_underscored(args), as_positional=False, prog="taskinfo", parser_class=Parser)
    except (ValueError, FileNotFoundError) as error:
        return _fail(str(error), 2)
    except (ImportError, OSError, RuntimeError) as error:
        return _fail(str(error), 1)
    except KeyboardInterrupt:
        sys.stderr.write("taskinfo: interrupted; transfer, complexity and distance go on with the same command.\n")
        return 130
    sys.stdout.write(f"{text}\n")
    return 0


def _without_brackets(message: str) -> str | None:
    """What to say in place of jsonargparse's message, if that is of a list and nothing else."""
    kinds = set(re.findall(r"Expected a (.+?)(?:\.|$)", message, re.MULTILINE))
    named = re.search(r'Parser key "(.+?)"', message)
    given = re.search(r"(?:Got|Given) value: (.*)", message)
    if not named or not given or not kinds & LISTS or kinds - LISTS - {"<class 'NoneType'>"}:
        return None
    return f"`{named[1]}` must be a list in brackets, got {given[1]}; one value is '[a]', two are '[a,b]'."


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
