"""What is measured: families of operations in the sizes that serving has, on device or host.

A problem's calls take turns over sets of inputs, so that no cache answers; its check compares a few rows with the
reference, before anything is timed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import cumla

from ..bounds import DECODE_OUT, PREFILL_OUT, Bound, compare
from ..dispatch import backends
from ..dispatch.call import BFLOAT16
from ..layout import DSV4_FP8, INDEXER_FP8, MLA_BF16, CacheLayout
from ..metadata import CommonAttentionMetadata, DeepseekSparseSWAMetadataBuilder, ServingConfig
from ..replay.device import to_host
from ..replay.errors import RunError
from . import peers
from .measure import sets_for

BLOCK = 64
HOST_SLOTS, DEVICE_SLOTS = 1 << 14, 1 << 20
CHECKED = 2  # entries of a batch that are compared with the reference

Calls = Sequence[Callable[[], Any]]


@dataclass(frozen=True)
class Sizes:
    """What a user may ask for; sizes in tokens.

    tokens  of insert, gather and prefill
    topk    keys of the window or V3.2's selection; extra: of the second cache
    """

    backend: str
    layout: CacheLayout = DSV4_FP8
    heads: int = 64
    batch: tuple[int, ...] = (1, 32)
    tokens: tuple[int, ...] = (1024,)
    topk: int = 128
    extra: int = 512
    context: int = 8192

    @functools.cached_property
    def xp(self) -> Any:
        return backends.array_module(self.backend)

    @property
    def on_device(self) -> bool:
        return backends.takes_device_arrays(self.backend)

    @property
    def with_peers(self) -> bool:
        """Other libraries are measured beside the backend that competes with them."""
        return self.backend == "cuda"

    @property
    def slots(self) -> int:
        return DEVICE_SLOTS if self.on_device else HOST_SLOTS


@dataclass(frozen=True)
class Problem:
    """Calls that do the same.

    impls      by name, the framework whose graphs they are captured in, and calls
    check      of the first call's result
    from_host  the host's time for a call counts, on a device too
    """

    op: str
    config: str
    impls: dict[str, tuple[str, Calls]]
    bytes_moved: int
    flop: int = 0
    check: Callable[[Any], float] | None = field(default=None)
    from_host: bool = False


def beside(calls: Calls, name: str, peer: Sequence[Callable[[], Any] | None]) -> dict[str, tuple[str, Calls]]:
    """cumla's calls, and those of a peer if it has any."""
    theirs = [call for call in peer if call is not None]
    return {"cumla": ("cupy", calls)} | ({name: ("torch", theirs)} if theirs else {})


class Arrays:
    """Random arrays where the backend wants them."""

    def __init__(self, sizes: Sizes, seed: int = 0) -> None:
        self.sizes, self.xp, self.rng = sizes, sizes.xp, np.random.default_rng(seed)

    def rows(self, *shape: int) -> Any:
        """bfloat16; large arrays repeat a million values."""
        count = int(np.prod(shape))
        values = self.rng.standard_normal(min(count, 1 << 20), np.float32).astype(BFLOAT16)
        return self.xp.asarray(np.resize(values.view(np.uint16), shape)).view(BFLOAT16)

    def integers(self, end: int, *shape: int) -> Any:
        return self.xp.asarray(self.rng.integers(0, end, shape, np.int32))

    def full(self, shape: Any, value: int) -> Any:
        return self.xp.full(shape, value, np.int32)

    def cache(self, layout: CacheLayout) -> Any:
        """A cache whose pages repeat a few."""
        blocks, base = self.sizes.slots // BLOCK, 1024 // BLOCK
        cache = layout.allocate(blocks, BLOCK, self.xp)
        cumla.quantize_and_insert_k_cache(
            self.rows(1024, layout.head_dim), cache, self.xp.arange(1024), layout=layout, backend=self.sizes.backend
        )
        for first in range(base, blocks, base):
            cache[first : first + base] = cache[:base]
        return cache


def insert(sizes: Sizes) -> Iterator[Problem]:
    layout, arrays = sizes.layout, Arrays(sizes)
    for tokens in sizes.tokens:
        moved = tokens * (2 * layout.head_dim + layout.token_bytes + 8)
        calls, peer = [], []
        for _ in range(sets_for(moved) if sizes.on_device else 2):
            cache = layout.allocate(-(-tokens // BLOCK), BLOCK, sizes.xp)
            k, slots = arrays.rows(tokens, layout.head_dim), sizes.xp.asarray(arrays.rng.permutation(tokens))
            calls.append(functools.partial(_insert, k, cache, slots, layout, sizes.backend))
            if sizes.with_peers and layout is DSV4_FP8:
                peer.append(peers.vllm_insert(k, cache, slots, BLOCK))
        yield Problem("insert", f"{layout.name} T{tokens}", beside(calls, "vllm", peer), moved)


def _insert(k: Any, cache: Any, slots: Any, layout: CacheLayout, backend: str) -> Any:
    cumla.quantize_and_insert_k_cache(k, cache, slots, layout=layout, backend=backend)
    return cache


def gather(sizes: Sizes) -> Iterator[Problem]:
    layout, arrays = sizes.layout, Arrays(sizes)
    cache = arrays.cache(layout)
    for tokens in sizes.tokens:
        out = sizes.xp.empty((1, tokens, layout.head_dim), BFLOAT16)
        lens, columns = arrays.full(1, tokens), -(-tokens // BLOCK)
        calls, peer = [], []
        for _ in range(4):
            table = arrays.integers(len(cache), 1, columns)
            calls.append(
                functools.partial(
                    cumla.dequantize_and_gather_k_cache, out, cache, lens, None, table, layout=layout,
                    backend=sizes.backend,
                )
            )  # fmt: skip
            if sizes.with_peers and layout is DSV4_FP8:
                peer.append(peers.vllm_gather(out, cache, lens, table, BLOCK))
        moved = tokens * (layout.token_bytes + 2 * layout.head_dim)
        yield Problem("gather", f"{layout.name} T{tokens}", beside(calls, "vllm", peer), moved)


def decode(sizes: Sizes) -> Iterator[Problem]:
    layout, arrays = sizes.layout, Arrays(sizes)
    cache, extra = arrays.cache(layout), sizes.extra if layout is DSV4_FP8 else 0
    for batch in sizes.batch:
        calls, peer = [], []
        for _ in range(4):
            q = arrays.rows(batch, 1, sizes.heads, layout.head_dim)
            indices = arrays.integers(sizes.slots, batch, 1, sizes.topk)
            options: dict[str, Any] = {}
            if extra:
                options = {"extra_k_cache": cache, "extra_indices": arrays.integers(sizes.slots, batch, 1, extra)}
            out = sizes.xp.empty((batch, 1, sizes.heads, 512), BFLOAT16)
            lse = sizes.xp.empty((batch, sizes.heads, 1), np.float32)
            given = {"plan": cumla.DecodePlan(), "out": out, "lse": lse}
            calls.append(
                functools.partial(cumla.sparse_mla_decode, q, cache, indices, **options, **given, backend=sizes.backend)
            )
            if sizes.with_peers:
                extras = options.get("extra_k_cache"), options.get("extra_indices")
                peer.append(peers.flash_mla_decode(q, cache, indices, *extras))
        keys = batch * (sizes.topk + extra)
        moved = keys * layout.token_bytes + batch * sizes.heads * 2 * (layout.head_dim + 512)
        flop = 2 * keys * sizes.heads * (layout.head_dim + 512)
        config = f"{layout.name} h{sizes.heads} b{batch} {sizes.topk}" + (f"+{extra}" if extra else "")
        check = functools.partial(_check_decode, calls[0])
        yield Problem("decode", config, beside(calls, "flash_mla", peer), moved, flop, check)


def _check_decode(call: Any, result: Any) -> float:
    """Largest error of a few entries. Raises RunError beyond the bound."""
    first = slice(0, CHECKED)
    q, cache, indices = call.args
    options = {name: call.keywords[name] for name in ("extra_k_cache", "extra_indices") if name in call.keywords}
    if options:
        options = {"extra_k_cache": to_host(cache), "extra_indices": to_host(options["extra_indices"][first])}
    want, _ = cumla.sparse_mla_decode(
        to_host(q[first]), to_host(cache), to_host(indices[first]), **options, backend="reference"
    )
    return _largest_error(_first(result), want, DECODE_OUT)


def _first(result: Any) -> np.ndarray:
    """The entries that are checked of a call's first result, an array or a tensor of torch."""
    got = (result[0] if isinstance(result, (tuple, list)) else result)[:CHECKED]
    return to_host(got) if not hasattr(got, "cpu") else got.float().cpu().numpy()


def _largest_error(got: np.ndarray, want: np.ndarray, bound: Bound) -> float:
    within, error = compare(got, want, bound)
    if not within:
        raise RunError(f"off by {error:.3g}, beyond the bounds: cumla check says more")
    return error


def prefill(sizes: Sizes) -> Iterator[Problem]:
    arrays, layout = Arrays(sizes), sizes.layout
    topk = sizes.topk + (sizes.extra if layout is DSV4_FP8 else 0)
    for tokens in sizes.tokens:
        kv = arrays.rows(sizes.context, layout.head_dim)
        calls, peer = [], []
        for _ in range(2):
            q, indices = arrays.rows(tokens, sizes.heads, layout.head_dim), arrays.integers(sizes.context, tokens, topk)
            out = (
                sizes.xp.empty((tokens, sizes.heads, 512), BFLOAT16),
                *(sizes.xp.empty((tokens, sizes.heads), np.float32) for _ in range(2)),
            )
            calls.append(functools.partial(cumla.sparse_mla_prefill, q, kv, indices, out=out, backend=sizes.backend))
            if sizes.with_peers:
                peer.append(peers.flash_mla_prefill(q, kv, indices))
        flop = 2 * tokens * topk * sizes.heads * (layout.head_dim + 512)
        moved = tokens * topk * 2 * layout.head_dim + tokens * sizes.heads * 2 * (layout.head_dim + 512)
        config = f"d{layout.head_dim} h{sizes.heads} T{tokens} {topk} of {sizes.context}"
        check = functools.partial(_check_prefill, calls[0])
        yield Problem("prefill", config, beside(calls, "flash_mla", peer), moved, flop, check)


def _check_prefill(call: Any, result: Any) -> float:
    q, kv, indices = (to_host(x) for x in call.args)
    want, _, _ = cumla.sparse_mla_prefill(q[:CHECKED], kv, indices[:CHECKED], backend="reference")
    return _largest_error(_first(result), want, PREFILL_OUT)


def indices(sizes: Sizes) -> Iterator[Problem]:
    arrays = Arrays(sizes)
    for batch in sizes.batch:
        columns = -(-sizes.context // BLOCK)
        local, table = arrays.integers(sizes.context, batch, sizes.extra), arrays.integers(1 << 16, batch, columns)
        requests, valid = sizes.xp.arange(batch, dtype=np.int32), sizes.xp.ones(batch, np.bool_)
        out = sizes.xp.empty((batch, sizes.extra), np.int32), sizes.xp.empty(batch, np.int32)
        call = functools.partial(
            cumla.compute_global_topk_indices_and_lens, local, requests, table, BLOCK, valid, out=out,
            backend=sizes.backend,
        )  # fmt: skip
        yield Problem("topk to slots", f"b{batch} {sizes.extra}", {"cumla": ("cupy", [call])}, 8 * local.size)


def indexer(sizes: Sizes) -> Iterator[Problem]:
    arrays, columns = Arrays(sizes), -(-sizes.context // BLOCK)
    cache = arrays.cache(INDEXER_FP8)
    for batch in sizes.batch:
        q = sizes.xp.asarray(arrays.rng.integers(0, 0x39, (batch, 1, 64, 128)).astype(np.uint8))
        weights = sizes.xp.asarray(arrays.rng.random((batch, 64), np.float32))
        lens, table = arrays.full(batch, sizes.context), arrays.integers(len(cache), batch, columns)
        logits = sizes.xp.empty((batch, columns * BLOCK), np.float32)
        scores = functools.partial(
            cumla.fp8_paged_mqa_logits, q, cache, weights, lens, table, out=logits, backend=sizes.backend
        )
        keys, config = batch * sizes.context, f"b{batch} of {sizes.context}"
        peer = []
        if sizes.with_peers:
            peer = [peers.deep_gemm_paged_logits(q, cache, weights, lens, table, columns * BLOCK)]
        impls = beside([scores], "deep_gemm", peer)
        yield Problem("indexer scores", config, impls, keys * 136, 2 * keys * 64 * 128)
        chosen = sizes.xp.empty((batch, sizes.extra), np.int32)
        choose = functools.partial(
            cumla.top_k_per_row, logits, sizes.extra, None, lens, out=chosen, backend=sizes.backend
        )
        yield Problem("indexer top-k", f"{sizes.extra} {config}", {"cumla": ("cupy", [choose])}, 4 * keys)


def dense(sizes: Sizes) -> Iterator[Problem]:
    arrays, columns = Arrays(sizes), -(-sizes.context // BLOCK)
    blocks = max(sizes.slots // BLOCK, columns)
    cache = arrays.rows(blocks, BLOCK, MLA_BF16.head_dim)
    for batch in sizes.batch:
        q, table = arrays.rows(batch, 1, sizes.heads, 576), arrays.integers(blocks, batch, columns)
        given = {
            "plan": cumla.DenseDecodePlan(), "out": sizes.xp.empty((batch, 1, sizes.heads, 512), BFLOAT16),
            "lse": sizes.xp.empty((batch, sizes.heads, 1), np.float32),
        }  # fmt: skip
        call = functools.partial(
            cumla.dense_mla_decode, q, cache, table, arrays.full(batch, sizes.context), **given, backend=sizes.backend
        )
        keys, peer = batch * sizes.context, []
        if sizes.with_peers:
            peer = [peers.flash_mla_dense_decode(q, cache, table, arrays.full(batch, sizes.context), 576**-0.5)]
        yield Problem(
            "dense decode", f"h{sizes.heads} b{batch} of {sizes.context}", beside([call], "flash_mla", peer),
            keys * 1152, 2 * keys * sizes.heads * (576 + 512),
        )  # fmt: skip


def metadata(sizes: Sizes) -> Iterator[Problem]:
    """A step's window metadata: decodes, and one prefill of the first size in `tokens`."""
    prefill, longest = sizes.tokens[0], max(sizes.context, *sizes.tokens)
    columns = -(-longest // BLOCK)
    for batch in sizes.batch:
        query_lens = np.array([1] * batch + [prefill], np.int32)
        seq_lens = np.maximum(query_lens, np.array([sizes.context] * batch + [prefill], np.int32))
        starts = np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32)
        tokens, xp = int(starts[-1]), sizes.xp
        config = ServingConfig(
            window_size=sizes.topk, block_size=BLOCK, max_num_batched_tokens=tokens, max_num_seqs=batch + 1,
            max_model_len=longest,
        )  # fmt: skip
        step = CommonAttentionMetadata(
            xp.asarray(starts), starts, xp.asarray(seq_lens), seq_lens, seq_lens - query_lens, batch + 1, tokens,
            prefill, Arrays(sizes).integers(sizes.slots // BLOCK, batch + 1, columns), xp.arange(tokens),
        )  # fmt: skip
        build = functools.partial(DeepseekSparseSWAMetadataBuilder(config, backend=sizes.backend).build, 0, step)
        moved = tokens * sizes.topk * 4
        yield Problem("window metadata", f"b{batch} + prefill {prefill}", {"cumla": ("cupy", [build])}, moved)
