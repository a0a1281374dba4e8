"""H200s that are not there, and arrays on them, to compile programs for."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

COMPILER = Path(__file__).parent.parent.parent / "build" / "gpu_compiler"
"""XLA's compiler for GPUs, where .ci/run installs it."""
ENVIRONMENT = {
    "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",  # which would look for the libraries of a GPU
    "XLA_FLAGS": "--xla_gpu_autotune_level=0",  # which would run kernels
}
"""Variables of processes that compile for them, with the compiler on the path."""
REPLICATED = P()


def h200s(shape: tuple[int, ...], names: tuple[str, ...], kind: AxisType = AxisType.Auto) -> Mesh:
    """Returns a mesh of devices to compile for."""
    target = (Path(__file__).parent / "h200.txtpb").read_text()
    topology = topologies.get_topology_desc(
        "", platform="cuda", target_config=target, topology=f"1x1x{np.prod(shape)}"
    )
    return Mesh(np.array(topology.devices).reshape(shape), names, axis_types=(kind,) * len(shape))


def like(tree: Any, mesh: Mesh, spec: P = REPLICATED) -> Any:
    """Returns the shapes of arrays that are sharded so."""
    sharding = NamedSharding(mesh, spec)
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(np.shape(leaf), np.asarray(leaf).dtype, sharding=sharding), tree
    )
