"""``python -m jaxmagi plan``, ``python -m jaxmagi doctor``: see ``--help`` of each."""

import sys

from ._cli import main

if __name__ == "__main__":
    sys.exit(main())
