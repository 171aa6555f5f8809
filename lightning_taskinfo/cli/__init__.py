"""The command line, ``taskinfo …``: a command is a documented function of its name, in the module named beside it.

Its options are the arguments of that function and, behind its ``**options``, those of the library's
function that it calls: jsonargparse reads both signatures and docstrings. A command is imported
when it is called, so that all of them are listed without waiting for torch and Lightning.
"""

import sys
from argparse import ArgumentError
from collections.abc import Sequence
from importlib.util import find_spec

COMMANDS = {
    "certify": "certify",
    "complexity": "tasks",
    "distance": "tasks",
    "embed": "tasks",
    "phase-diagram": "tasks",
    "rank": "starts",
    "transfer": "starts",
}


def main(args: Sequence[str] | None = None) -> int:
    """Run one command and write what it returns; ``taskinfo --help`` lists them.

    Args:
        args: Arguments of the command line; those of the process if not given.

    Returns:
        0 if all went well, 1 if a package is missing, a file cannot be written or a computation
        fails, 2 if an argument is wrong or names a file that is not there, 130 if it was
        interrupted.
    """
    from lightning_taskinfo.cli._parser import run

    if find_spec("jsonargparse") is None:
        return _fail(
            "the command line needs jsonargparse: pip install 'lightning-taskinfo[cli]'", 1
        )

    try:
        text = run(sys.argv[1:] if args is None else args)
    except ArgumentError as error:
        return _fail(" ".join(str(error).split()), 2)
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


def _fail(message: str, code: int) -> int:
    sys.stderr.write(f"taskinfo: error: {message}\n")
    return code
