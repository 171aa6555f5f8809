"""``python -m lightning_taskinfo`` is ``taskinfo``."""

import sys

from lightning_taskinfo.cli import main

if __name__ == "__main__":
    sys.exit(main())
