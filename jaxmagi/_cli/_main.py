"""The commands and their arguments."""

import argparse
import sys
from collections.abc import Sequence

from . import _calibrate, _doctor, _plan

_COMMANDS = {"plan": _plan, "calibrate": _calibrate, "doctor": _doctor}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command.

    Args:
        arguments: of the command line, by default those of the process.

    Returns:
        The exit status: 0, or 1 where something that the command needs is missing, unsupported or fails.

    Raises:
        SystemExit: with status 2 after a message that names the bad argument, and with 0 after ``--help``.
    """
    parser = argparse.ArgumentParser(
        prog="python -m jaxmagi", description="Attention for JAX under any mask."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in _COMMANDS.items():
        own = commands.add_parser(
            name, help=command.HELP, description=command.DESCRIPTION, allow_abbrev=False
        )
        command.add_arguments(own)
    options = parser.parse_args(arguments)
    try:
        return _COMMANDS[options.command].run(options)
    except (ValueError, OSError) as error:
        commands.choices[options.command].error(str(error))
    except (ImportError, RuntimeError) as error:
        print(f"{commands.choices[options.command].prog}: {error}", file=sys.stderr)
        return 1
