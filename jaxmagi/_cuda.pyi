"""The compiled CUDA extension (xla_ffi/module_cuda.cc)."""

sources: str  # the hash of what it was built from (cmake/sources_hash.py)

def registrations() -> dict[str, dict[str, object]]: ...
def forward_tile(dim: int, v_dim: int) -> tuple[int, int] | None: ...
def plan_workspace_words(plans: int, capacity: int, q_len: int, tile_rows: int) -> int: ...
def collective_workspace_bytes(
    kind: str,  # "cast" or "reduce"
    transfers: int,
    cp_size: int,
    pair_rows: int,
    row_bytes: list[int],  # of each array
    implementation: int,
    ranks_per_host: int,
) -> int: ...
def finalize_collectives() -> None: ...
