"""Differentiable attention under a mask on one device.

`attention_forward` and `attention_backward` are its two passes, which distributed attention builds on;
`attention_reference` is the fp64 reference.
"""

from .._dtypes import DTYPES as DTYPES, accumulator_dtype as accumulator_dtype
from .._softmax import (
    Partial as Partial,
    add_sinks as add_sinks,
    merge as merge,
    row_delta as row_delta,
    sink_gradient as sink_gradient,
)
from ._api import attention as attention
from ._flops import flops as flops
from ._key_heads import add_heads as add_heads, heads_of as heads_of, take_heads as take_heads
from ._primitive import (
    attention_backward as attention_backward,
    attention_backward_p as attention_backward_p,
    attention_forward as attention_forward,
    attention_forward_p as attention_forward_p,
)
from ._reference import (
    ReferenceGradients as ReferenceGradients,
    attention_reference as attention_reference,
    attention_reference_vjp as attention_reference_vjp,
)
from ._sharding import (
    MeshAxes as MeshAxes,
    axis_names as axis_names,
    reshard as reshard,
)
from ._validation import check_operands as check_operands
