"""The command line, ``taskinfo …``: a command is a documented function in :data:`COMMANDS`, and nothing else."""

import sys
from collections.abc import Callable, Sequence

from lightning_taskinfo.cli.complexity import complexity
from lightning_taskinfo.cli.distance import distance
from lightning_taskinfo.cli.phase_diagram import phase_diagram

COMMANDS: dict[str, Callable[..., str]] = {
    "complexity": complexity,
    "distance": distance,
    "phase-diagram": phase_diagram,
}


def main(args: Sequence[str] | None = None) -> int:
    """Run one command and write what it returns; ``taskinfo --help`` lists them.

    Args:
        args: Arguments of the command line; those of the process if not given.

    Returns:
        0 if all went well, 1 if a package is missing or a file cannot be written, 2 if an argument is wrong.
    """
    try:
        from jsonargparse import CLI
    except ImportError:
        return _fail("the command line needs jsonargparse: pip install 'lightning-taskinfo[cli]'", 1)
    try:
        text = CLI(COMMANDS, args=args, as_positional=False, prog="taskinfo")
    except ValueError as error:
        return _fail(str(error), 2)
    except (ImportError, OSError) as error:
        return _fail(str(error), 1)
    sys.stdout.write(f"{text}\n")
    return 0


def _fail(message: str, code: int) -> int:
    sys.stderr.write(f"taskinfo: error: {message}\n")
    return code
