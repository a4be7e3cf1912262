"""The kernel that a launcher takes for aligned arrays, inferred from shapes: the answer of `cumla.supports`.

Each answer uses the launcher's own test; strides and addresses may still lead to a slower kernel.
"""

from typing import Any

from .dense_attention import HEADS, HOPPER_HEAD_DIMS, check_head_dims, portable_sizes
from .device import is_hopper, shared_bytes_per_block
from .indexer import BOX_ROWS, CANDIDATE_ROWS, candidate_blocks_on_hopper, packed_on_hopper, pages_on_hopper
from .sparse import kernels as sparse_kernels
from .sparse.kernels import fastest, fastest_prefill, portable_size

__all__ = ["chosen", "fastest", "fastest_prefill", "portable_dense_tile", "portable_size"]


def chosen(function: str, arguments: tuple[Any, ...], device: int) -> str:
    """ "hopper", "portable" or "exact". Raises ValueError if there is no kernel for the arguments."""
    hopper = is_hopper(device)
    if function == "sparse_mla_decode":
        (given,) = arguments
        return sparse_kernels.fastest(device, given.segments[0].pages.layout, int(given.q.shape[2]))
    if function == "sparse_mla_prefill":
        return sparse_kernels.fastest_prefill(device)
    if function == "mha_varlen":
        (given,) = arguments
        dims = given.q.shape[2], given.q.shape[2] - given.k.shape[2], given.v.shape[2]
        check_head_dims(*dims)
        return "hopper" if hopper and dims == HOPPER_HEAD_DIMS else "portable"
    if function == "dense_mla_decode":
        return "hopper" if hopper and arguments[0].scale is None else "portable"
    if function == "mqa_logits":
        return "hopper" if hopper and packed_on_hopper(arguments[0]) else "portable"
    if function == "paged_mqa_logits":
        (given,) = arguments
        return "hopper" if hopper and pages_on_hopper(given.q, given.pages, BOX_ROWS) else "portable"
    if function == "candidate_logits":
        (given,) = arguments
        fits = candidate_blocks_on_hopper(len(given.weights), given.pages, given.block)
        return "hopper" if hopper and fits and pages_on_hopper(given.q, given.pages, CANDIDATE_ROWS) else "portable"
    return "portable"


def portable_dense_tile(device: int) -> tuple[int, int] | None:
    """Heads and keys that decodes over dense rows of 16 bits take at a time; None: Hopper's kernel does it."""
    return None if is_hopper(device) else (HEADS, portable_sizes(shared_bytes_per_block(device))[0]["KEYS"])
