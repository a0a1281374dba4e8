"""Attention over a mesh axis: tokens dealt to ranks by a plan, and the attention between them."""

from ._api import context_attention as context_attention
from ._dispatch import dispatch as dispatch, undispatch as undispatch
