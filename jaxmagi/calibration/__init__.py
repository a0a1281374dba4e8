"""A cost model of the devices at hand, from the times that they take: see `calibrate`."""

from ._calibrate import calibrate as calibrate
