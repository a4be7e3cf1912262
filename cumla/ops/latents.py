"""The compressor of DeepSeek V4.1: pools one or two tokens into a latent row, before RoPE and the cache's format."""

from __future__ import annotations

from typing import Any

from ..arrays.array import Array
from ..dispatch.call import BF16, FLOAT32, INT32, SLOTS, Call
from ..dispatch.launch_cache import launch_cached
from ..dispatch.values import check_choice, check_flags, check_integers
from ..kernels.types.compressor import LatentRows
from .compressor import slots_of
from .norm_rope import check_epsilon

DIM = 512
VALUES = (*FLOAT32, *BF16)


@launch_cached
def compress_latents(
    kv_score: Array,
    norm_weight: Array,
    slot_mapping: Array,
    latents: Array,
    *,
    compress_ratio: int,
    positions: Array | None = None,
    query_start_loc: Array | None = None,
    state_cache: Array | None = None,
    restart_rows: Array | None = None,
    restart_positions: Array | None = None,
    eps: float = 1e-20,
    round_pooled: bool = False,
    backend: str | None = None,
    stream: Any = None,
) -> None:
    """Pool tokens into latent rows, normalise the rows, and save in a ring the tokens that a later step pools.

    Ratio 2: the row of positions 2 j and 2 j + 1 is the mean of their kv, each channel weighted by the softmax of the
    two scores. The token at the odd position completes the row. If the even token belongs to an earlier step, its kv
    and score are read from the request's ring. Ratio 1: every token's kv is a row. Rows then get RMSNorm.

    Args:
        kv_score: [T, 1024] float32 or bfloat16: kv, then score; for ratio 1 [T, 512], only kv
        norm_weight: [512] float32 or bfloat16
        slot_mapping: [N] int64 or int32, N <= T: ratio 2, the slot for a token's kv and score, ring * capacity +
            position % capacity. A token with slot -1, or any slot outside the state cache, is padding: it is not saved
            and completes no row. A request whose first token is padding saves nothing. Ratio 1: tokens with a negative
            slot are padding
        latents: [T, 512] bfloat16, or float32 without rounding, written at tokens that complete a row. Other rows are
            not written
        positions: [T] int64 or int32, of each token in its sequence. This and the next two are for ratio 2 only
        query_start_loc: [R + 1] int32, first token of each request. Tokens without a request are padding
        state_cache: [rings, capacity, 1024] float32, written: one ring a request, for its lifetime;
            cumla.metadata.ring_capacity returns the capacity. Only the last `capacity` tokens of a request are saved
        restart_rows: [rings, 1024] float32, and
        restart_positions: [rings] int32, initially 0, both written: they allow a step to be run again with the same
            result, as after an error in a later layer. A request that starts at an odd position p and has at least
            `capacity` tokens overwrites the row of p - 1 in its ring: these arrays save that row and p. None: such a
            step must not be run again
        compress_ratio: 1 or 2
        eps: of the RMSNorm, positive
        round_pooled: round the pooled row to bfloat16 before the norm, as DeepSeek's code and SGLang do; False: as vLLM

    Any division of a prompt into steps gives bit-identical rows. Rejected drafts need no rollback: later tokens
    overwrite their rows of the ring by position. A channel whose scores are both -inf is 0. All arithmetic is float32.
    `norm_rope_and_insert` without a weight rotates the rows at position // ratio * ratio and inserts them; the
    indexer's keys are projected from the unrotated rows.
    Raises TypeError or ValueError, before anything is written, for an argument that does not fit.
    Source: vLLM fused_save_compress_norm (DeepSeek V4.1).
    """
    check_integers(1, compress_ratio=compress_ratio)
    check_choice((1, 2), compress_ratio=compress_ratio)
    check_flags(round_pooled=round_pooled)
    call = Call(backend, stream)
    kv_score = call.array("kv_score", kv_score, VALUES, ("T", compress_ratio * DIM))
    norm_weight = call.array("norm_weight", norm_weight, VALUES, (DIM,))
    slots = slots_of(call, "slot_mapping", slot_mapping)
    latents = call.array("latents", latents, VALUES, ("T", DIM), writable=True)
    for name, value in (
        ("positions", positions), ("query_start_loc", query_start_loc), ("state_cache", state_cache)
    ):  # fmt: skip
        if (value is None) != (compress_ratio == 1):
            got, expected = ("None", "an array") if value is None else ("an array", "None")
            raise ValueError(f"{name}: got {got} for compress_ratio {compress_ratio}, expected {expected}")
    positions = call.optional("positions", positions, SLOTS, ("T",))
    starts = call.optional("query_start_loc", query_start_loc, INT32, (-1,))
    if starts is not None and not len(starts):
        raise ValueError("query_start_loc: got no entries, expected one more than the number of requests")
    state = call.optional("state_cache", state_cache, FLOAT32, (-1, -1, 2 * DIM), writable=True)
    restart = _restart(call, restart_rows, restart_positions, state)
    epsilon = check_epsilon(eps)
    if len(slots):
        with call.kernels("latents") as kernels:
            step = positions, starts, state, *restart
            kernels.compress_latents(
                LatentRows(kv_score, norm_weight, slots, latents, *step, epsilon, bool(round_pooled))
            )


def _restart(call: Call, rows: Any, positions: Any, state: Any) -> tuple[Any, Any]:
    """Check the restart arrays."""
    if (rows is None) != (positions is None):
        raise ValueError("restart_positions: got one of restart_rows and restart_positions, expected both or none")
    if rows is None:
        return None, None
    if state is None:
        raise ValueError("restart_rows: got an array for compress_ratio 1, expected None")
    rows = call.array("restart_rows", rows, FLOAT32, (len(state), 2 * DIM), writable=True)
    return rows, call.array("restart_positions", positions, INT32, (len(state),), writable=True)
