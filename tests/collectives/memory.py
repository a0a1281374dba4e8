"""Memory of GPUs that the compiled collectives of this process have, or know of."""

import jax

from jaxmagi import _native


def staging_bytes() -> int:
    """The size of buffers through which rows are copied; 0 with shared memory pools, or without CUDA."""
    compiled = _native.extension("cuda")
    return compiled.staging_bytes() if compiled else 0


def pretend_memory_limit(limit: int) -> None:
    """Tells them that JAX may take so many bytes of this process's first GPU, 0 if it is not known."""
    compiled = _native.extension("cuda")
    assert compiled
    compiled.set_memory_limit(jax.local_devices()[0].local_hardware_id, limit)
