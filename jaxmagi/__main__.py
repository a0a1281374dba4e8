"""``python -m jaxmagi plan``, ``calibrate`` or ``doctor``: see ``--help`` of each."""

import sys

from ._cli import main

if __name__ == "__main__":
    sys.exit(main())
