"""Masks: which query sees which key, as a short list of bands.

Build one with a builder (``masks.causal``, ``masks.documents``, …) or from slices (`AttnMask.from_slices`).
The functions in `jaxmagi.masks.geometry` compute with bands directly, exactly and vectorised.
"""

from . import geometry as geometry
from ._builders import (
    block_causal as block_causal,
    causal as causal,
    chunked_causal as chunked_causal,
    documents as documents,
    from_segment_ids as from_segment_ids,
    full as full,
    prefix_lm as prefix_lm,
    prefix_tree as prefix_tree,
    shared_prefix as shared_prefix,
    sliding_window as sliding_window,
    video as video,
)
from ._mask import AttnMask as AttnMask, MaskType as MaskType
from .geometry import UNBOUNDED as UNBOUNDED
