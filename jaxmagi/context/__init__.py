"""Context parallelism: attention of a sequence whose tokens a plan assigns to the ranks of a mesh axis."""

from ._api import context_attention as context_attention
from ._dispatch import dispatch as dispatch, undispatch as undispatch
from ._roll import roll as roll
