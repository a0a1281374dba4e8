"""Parses the command line and runs a command."""

import argparse
import sys
from collections.abc import Sequence

from . import _calibrate, _doctor, _plan

_COMMANDS = {"plan": _plan, "calibrate": _calibrate, "doctor": _doctor}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command.

    Args:
        arguments: arguments of the command line, by default those of the process.

    Returns:
        The exit status: 0, or 1 if something that the command needs is missing, is unsupported or fails.

    Raises:
        SystemExit: an argument is invalid (status 2, with a message that names it), or ``--help`` (status 0).
    """
    parser = argparse.ArgumentParser(
        prog="python -m jaxmagi", description="Attention for JAX under any mask."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in _COMMANDS.items():
        command_parser = commands.add_parser(
            name, help=command.HELP, description=command.DESCRIPTION, allow_abbrev=False
        )
        command.add_arguments(command_parser)
    options = parser.parse_args(arguments)
    try:
        return _COMMANDS[options.command].run(options)
    except (ValueError, OSError) as error:
        commands.choices[options.command].error(str(error))
    except (ImportError, RuntimeError) as error:
        print(f"{commands.choices[options.command].prog}: {error}", file=sys.stderr)
        return 1
