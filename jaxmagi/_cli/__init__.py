"""The command line: plans of masks, and what of jaxmagi can run here."""

from ._main import main as main
