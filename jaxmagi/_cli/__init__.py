"""The command line of jaxmagi: plan, calibrate and doctor."""

from ._main import main as main
