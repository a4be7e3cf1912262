"""Pooled index keys."""

from ..types.compressor import KeyPools
from .compile import kernel
from .constants import constant
from .launch import C_NAMES, is_aligned, pointer, strides

SOURCE = "common/key_pools.cu"
ONE_EACH = 256  # most tokens of which a warp takes one; of more tokens, a warp takes a pool's
MOST_TOGETHER = 32  # lanes


def indexer_kpool_and_insert(rows: KeyPools) -> None:
    state, pool, pages = rows.state, len(rows.ape), rows.pages
    requests, tokens = len(rows.query_start_loc) - 1, min(len(rows.slots), len(rows.state_slots))
    macros: dict[str, str | int] = {
        "POOL": pool,
        "INPUT": C_NAMES[rows.k.dtype.name],
        "STATE": C_NAMES[state.dtype.name],
    }
    threads = constant(SOURCE, "THREADS", **macros)
    together = 1 if tokens <= ONE_EACH else min(pool, MOST_TOGETHER)
    restart = () if rows.restart_rows is None else (rows.restart_rows,)
    arrays = rows.k, rows.gate, rows.weight, rows.bias, rows.ape, state, *restart
    kernel(
        SOURCE,
        "indexer_kpool_and_insert",
        **macros,
        WEIGHT=C_NAMES[rows.weight.dtype.name],
        STATE_SLOT=C_NAMES[rows.state_slots.dtype.name],
        SLOT=C_NAMES[rows.slots.dtype.name],
        POSITION=C_NAMES[rows.positions.dtype.name],
        LAYOUT=pages.layout.name,
        HADAMARD=int(rows.hadamard),
        WIDE=int(is_aligned(*arrays)),
        ALIGNED=int(is_aligned(pages.bytes)),
    )(
        (requests + -(-tokens // (together * (threads // 32))),),
        (threads,),
        (
            rows.k, strides(rows.k)[0], rows.gate, strides(rows.gate)[0], rows.weight, rows.bias, rows.ape,
            strides(rows.ape)[0], rows.eps, rows.state_slots, len(rows.state_slots), rows.slots, tokens, rows.positions,
            rows.query_start_loc, requests, state, *strides(state)[:2], len(state) * state.shape[1], state.shape[1],
            pointer(rows.restart_rows), *(strides(restart[0])[:2] if restart else (0, 0)),
            pointer(rows.restart_positions), pages.bytes, pages.bytes.strides[0], pages.num_slots, pages.block_size,
            together,
        ),
        overlap=True,
    )  # fmt: skip
