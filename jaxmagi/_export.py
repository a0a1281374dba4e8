"""Makes masks and plans known to `jax.export`, so that exported functions can take and return them."""

import json

from jax import export

from .masks import AttnMask
from .planning import ContextPlan, GroupCastSpec, RelayedSpec
from .planning._plan_stages import PlanStages


def _serialize(sizes: tuple[int, ...]) -> bytes:
    """Serializes the static fields of a node, all of which are sizes."""
    return json.dumps(sizes).encode()


def _deserialize(data: bytes | bytearray) -> tuple[int, ...]:
    return tuple(json.loads(data))


for _node in (AttnMask, ContextPlan, PlanStages, GroupCastSpec, RelayedSpec):
    export.register_pytree_node_serialization(
        _node,
        serialized_name=f"jaxmagi.{_node.__name__}",
        serialize_auxdata=_serialize,
        deserialize_auxdata=_deserialize,
    )
