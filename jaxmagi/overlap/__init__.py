"""Matrix products with a collective: of gathered rows, summed over ranks, or exchanged between them."""

from ._api import (
    all_gather_matmul as all_gather_matmul,
    matmul_all_reduce as matmul_all_reduce,
    matmul_all_to_all as matmul_all_to_all,
    matmul_reduce_scatter as matmul_reduce_scatter,
)
