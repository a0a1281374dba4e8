"""Makes masks and plans known to `jax.export`, so that exported functions can take and return them."""

import json

from jax import export

from .masks import AttnMask
from .planning import ContextPlan, GroupCastSpec, RelayedSpec

_VERSION = 2  # of the nodes' fields and arrays: to be counted up when what they mean changes


def _serialize(sizes: tuple[int, ...]) -> bytes:
    """Serializes the static fields of a node, all of which are sizes, behind the version."""
    return json.dumps([_VERSION, *sizes]).encode()


def _deserialize(data: bytes | bytearray) -> tuple[int, ...]:
    """Returns the static fields of a node.

    Raises:
        ValueError: the node is of another version, so that its fields may mean something else.
    """
    version, *sizes = json.loads(data)
    if version != _VERSION:
        raise ValueError(
            f"the exported function has masks or plans of version {version}, and this jaxmagi reads version "
            f"{_VERSION}: export it again"
        )
    return tuple(sizes)


for _node in (AttnMask, ContextPlan, GroupCastSpec, RelayedSpec):
    export.register_pytree_node_serialization(
        _node,
        serialized_name=f"jaxmagi.{_node.__name__}",
        serialize_auxdata=_serialize,
        deserialize_auxdata=_deserialize,
    )
