"""What the compiled collectives have of the GPUs' memory in this process, and know of it."""

import jax

from jaxmagi import _native


def arena_bytes() -> int:
    """That rows are copied through; 0 where processes share memory pools, and without CUDA."""
    compiled = _native.extension("cuda")
    return compiled.staging_bytes() if compiled else 0


def pretend_memory_limit(limit: int) -> None:
    """Has them believe that JAX may take so many bytes of this process's first GPU; 0: nobody knows."""
    compiled = _native.extension("cuda")
    assert compiled
    compiled.set_memory_limit(jax.local_devices()[0].local_hardware_id, limit)
