"""RMSNorm and RoPE around sparse attention: of queries and rows before it, of its output after it."""

from __future__ import annotations

from typing import Any

from ..arrays.array import Array
from ..dispatch.call import BF16, BYTES, FLOAT32, SLOTS, Call
from ..dispatch.formats import cache_layout, cache_pages, check_layout
from ..dispatch.launch_cache import launch_cached
from ..dispatch.values import check_flags, check_integers, check_optional_size, in_float32
from ..kernels.types.segments import HeadFactors, Insertion, Pages, RopeKind
from ..layout import DSV4_FP8, INDEXER_FP8, CacheLayout
from .indices import pair
from .sparse_attention import check_heads
from .sparse_cache import checked_slots

ROWS = (*BF16, *FLOAT32)
WINDOW_ROWS = ("DSV4_FP8", "DSV41_FP8", "DSV41_FP8_SPLIT", "DSV4_BF16", "DSV4_F32")
LATENT_ROWS = (*WINDOW_ROWS[:3], "DSV41_FP4", "DSV41_FP4_SPLIT", *WINDOW_ROWS[3:])
INDEXER_KEYS = ("INDEXER_FP8", "INDEXER_BF16", "INDEXER_F32")
QUANTIZED_GROUP = 128  # values of a quantised output that share a scale


@launch_cached
def fused_q_kv_rmsnorm(
    qr: Array,
    kv: Array,
    q_weight: Array,
    kv_weight: Array,
    eps: float = 1e-6,
    *,
    out: tuple[Array, Array] | None = None,
    backend: str | None = None,
    stream: Any = None,
) -> tuple[Any, Any]:
    """RMSNorm of a layer's low-rank queries and keys, in one launch.

    Args:
        qr: [T, q_lora_rank] bfloat16 or float32
        kv: [T, D] of qr's dtype; qr and kv may be columns of one wider array
        q_weight: [q_lora_rank] float32 or bfloat16
        kv_weight: [D] of q_weight's dtype
        out: (qr, kv) to write instead of allocating; they may be the inputs

    Returns x / sqrt(mean(x^2) + eps) * weight of both, in qr's dtype; sums are float32, eps is positive.
    Source: vLLM fused_q_kv_rmsnorm.
    """
    call = Call(backend, stream)
    qr = call.array("qr", qr, ROWS, ("T", "q_lora_rank"))
    call.check_float32("qr", qr.dtype.name)
    kv = call.array("kv", kv, (qr.dtype,), ("T", "D"))
    for name, rows in (("qr", qr), ("kv", kv)):
        if not rows.shape[1]:
            raise ValueError(f"{name}: got rows of 0 values, expected at least 1")
    q_weight = call.array("q_weight", q_weight, ROWS, ("q_lora_rank",))
    kv_weight = call.array("kv_weight", kv_weight, (q_weight.dtype,), ("D",))
    outputs = pair("out", out)
    q_out = call.output("out[0] (qr)", outputs[0], (qr.dtype,), qr.shape, may_be="qr")
    kv_out = call.output("out[1] (kv)", outputs[1], (qr.dtype,), kv.shape, may_be="kv")
    epsilon = check_epsilon(eps)
    if len(qr):
        with call.kernels("norm_rope") as kernels:
            kernels.fused_q_kv_rmsnorm(qr, kv, q_weight, kv_weight, epsilon, q_out, kv_out)
    results: tuple[Any, Any] = call.results()
    return results


@launch_cached
def qnorm_rope_and_insert(
    q: Array,
    kv: Array,
    k_cache: Array,
    slot_mapping: Array,
    positions: Array,
    cos_sin_cache: Array,
    *,
    eps: float = 1e-6,
    block_size: int | None = None,
    layout: CacheLayout | str | None = None,
    out: Array | None = None,
    backend: str | None = None,
    stream: Any = None,
) -> Any:
    """Fused q-norm, RoPE and K insert of a V4 or V4.1 layer: one launch between projections and attention.

    Queries: RMSNorm of each head without a weight, then RoPE on its last values. Rows of the window cache: RoPE, the
    cache's format, insert.

    Args:
        q: [T, h, 512] bfloat16, h from 1 to 128; on the host also float32
        kv: [T, 512] of q's dtype, its RMSNorm done
        k_cache: a cache of `layout`, written: uint8 [num_blocks, block_size, 584 or 528], raw pages [num_blocks,
            page_bytes] with block_size (None: 64, if a page of DSV4_FP8 has that size), or rows [num_blocks,
            block_size, 512]
        slot_mapping: [N] int64 or int32, N <= T: slot of each row; slots outside the cache, such as -1, skip their row
        positions: [T] int64 or int32
        cos_sin_cache: [max_position, rope_dim] float32: cosines of the pairs (2 i, 2 i + 1) of the last rope_dim
            values, then sines. Positions outside the table are clamped to it
        eps: of the norm of the queries, positive
        layout: DSV4_FP8, DSV41_FP8, DSV41_FP8_SPLIT or DSV4_BF16, on the host also DSV4_F32, or the name of one; None:
            inferred from the cache, which for V4.1 is an error
        out: [T, h, 512] of q's dtype to write instead of allocating; may be q

    Returns the queries. Sums and products are float32, rounded once; rows are rounded to bfloat16 before quantisation.
    Raises TypeError or ValueError, before anything is written, for an argument that does not fit.
    Source: vLLM's fused q-norm, RoPE and K insert of DeepSeek V4 and V4.1.
    """
    check_optional_size(block_size=block_size)
    call = Call(backend, stream)
    q = call.array("q", q, ROWS, ("T", "h", DSV4_FP8.head_dim))
    cache = call.borrow("k_cache", k_cache, writable=True)
    layout = cache_layout(cache, layout, block_size, q.shape[2])
    check_layout(layout, WINDOW_ROWS)
    check_heads(q.shape[1])
    call.check_float32("q", q.dtype.name)
    kv = call.array("kv", kv, (q.dtype,), ("T", layout.head_dim))
    pages = cache_pages(call, cache, layout, block_size)
    into = insertion(call, "kv", pages, slot_mapping, positions, cos_sin_cache, eps)
    q_out = call.output("out", out, (q.dtype,), q.shape, may_be="q")
    if len(q):
        with call.kernels("norm_rope") as kernels:
            kernels.qnorm_rope_and_insert(q, kv, into, q_out)
    return call.results()


@launch_cached
def norm_rope_and_insert(
    kv: Array,
    k_cache: Array,
    slot_mapping: Array,
    positions: Array,
    cos_sin_cache: Array,
    *,
    weight: Array | None = None,
    eps: float = 1e-6,
    round_rows: bool = True,
    block_size: int | None = None,
    layout: CacheLayout | str | None = None,
    backend: str | None = None,
    stream: Any = None,
) -> None:
    """Fused RMSNorm, RoPE and insert of latent rows, without queries: V4.1's window rows and compressed rows.

    Args:
        kv: [T, 512] bfloat16, on the host also float32
        k_cache: a cache of `layout`, written, as qnorm_rope_and_insert takes it
        slot_mapping: [N] int64 or int32, N <= T: slot of each row; slots outside the cache, such as -1, skip their row
        positions: [T] int64 or int32; for a compressed row the first position that it represents
        cos_sin_cache: [max_position, rope_dim] float32, as in qnorm_rope_and_insert
        weight: [512] float32 or bfloat16, of the RMSNorm; None: no norm
        eps: of the norm, positive
        round_rows: round rows to bfloat16 before quantisation, as DeepSeek's code and SGLang do; False: quantise the
            float32 values, as vLLM does. No effect on values that a cache stores in bfloat16
        layout: DSV4_FP8, DSV41_FP8, DSV41_FP4, DSV41_FP8_SPLIT, DSV41_FP4_SPLIT or DSV4_BF16, on the host also
            DSV4_F32, or the name of one; None: inferred from the cache, which for V4.1 is an error

    Sums and products are float32.
    Raises TypeError or ValueError, before anything is written, for an argument that does not fit.
    Source: vLLM's fused RoPE and insert of DeepSeek V4.1's rows, with the norm before it.
    """
    check_optional_size(block_size=block_size)
    check_flags(round_rows=round_rows)
    call = Call(backend, stream)
    kv = call.array("kv", kv, ROWS, ("T", DSV4_FP8.head_dim))
    cache = call.borrow("k_cache", k_cache, writable=True)
    layout = cache_layout(cache, layout, block_size, kv.shape[1])
    check_layout(layout, LATENT_ROWS)
    call.check_float32("kv", kv.dtype.name)
    weight = call.optional("weight", weight, ROWS, (layout.head_dim,))
    pages = cache_pages(call, cache, layout, block_size)
    into = insertion(call, "kv", pages, slot_mapping, positions, cos_sin_cache, eps)
    if len(into.slots):
        with call.kernels("norm_rope") as kernels:
            kernels.norm_rope_and_insert(kv, weight, into._replace(round_rows=bool(round_rows)))


@launch_cached
def indexer_knorm_rope_and_insert(
    k: Array,
    weight: Array,
    bias: Array,
    k_cache: Array,
    slot_mapping: Array,
    positions: Array,
    cos_sin_cache: Array | None,
    *,
    eps: float = 1e-6,
    rope_first: bool = True,
    is_neox: bool = True,
    hadamard: bool = False,
    block_size: int | None = None,
    layout: CacheLayout | str | None = None,
    backend: str | None = None,
    stream: Any = None,
) -> None:
    """Fused LayerNorm, RoPE and insert of an indexer's keys, one a token: V3.2, GLM-5.x, Mistral Large 4, Hy4.

    Args:
        k: [T, 128] float32 or bfloat16, as projected; may be columns of a wider array
        weight, bias: [128] of one dtype, float32 or bfloat16, of the LayerNorm
        k_cache: a cache of `layout`, written: uint8 [num_blocks, block_size, 132], raw pages [num_blocks, page_bytes]
            with block_size given, or rows [num_blocks, block_size, 128]
        slot_mapping: [N] int64 or int32, N <= T: slot of each row; slots outside the cache, such as -1, skip their row
        positions: [T] int64 or int32
        cos_sin_cache: [max_position, rope_dim] float32: cosines of the pairs, then sines. Positions outside the table
            are clamped to it; None: keys have no RoPE
        eps: of the norm, positive
        rope_first: whether the first rope_dim values are rotated (V3.2) or the last ones (Hy4)
        is_neox: whether value i is paired with value i + rope_dim / 2 (V3.2) or neighbours are paired (GLM-5.x)
        hadamard: whether keys are rotated (Hadamard, Sylvester's order, times 128 ** -0.5) before they are stored;
            fused_indexer_q_rope_quant needs the same flag
        layout: INDEXER_FP8 or INDEXER_BF16, on the host also INDEXER_F32, or the name of one; None: inferred from the
            cache

    Sums and products are float32; rows are rounded to bfloat16 before quantisation, and before the Hadamard rotation.
    Raises TypeError or ValueError, before anything is written, for an argument that does not fit.
    Source: k_norm, RoPE and indexer_k_quant_and_cache of vLLM's DeepSeek V3.2 indexer, as one operation; the rotation
    of SGLang's.
    """
    check_optional_size(block_size=block_size)
    check_flags(rope_first=rope_first, is_neox=is_neox, hadamard=hadamard)
    call = Call(backend, stream)
    k = call.array("k", k, ROWS, ("T", INDEXER_FP8.head_dim))
    cache = call.borrow("k_cache", k_cache, writable=True)
    layout = cache_layout(cache, layout, block_size, k.shape[1])
    check_layout(layout, INDEXER_KEYS)
    weight = call.array("weight", weight, ROWS, (layout.head_dim,))
    bias = call.array("bias", bias, (weight.dtype,), (layout.head_dim,))
    pages = cache_pages(call, cache, layout, block_size)
    into = insertion(call, "k", pages, slot_mapping, positions, cos_sin_cache, eps, needs_rope=False)
    if len(into.slots):
        with call.kernels("norm_rope") as kernels:
            kind = RopeKind(bool(rope_first), bool(is_neox))
            kernels.indexer_knorm_rope_and_insert(k, weight, bias, into, kind, bool(hadamard))


@launch_cached
def apply_rope(
    x: Array,
    positions: Array,
    cos_sin_cache: Array | None,
    *,
    inverse: bool = False,
    rope_first: bool = False,
    is_neox: bool = False,
    ssmax_scale: Array | None = None,
    ssmax_bias: Array | None = None,
    out: Array | None = None,
    backend: str | None = None,
    stream: Any = None,
) -> Any:
    """RoPE on values of each head, and SSMax; `inverse` undoes RoPE, as V4 does in attention's output.

    Args:
        x: [T, h, d] bfloat16, d 512, 192, 128 or 64; on the host also float32
        positions: [T] int64 or int32
        cos_sin_cache: [max_position, rope_dim] float32: cosines of the pairs, then sines. Positions outside the table
            are clamped to it; None: no RoPE
        rope_first: whether the first rope_dim values of a head are rotated or the last ones
        is_neox: whether value i is paired with value i + rope_dim / 2 or neighbours are paired
        ssmax_scale, ssmax_bias: [h] float32, both or none: a head is multiplied by scale * ln(position + 1) + bias
            before RoPE (SSMax of Mistral Large 4); a negative position counts as 0
        out: [T, h, d] of x's dtype to write instead of allocating; may be x

    Returns x rotated by its position, or with `inverse` by the negative position. Products are float32, rounded once.
    Source: vLLM's inverse RoPE of DeepSeek V4's attention output; transformers' softmax scaling of Mistral Large 4.
    """
    check_flags(inverse=inverse, rope_first=rope_first, is_neox=is_neox)
    call = Call(backend, stream)
    x = call.array("x", x, ROWS, ("T", "h", -1))
    call.check_float32("x", x.dtype.name)
    if x.shape[2] % 2:
        raise ValueError(f"x: got {x.shape[2]} values a head, expected an even number")
    positions = call.array("positions", positions, SLOTS, ("T",))
    rotation = None if cos_sin_cache is None else cos_sin(call, cos_sin_cache, x.shape[2])
    ssmax = head_factors(call, ssmax_scale, ssmax_bias, x.shape[1])
    if rotation is None and ssmax is None:
        raise ValueError("cos_sin_cache: got None without ssmax_scale, expected at least one of the two")
    result = call.output("out", out, (x.dtype,), x.shape, may_be="x")
    if x.size:
        with call.kernels("norm_rope") as kernels:
            kind = RopeKind(bool(rope_first), bool(is_neox))
            kernels.apply_rope(x, positions, rotation, bool(inverse), kind, ssmax, result)
    return call.results()


@launch_cached
def inverse_rope_and_quantize(
    o: Array,
    positions: Array,
    cos_sin_cache: Array,
    num_groups: int,
    *,
    is_ue8m0: bool = False,
    out: tuple[Array, Array] | None = None,
    backend: str | None = None,
    stream: Any = None,
) -> tuple[Any, Any]:
    """Inverse RoPE of attention's output, and quantisation for a grouped FP8 GEMM.

    Args:
        o: [T, h, 512] bfloat16; on the host also float32
        positions: [T] int64 or int32
        cos_sin_cache: [max_position, rope_dim] float32, as in qnorm_rope_and_insert
        num_groups: G, a divisor of h: a group is h / G consecutive heads
        is_ue8m0: scales are powers of two; False: a scale is amax / 448, not rounded to a power of two
        out: (values, scales) to write instead of allocating

    Returns values uint8 (e4m3) [G, T, h / G * 512] and scales float32 [G, T, h / G * 4], one for 128 values: value =
    e4m3 * scale, where amax counts as at least 1e-10. Values are rounded to o's dtype before quantisation.
    Source: vLLM's fused inverse RoPE and FP8 quantisation of DeepSeek V4, with groups in front.
    """
    check_integers(1, num_groups=num_groups)
    check_flags(is_ue8m0=is_ue8m0)
    call = Call(backend, stream)
    o = call.array("o", o, ROWS, ("T", "h", DSV4_FP8.head_dim))
    call.check_float32("o", o.dtype.name)
    tokens, heads, head_dim = o.shape
    if heads % num_groups:
        raise ValueError(f"num_groups: got {num_groups}, expected a divisor of the {heads} heads of o")
    positions = call.array("positions", positions, SLOTS, ("T",))
    rotation = cos_sin(call, cos_sin_cache, head_dim)
    outputs = pair("out", out)
    width = heads // num_groups * head_dim
    values = call.output("out[0] (values)", outputs[0], BYTES, (num_groups, tokens, width))
    scales = call.output("out[1] (scales)", outputs[1], FLOAT32, (num_groups, tokens, width // QUANTIZED_GROUP))
    if o.size:
        with call.kernels("norm_rope") as kernels:
            kernels.inverse_rope_and_quantize(o, positions, rotation, bool(is_ue8m0), values, scales)
    results: tuple[Any, Any] = call.results()
    return results


def insertion(
    call: Call, rows_name: str, pages: Pages, slot_mapping: Any, positions: Any, cos_sin_cache: Any, eps: Any,
    needs_rope: bool = True,
) -> Insertion:  # fmt: skip
    """Check the cache, slots and positions for inserting T rows after norm and RoPE."""
    call.check_float32("layout", pages.layout.value_type)
    slots = checked_slots(call, slot_mapping, rows_name)
    positions = call.array("positions", positions, SLOTS, ("T",))
    absent = cos_sin_cache is None and not needs_rope
    rotation = None if absent else cos_sin(call, cos_sin_cache, pages.layout.head_dim)
    return Insertion(pages, slots, positions, rotation, check_epsilon(eps))


def cos_sin(call: Call, cos_sin_cache: Any, head_dim: int) -> Any:
    """Check a table of cosines and sines against the values of a head."""
    table = call.array("cos_sin_cache", cos_sin_cache, FLOAT32, (-1, -1))
    positions, rope_dim = table.shape
    if not positions or rope_dim % 2 or not 2 <= rope_dim <= head_dim:
        raise ValueError(
            f"cos_sin_cache: got shape {tuple(table.shape)}, expected at least one position and an even number of "
            f"columns up to {head_dim}"
        )
    return table


def head_factors(call: Call, scale: Any, bias: Any, heads: int) -> HeadFactors | None:
    """Check the arrays of SSMax; None without them."""
    if (scale is None) != (bias is None):
        raise ValueError("ssmax_bias: got one of ssmax_scale and ssmax_bias, expected both or none")
    if scale is None:
        return None
    return HeadFactors(
        call.array("ssmax_scale", scale, FLOAT32, (heads,)), call.array("ssmax_bias", bias, FLOAT32, (heads,))
    )


def check_epsilon(eps: float) -> float:
    """Raise TypeError or ValueError unless eps is positive in float32: a norm of zeros would divide by 0 without it."""
    return in_float32("eps", eps, positive=True)
