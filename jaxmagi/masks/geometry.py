"""Geometry of bands ``[..., 6]``: exact, vectorised, on numpy arrays."""

from ._geometry import (
    UNBOUNDED as UNBOUNDED,
    area as area,
    columns as columns,
    crop as crop,
    intersect as intersect,
    is_empty as is_empty,
    key_range as key_range,
    shift as shift,
    tighten as tighten,
    to_dense as to_dense,
)
