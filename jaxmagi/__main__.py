"""Runs ``python -m jaxmagi plan``, ``calibrate`` or ``doctor``, which explain themselves with ``--help``."""

import sys

from ._cli import main

if __name__ == "__main__":
    sys.exit(main())
