"""The commands and their arguments."""

import argparse
import sys
from collections.abc import Sequence

from . import _doctor, _plan


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command.

    Args:
        arguments: of the command line, by default those of the process.

    Returns:
        The exit status: 0, or 1 where something that the command needs is missing or unsupported.

    Raises:
        SystemExit: with status 2 after a message that names the bad argument, and with 0 after ``--help``.
    """
    parser = argparse.ArgumentParser(
        prog="python -m jaxmagi", description="Attention for JAX under any mask."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    plan = commands.add_parser("plan", help=_plan.HELP, description=_plan.DESCRIPTION, allow_abbrev=False)
    _plan.add_arguments(plan)
    commands.add_parser("doctor", help=_doctor.HELP, description=_doctor.DESCRIPTION, allow_abbrev=False)
    options = parser.parse_args(arguments)
    if options.command == "doctor":
        return _doctor.run()
    try:
        return _plan.run(options)
    except (ValueError, OSError) as error:
        plan.error(str(error))
    except (ImportError, NotImplementedError) as error:
        print(f"{plan.prog}: {error}", file=sys.stderr)
        return 1
