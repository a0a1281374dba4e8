"""Reads paths from options."""

import argparse
from pathlib import Path


def path(text: str) -> Path:
    """Parses an option that names a file or a folder; an empty one would be the current folder."""
    if not text:
        raise argparse.ArgumentTypeError("the path is empty")
    return Path(text)
