"""Flax integration: an ``attention_fn`` for attention modules, and a ``dot_general`` for dense layers."""

from ._attention_fn import attention_fn as attention_fn
from ._dot_general import (
    column_parallel_dot_general as column_parallel_dot_general,
    row_parallel_dot_general as row_parallel_dot_general,
)
