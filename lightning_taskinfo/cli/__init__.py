"""The command line, ``taskinfo …``: a command is a documented function of its name, in a module named below.

Its options are the arguments of that function and, behind its ``**options``, those of the library's
function that it calls: jsonargparse reads both signatures and docstrings. A command is imported
when it is called, so that all of them are listed without waiting for torch and Lightning.
"""

import sys
from argparse import ArgumentError
from collections.abc import Sequence
from importlib.util import find_spec

COMMANDS = {  # its module, and the first sentence of its docstring
    "certify": (
        "networks",
        "Bound the true error of a trained network, and of its stochastic version; nothing is retrained.",
    ),
    "complexity": (
        "tasks",
        "Trace the structure function of tasks: how much loss a nat in the weights of a network buys.",
    ),
    "distance": (
        "tasks",
        "Measure the distance from each task to each other: what a network must learn in addition, in nats.",
    ),
    "embed": (
        "tasks",
        "Embed tasks by the Fisher information of a network, draw them on a map, and name the nearest source of each.",
    ),
    "phase-diagram": (
        "tasks",
        "Draw when transfer hurts a deep linear network: a signed map of its gain over training from scratch.",
    ),
    "rank": (
        "networks",
        "Rank checkpoints as starts for a target by linear read-outs of their frozen features; nothing is trained.",
    ),
    "transfer": (
        "networks",
        "Train on a few target labels from every start and from scratch, and report which start helps.",
    ),
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
    except (ValueError, TypeError, FileNotFoundError) as error:
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
