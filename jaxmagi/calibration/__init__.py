"""Calibration: `calibrate` measures a cost model of the devices at hand."""

from ._calibrate import calibrate as calibrate
