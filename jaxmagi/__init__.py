"""Attention for JAX under any mask, on one device or over a mesh axis."""

import importlib.metadata

from . import _export as _export, masks as masks, nn as nn
from .attention import attention as attention, flops as flops
from .calibration import calibrate as calibrate
from .collectives import (
    CollectiveOptions as CollectiveOptions,
    finalize as finalize,
    group_cast as group_cast,
    group_reduce as group_reduce,
)
from .context import (
    context_attention as context_attention,
    dispatch as dispatch,
    roll as roll,
    undispatch as undispatch,
)
from .masks import AttnMask as AttnMask, MaskType as MaskType
from .overlap import (
    all_gather_matmul as all_gather_matmul,
    matmul_all_reduce as matmul_all_reduce,
    matmul_all_to_all as matmul_all_to_all,
    matmul_reduce_scatter as matmul_reduce_scatter,
)
from .planning import (
    ContextPlan as ContextPlan,
    CostModel as CostModel,
    GroupCastSpec as GroupCastSpec,
    PlanCapacity as PlanCapacity,
    RelayedSpec as RelayedSpec,
    plan_context as plan_context,
    plan_contexts as plan_contexts,
    prefetch_plans as prefetch_plans,
)

__version__ = importlib.metadata.version("jaxmagi")
