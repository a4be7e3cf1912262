"""The paged caches' kernels: insert, gather, page copies, in turn with vLLM's own, in CUDA graphs.

    python benchmarks/cache.py [--json benchmarks/results/h200/cache.json]

vLLM's Triton kernels (`vllm`) and its C++ operators (`vllm-c`) take part where they can be imported. `copy` is an
elementwise kernel that moves as many bytes: what cumla's could at best reach.
"""

from functools import partial

import cupy
import ml_dtypes
import numpy as np
from common import (
    Report,
    arguments,
    as_torch,
    copy_calls,
    copy_gbps,
    has_peer,
    measure,
    random_bits,
    sets_for,
    vllm_ops,
)

import cumla

BF16 = np.dtype(ml_dtypes.bfloat16)
BLOCK_SIZE = 64
SAMPLE = 100  # rows that are compared with the reference backend
LARGE = 4_096  # tokens from which on a copy of the same size is measured too
BACKENDS = ("cuda", "numba_cuda")

rng = np.random.default_rng(0)


def random_rows(*shape, seed=0):
    """bfloat16 values of both signs and 16 magnitudes."""
    bits = random_bits(-(-int(np.prod(shape)) // 2), seed).view(cupy.uint16)[: np.prod(shape)]
    bits = (bits & cupy.uint16(0x807F)) | (
        ((bits >> cupy.uint16(7)) & cupy.uint16(15)) + cupy.uint16(112)
    ) << cupy.uint16(7)
    return bits.view(BF16).reshape(shape)


def slots_for(tokens, blocks):
    """int64 [tokens] slots of a decode batch, each in a page anywhere, or (LARGE) of prefills, which fill pages."""
    if tokens < LARGE:
        return cupy.asarray(rng.permutation(blocks * BLOCK_SIZE)[:tokens])
    pages = rng.permutation(blocks)[:, None] * BLOCK_SIZE
    return cupy.asarray((pages + np.arange(BLOCK_SIZE)).reshape(-1)[:tokens])


def some(count):
    return np.sort(rng.choice(count, min(count, SAMPLE), replace=False))


def token_bytes(layout, pages, slots):
    """Rows and scales of slots of a cache on the host, side by side."""
    page, row = np.divmod(slots, BLOCK_SIZE)
    scales = layout.scale_start(BLOCK_SIZE) + row * layout.scale_stride
    pages = pages.reshape(len(pages), -1)
    rows = pages[page[:, None], (row * layout.row_bytes)[:, None] + np.arange(layout.row_bytes)]
    return np.concatenate([rows, pages[page[:, None], scales[:, None] + np.arange(layout.scale_bytes)]], axis=1)


def peer(name, calls):
    return {name: ("torch", calls)} if calls else {}


def copies(nbytes, tokens, sets):
    return {"copy": ("cupy", copy_calls(nbytes // 2, sets))} if tokens >= LARGE else {}


def insert(report, tokens, layout=cumla.DSV4_FP8, op="quantize_and_insert_k_cache", c_op=None):
    config = f"{layout.name} T={tokens}"
    if not report.wants(op, config):
        return
    bytes_moved = tokens * (2 * layout.head_dim + layout.token_bytes + 8)
    count = sets_for(bytes_moved)
    blocks = -(-tokens // BLOCK_SIZE) + 8
    k = [random_rows(tokens, layout.head_dim, seed=i) for i in range(count)]
    caches = [layout.allocate(blocks, BLOCK_SIZE, cupy) for _ in range(count)]
    slots = [slots_for(tokens, blocks) for _ in range(count)]

    which = some(tokens)
    want = layout.allocate(-(-len(which) // BLOCK_SIZE), BLOCK_SIZE)
    cumla.quantize_and_insert_k_cache(
        k[0].get()[which], want, np.arange(len(which)), BLOCK_SIZE, layout=layout, backend="reference"
    )
    want = token_bytes(layout, want, np.arange(len(which)))

    def check(_):
        np.testing.assert_array_equal(token_bytes(layout, caches[0].get(), slots[0].get()[which]), want)
        return 0.0

    def call(i, backend):
        return lambda: cumla.quantize_and_insert_k_cache(
            k[i], caches[i], slots[i], BLOCK_SIZE, layout=layout, backend=backend
        )

    impls = {f"cumla-{backend}": ("cupy", [call(i, backend) for i in range(count)]) for backend in BACKENDS}
    if layout is cumla.DSV4_FP8 and has_peer("vllm"):
        from vllm.models.deepseek_v4.common.ops import cache_utils

        impls |= peer("vllm", [
            partial(cache_utils.quantize_and_insert_k_cache, *as_torch(*x), BLOCK_SIZE)
            for x in zip(k, caches, slots, strict=True)
        ])  # fmt: skip
    if c_op:
        impls |= peer("vllm-c", [
            partial(c_op, *as_torch(*x), 128, "ue8m0") for x in zip(k, caches, slots, strict=True)
        ])  # fmt: skip
    impls |= copies(bytes_moved, tokens, count)
    measure(report, op, config, impls, bytes_moved, check, lambda: caches[0].fill(0xA5))


def gather(report, requests, length):
    op, config = "dequantize_and_gather_k_cache", f"{requests} x {length:,}"
    if not report.wants(op, config):
        return
    layout = cumla.DSV4_FP8
    bytes_moved = requests * length * (2 * layout.head_dim + layout.token_bytes)
    count = sets_for(bytes_moved)
    columns = -(-length // BLOCK_SIZE)
    caches, tables = [], []
    for _ in range(count):
        cache = layout.allocate(requests * columns, BLOCK_SIZE, cupy)
        slots = cupy.arange(requests * columns * BLOCK_SIZE)
        cumla.quantize_and_insert_k_cache(random_rows(len(slots), layout.head_dim), cache, slots)
        caches.append(cache)
        tables.append(cupy.asarray(rng.permutation(requests * columns).reshape(requests, -1).astype(np.int32)))
    outs = [cupy.empty((requests, length, layout.head_dim), BF16) for _ in range(count)]
    lens = cupy.full(requests, length, cupy.int32)

    tail = min(16, length)
    want = np.zeros((requests, tail, layout.head_dim), BF16)
    cumla.dequantize_and_gather_k_cache(
        want, caches[0].get(), lens.get(), np.full(requests, tail, np.int32), tables[0].get(), BLOCK_SIZE, 0,
        backend="reference",
    )  # fmt: skip
    results = []

    def check(_):
        np.testing.assert_array_equal(outs[0][:, -tail:].get(), want)
        results.append(outs[0].copy())
        assert (results[0].view(cupy.uint16) == results[-1].view(cupy.uint16)).all()
        del results[1:]
        return 0.0

    def call(i, backend):
        return lambda: cumla.dequantize_and_gather_k_cache(
            outs[i], caches[i], lens, None, tables[i], BLOCK_SIZE, 0, backend=backend
        )

    impls = {f"cumla-{backend}": ("cupy", [call(i, backend) for i in range(count)]) for backend in BACKENDS}
    if has_peer("vllm"):
        from vllm.models.deepseek_v4.common.ops import cache_utils

        impls |= peer("vllm", [
            partial(
                cache_utils.dequantize_and_gather_k_cache, *as_torch(out, cache, lens, None, table), BLOCK_SIZE, 0
            )
            for out, cache, table in zip(outs, caches, tables, strict=True)
        ])  # fmt: skip
    impls |= copies(bytes_moved, requests * length, count)
    measure(report, op, config, impls, bytes_moved, check, lambda: outs[0].fill(7))


def concat(report, tokens, c_op):
    op, config = "concat_and_cache_mla", f"bfloat16 T={tokens}"
    if not report.wants(op, config):
        return
    layout = cumla.MLA_BF16
    bytes_moved = tokens * (2 * layout.row_bytes + 8)
    count = sets_for(bytes_moved)
    blocks = -(-tokens // BLOCK_SIZE) + 8
    kv_c = [random_rows(tokens, 512, seed=i) for i in range(count)]
    k_pe = [random_rows(tokens, 64, seed=-1 - i) for i in range(count)]
    caches = [cupy.zeros((blocks, BLOCK_SIZE, 576), BF16) for _ in range(count)]
    slots = [slots_for(tokens, blocks) for _ in range(count)]

    def check(_):
        got = caches[0].reshape(-1, 576)[slots[0]].view(cupy.uint16)
        assert (got == cupy.concatenate([kv_c[0], k_pe[0]], axis=1).view(cupy.uint16)).all()
        return 0.0

    def call(i, backend):
        return lambda: cumla.concat_and_cache_mla(kv_c[i], k_pe[i], caches[i], slots[i], backend=backend)

    impls = {f"cumla-{backend}": ("cupy", [call(i, backend) for i in range(count)]) for backend in BACKENDS}
    if c_op:
        one = as_torch(cupy.ones(1, cupy.float32))[0]
        impls |= peer("vllm-c", [
            partial(c_op, *as_torch(*x), "auto", one) for x in zip(kv_c, k_pe, caches, slots, strict=True)
        ])  # fmt: skip
    impls |= copies(bytes_moved, tokens, count)
    measure(report, op, config, impls, bytes_moved, check, lambda: caches[0].fill(7))


def gather_cache(report, requests, length):
    op, config = "gather_cache", f"bfloat16 {requests} x {length:,}"
    if not report.wants(op, config):
        return
    columns = -(-length // BLOCK_SIZE)
    bytes_moved = 2 * requests * length * cumla.MLA_BF16.row_bytes
    count = sets_for(bytes_moved)
    caches = [random_rows(requests * columns, BLOCK_SIZE, 576, seed=i) for i in range(count)]
    tables = [cupy.asarray(rng.permutation(requests * columns).reshape(requests, -1).astype(np.int32))] * count
    outs = [cupy.empty((requests * length, 576), BF16) for _ in range(count)]
    starts = cupy.arange(requests + 1, dtype=cupy.int32) * length

    def check(_):
        want = caches[0][tables[0]].reshape(requests, -1, 576)[:, :length].reshape(-1, 576)
        assert (outs[0].view(cupy.uint16) == want.view(cupy.uint16)).all()
        return 0.0

    def call(i, backend):
        return lambda: cumla.gather_cache(caches[i], outs[i], tables[i], starts, requests, backend=backend)

    impls = {f"cumla-{backend}": ("cupy", [call(i, backend) for i in range(count)]) for backend in BACKENDS}
    impls |= copies(bytes_moved, requests * length, count)
    measure(report, op, config, impls, bytes_moved, check, lambda: outs[0].fill(7))


def indexer_gather(report, requests, length):
    op, config = "cp_gather_indexer_k_quant_cache", f"{requests} x {length:,}"
    if not report.wants(op, config):
        return
    layout = cumla.INDEXER_FP8
    columns = -(-length // BLOCK_SIZE)
    bytes_moved = 2 * requests * length * layout.token_bytes
    count = sets_for(bytes_moved)
    caches = []
    for _ in range(count):
        caches.append(layout.allocate(requests * columns, BLOCK_SIZE, cupy))
        slots = cupy.arange(requests * columns * BLOCK_SIZE)
        cumla.indexer_k_quant_and_cache(random_rows(len(slots), 128), caches[-1], slots)
    table = cupy.asarray(rng.permutation(requests * columns).reshape(requests, -1).astype(np.int32))
    keys = [cupy.empty((requests * length, 128), cupy.uint8) for _ in range(count)]
    scales = [cupy.empty(requests * length, cupy.float32) for _ in range(count)]
    starts = cupy.arange(requests + 1, dtype=cupy.int32) * length

    which = some(requests * length)
    pages, rows = table.get()[which // length, which % length // BLOCK_SIZE], which % length % BLOCK_SIZE
    want = token_bytes(layout, caches[0].get(), pages * BLOCK_SIZE + rows)

    def check(_):
        got = np.concatenate([keys[0].get()[which], scales[0].get()[which, None].view(np.uint8)], axis=1)
        np.testing.assert_array_equal(got, want)
        return 0.0

    def call(i, backend):
        return lambda: cumla.cp_gather_indexer_k_quant_cache(
            caches[i], keys[i], scales[i], table, starts, backend=backend
        )

    impls = {f"cumla-{backend}": ("cupy", [call(i, backend) for i in range(count)]) for backend in BACKENDS}
    impls |= copies(bytes_moved, requests * length, count)
    measure(report, op, config, impls, bytes_moved, check, lambda: keys[0].fill(7))


def copy_blocks(report, pages):
    op, config = "copy_blocks", f"{pages} pages of DSV4_FP8"
    if not report.wants(op, config):
        return
    page_bytes = BLOCK_SIZE * cumla.DSV4_FP8.token_bytes
    bytes_moved = 2 * pages * page_bytes
    count = sets_for(bytes_moved)
    pools = [random_bits(pages * page_bytes // 2, i).view(cupy.uint8).reshape(2 * pages, -1) for i in range(count)]
    pairs = cupy.asarray(rng.permutation(2 * pages).reshape(-1, 2))

    def check(_):
        assert (pools[0][pairs[:, 1]] == pools[0][pairs[:, 0]]).all()
        return 0.0

    def call(i, backend):
        return lambda: cumla.copy_blocks([pools[i]], pairs, backend=backend)

    impls = {f"cumla-{backend}": ("cupy", [call(i, backend) for i in range(count)]) for backend in BACKENDS}
    impls |= copies(bytes_moved, LARGE, count)
    measure(report, op, config, impls, bytes_moved, check)


def advance(report, sequences):
    op, config = "advance_step", f"{sequences} sequences"
    if not report.wants(op, config):
        return
    columns = 512
    tokens, positions, slots = (cupy.zeros(sequences, cupy.int64) for _ in range(3))
    sampled = cupy.arange(sequences)[:, None]
    lens = cupy.asarray(rng.integers(1, 8_192, sequences).astype(np.int32))
    tables = cupy.asarray(rng.integers(0, 10_000, (sequences, columns)).astype(np.int32))
    before = lens.copy()

    def check(_):
        assert (positions == before).all()
        assert (tokens == sampled[:, 0]).all()
        blocks = tables[cupy.arange(sequences), before // BLOCK_SIZE].astype(cupy.int64)
        assert (slots == blocks * BLOCK_SIZE + before % BLOCK_SIZE).all()
        return 0.0

    def call(backend):
        return lambda: cumla.advance_step(
            sequences, sequences, BLOCK_SIZE, tokens, sampled, positions, lens, slots, tables, backend=backend
        )

    def clear():
        lens[:] = before

    impls = {f"cumla-{backend}": ("cupy", [call(backend)]) for backend in BACKENDS}
    measure(report, op, config, impls, sequences * 52, check, clear)


def main():
    args = arguments(__doc__).parse_args()
    report = Report(args)
    gbps = copy_gbps()
    print(f"copy: {gbps:.0f} GB/s")
    operators = vllm_ops() and vllm_ops()._C_cache_ops
    for tokens in (1, 32, 512, 4_096, 32_768):
        insert(report, tokens)
    insert(report, 32_768, cumla.V32_FP8)
    for shape in ((1, 512), (4, 8_192), (16, 8_192), (4, 65_536)):
        gather(report, *shape)
    for tokens in (512, 4_096, 32_768):
        concat(report, tokens, operators and operators.concat_and_cache_mla)
    gather_cache(report, 4, 8_192)
    for tokens in (512, 32_768):
        insert(
            report, tokens, cumla.INDEXER_FP8, "indexer_k_quant_and_cache",
            operators and operators.indexer_k_quant_and_cache,
        )  # fmt: skip
    indexer_gather(report, 4, 8_192)
    copy_blocks(report, 512)
    for sequences in (128, 1_024):
        advance(report, sequences)
    report.finish(copy_gbps=gbps)


if __name__ == "__main__":
    main()
