"""RMSNorm and RoPE before and after sparse attention."""

from typing import Any

from ..types.segments import HeadFactors, Insertion, Pages, RopeKind
from .compile import kernel
from .launch import C_NAMES, Kernel, is_aligned, pointer, strides

WARPS = 4  # per CTA
THREADS = 256  # per CTA of apply_rope
MOST_THREADS = 1024
MOST_Y = 65535  # limit of gridDim.y
FILE = "common/norm_rope.cu"
# Macros that a kernel of the file does not use.
DEFAULTS: dict[str, str | int] = {
    "LAYOUT": "DSV4_FP8", "SLOT": "int64", "POSITION": "int64", "WEIGHT": "float", "UNIT": 2, "ROUND_ROWS": 1,
    "IN_HALVES": 0, "SSMAX": 0, "ALIGNED": 0,
}  # fmt: skip


def _kernel(name: str, **macros: str | int) -> Kernel:
    return kernel(FILE, name, **(DEFAULTS | macros))


def fused_q_kv_rmsnorm(qr: Any, kv: Any, q_weight: Any, kv_weight: Any, eps: float, q_out: Any, kv_out: Any) -> None:
    longest = max(qr.shape[1], kv.shape[1])
    aligned = is_aligned(qr, kv, q_weight, kv_weight, q_out, kv_out) and (qr.shape[1] | kv.shape[1]) % 8 == 0
    aligned = aligned and longest <= 8 * MOST_THREADS
    threads = 32 * -(-longest // 256) if aligned else 32 * WARPS
    _kernel(
        "fused_q_kv_rmsnorm", WEIGHT=C_NAMES[q_weight.dtype.name], UNIT=8 if aligned else 2, ALIGNED=int(aligned)
    )(
        (len(qr), 2),
        (threads,),
        (
            qr, strides(qr)[0], qr.shape[1], q_weight, q_out, strides(q_out)[0],
            kv, strides(kv)[0], kv.shape[1], kv_weight, kv_out, strides(kv_out)[0], eps,
        ),
        overlap=True,
    )  # fmt: skip


def insertion_macros(into: Insertion) -> dict[str, str | int]:
    return {
        "LAYOUT": into.pages.layout.name, "SLOT": C_NAMES[into.slots.dtype.name],
        "POSITION": C_NAMES[into.positions.dtype.name],
    }  # fmt: skip


def insertion_arguments(into: Insertion) -> tuple[Any, ...]:
    """Arguments after the slots: positions, their rotation, and the cache."""
    return into.positions, *rotation_arguments(into.cos_sin), into.eps, *pages_arguments(into.pages)


def rotation_arguments(table: Any | None) -> tuple[Any, ...]:
    return (0, 0, 0, 0) if table is None else (table, strides(table)[0], len(table), table.shape[1])


def pages_arguments(pages: Pages) -> tuple[Any, ...]:
    return pages.bytes, pages.bytes.strides[0], pages.num_slots, pages.block_size


def qnorm_rope_and_insert(q: Any, kv: Any, into: Insertion, q_out: Any) -> None:
    tokens, heads, _ = q.shape
    aligned = is_aligned(q, kv, q_out, into.pages.bytes)
    _kernel("qnorm_rope_and_insert", **insertion_macros(into), ALIGNED=int(aligned))(
        (tokens, -(-(heads + 1) // WARPS)),
        (32 * WARPS,),
        (
            q, *strides(q)[:2], kv, strides(kv)[0], q_out, *strides(q_out)[:2], heads, into.slots, len(into.slots),
            *insertion_arguments(into),
        ),
        overlap=True,
    )  # fmt: skip


def norm_rope_and_insert(kv: Any, weight: Any | None, into: Insertion) -> None:
    rows, weight_type = len(into.slots), "float" if weight is None else C_NAMES[weight.dtype.name]
    aligned = is_aligned(kv, into.pages.bytes)
    macros = insertion_macros(into) | {"WEIGHT": weight_type, "ROUND_ROWS": int(into.round_rows)}
    _kernel("norm_rope_and_insert", **macros, ALIGNED=int(aligned))(
        (-(-rows // WARPS),),
        (32 * WARPS,),
        (kv, strides(kv)[0], pointer(weight), rows, into.slots, *insertion_arguments(into)),
        overlap=True,
    )


def indexer_knorm_rope_and_insert(
    k: Any, weight: Any, bias: Any, into: Insertion, kind: RopeKind, hadamard: bool
) -> None:
    rows = len(into.slots)
    kernel(
        "common/indexer_norm_rope.cu",
        "indexer_knorm_rope_and_insert",
        INPUT=C_NAMES[k.dtype.name],
        WEIGHT=C_NAMES[weight.dtype.name],
        HADAMARD=int(hadamard),
        ALIGNED=int(is_aligned(into.pages.bytes)),
        **insertion_macros(into),
    )(
        (-(-rows // WARPS),),
        (32 * WARPS,),
        (
            k, strides(k)[0], weight, bias, rows, into.slots, into.positions, *rotation_arguments(into.cos_sin),
            into.eps, kind.first, kind.halves, *pages_arguments(into.pages),
        ),
        overlap=True,
    )  # fmt: skip


def apply_rope(
    x: Any, positions: Any, cos_sin: Any | None, inverse: bool, kind: RopeKind, ssmax: HeadFactors | None, out: Any
) -> None:
    tokens, heads, dim = x.shape
    rotation = rotation_arguments(cos_sin)
    rope_dim = rotation[3]
    in_place = x.data.ptr == out.data.ptr and x.strides == out.strides and ssmax is None
    stays = 0 if in_place else dim - rope_dim
    x_token, x_head, _ = strides(x)
    out_token, out_head, _ = strides(out)
    halves = kind.halves and rope_dim > 0
    at_once = rope_dim // 2 if halves else rope_dim  # neighbouring values that are rotated alike
    aligned = is_aligned(x, out, *(() if cos_sin is None else (cos_sin,))) and (dim | rope_dim | at_once) % 8 == 0
    unit = 8 if aligned else 1 if halves and at_once % 2 else 2
    rotations = rope_dim // (unit * (1 + halves))
    blocks = -(-heads * (rotations + stays // unit) // THREADS)
    _kernel(
        "apply_rope",
        POSITION=C_NAMES[positions.dtype.name],
        UNIT=unit,
        IN_HALVES=int(halves),
        SSMAX=int(ssmax is not None),
        ALIGNED=int(aligned),
    )(
        (tokens, min(blocks, MOST_Y)),
        (THREADS,),
        (
            x, x_token, x_head, out, out_token, out_head, heads, dim, stays // unit, positions, *rotation,
            -1.0 if inverse else 1.0, kind.first, *(ssmax or (0, 0)),
        ),
        overlap=True,
    )  # fmt: skip


def inverse_rope_and_quantize(
    o: Any, positions: Any, cos_sin: Any, powers_of_two: bool, values: Any, scales: Any
) -> None:
    tokens, heads, _ = o.shape
    o_token, o_head, _ = strides(o)
    values_group, values_token, _ = strides(values)
    scales_group, scales_token, _ = strides(scales)
    _kernel(
        "inverse_rope_and_quantize",
        POSITION=C_NAMES[positions.dtype.name],
        ALIGNED=int(is_aligned(o, values)),
    )(
        (-(-tokens * heads // WARPS),),
        (32 * WARPS,),
        (
            o, o_token, o_head, tokens, heads, heads // len(values), positions, cos_sin, strides(cos_sin)[0],
            len(cos_sin), cos_sin.shape[1], int(powers_of_two), values, values_group, values_token, scales,
            scales_group, scales_token,
        ),
        overlap=True,
    )  # fmt: skip
