"""Metadata builders: host time of a build, and the device's within a CUDA graph.

    python benchmarks/metadata.py [--json benchmarks/results/h200/metadata.json] [--profile]

`cupy-ops` is the same window metadata written operation by operation in CuPy, as vLLM writes it in torch
and two small kernels. `cpu` and `reference` are cumla's backends on host arrays; their `us` is the whole build.
"""

import cProfile
import dataclasses
import pstats
import statistics
import time
from functools import partial

import cupy
import numpy as np
from common import Report, arguments, graph_us

from cumla.metadata import DeepseekSparseSWAMetadataBuilder, DeepseekV32IndexerMetadataBuilder, ServingConfig
from cumla.metadata.batch import CommonAttentionMetadata, split_decodes_and_prefills

BLOCK_SIZE, WINDOW = 64, 128
SERVING = ServingConfig(
    window_size=WINDOW, block_size=BLOCK_SIZE, max_num_batched_tokens=16384, max_num_seqs=1024, max_model_len=16384
)
# (what, query lengths, sequence lengths, speculative tokens)
BATCHES = [
    ("256 decodes + 4 prefills of 2,048", [1] * 256 + [2048] * 4, [4000] * 256 + [8192] * 4, 0),
    ("1,024 decodes of 3 tokens", [3] * 1024, [4000] * 1024, 2),
]
IMPLS = ("cuda", "numba_cuda", "cpu")
FIELDS = ("token_to_req_indices", "is_valid_token", "decode_swa_indices", "decode_swa_lens", "prefill_gather_lens")


def batch_of(query_lens, seq_lens, xp):
    query_lens, seq_lens = np.array(query_lens, np.int32), np.array(seq_lens, np.int32)
    starts = np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32)
    tokens, columns = int(starts[-1]), -(-int(seq_lens.max()) // BLOCK_SIZE)
    table = np.random.default_rng(0).permutation(len(seq_lens) * columns).astype(np.int32).reshape(-1, columns)
    return CommonAttentionMetadata(
        query_start_loc=xp.asarray(starts), query_start_loc_cpu=starts, seq_lens=xp.asarray(seq_lens),
        seq_lens_cpu=seq_lens, num_computed_tokens_cpu=seq_lens - query_lens, num_reqs=len(seq_lens),
        num_actual_tokens=tokens, max_query_len=int(query_lens.max()), block_table_tensor=xp.asarray(table),
        slot_mapping=xp.arange(tokens, dtype=xp.int64), max_seq_len=int(seq_lens.max()),
    )  # fmt: skip


class OpByOp:
    """vLLM's window builder, its tensor operations in CuPy and its kernels as operations too."""

    def __init__(self, config):
        tokens = config.max_num_batched_tokens
        self.config = config
        self.token_to_req_indices = cupy.zeros(tokens, cupy.int32)
        self.is_valid_token = cupy.zeros(tokens, cupy.bool_)
        self.swa_indices = cupy.zeros((tokens, 1, WINDOW), cupy.int32)
        self.swa_lens = cupy.zeros(tokens, cupy.int32)
        self.pinned = np.frombuffer(cupy.cuda.alloc_pinned_memory(4 * tokens), np.int32, tokens)

    def build(self, batch):
        config = self.config
        num_decodes, num_prefills, decode_tokens, _ = split_decodes_and_prefills(batch, config.decode_threshold)
        query_lens = np.diff(batch.query_start_loc_cpu)
        requests = self.pinned[: query_lens.sum()]
        requests[:] = np.repeat(np.arange(batch.num_reqs, dtype=np.int32), query_lens)
        token_to_req_indices = self.token_to_req_indices[: len(requests)]
        token_to_req_indices.set(requests)
        is_valid_token = self.is_valid_token[: len(batch.slot_mapping)]
        cupy.greater_equal(batch.slot_mapping, 0, out=is_valid_token)
        self.swa_lens[decode_tokens:] = 0
        if decode_tokens:
            self.window(batch, token_to_req_indices[:decode_tokens], is_valid_token[:decode_tokens])
        gather_lens = None
        if num_prefills:
            starts, lens = batch.query_start_loc[num_decodes:], batch.seq_lens[num_decodes:]
            prefill_lens = starts[1:] - starts[:-1]
            gather_lens = prefill_lens + cupy.minimum(lens - prefill_lens, WINDOW - 1)
        indices, lens = self.swa_indices[:decode_tokens], self.swa_lens[:decode_tokens]
        return dict(zip(FIELDS, (token_to_req_indices, is_valid_token, indices, lens, gather_lens), strict=True))

    def window(self, batch, requests, valid):
        tokens = len(requests)
        position = batch.seq_lens[requests] - batch.query_start_loc[requests + 1] + cupy.arange(tokens)
        start = cupy.maximum(position - WINDOW + 1, 0)
        length = cupy.where(valid, position + 1 - start, 0)
        positions = start[:, None] + cupy.arange(WINDOW)
        present = cupy.arange(WINDOW) < length[:, None]
        columns = cupy.minimum(positions // BLOCK_SIZE, batch.block_table_tensor.shape[1] - 1)
        slots = batch.block_table_tensor[requests[:, None], columns] * BLOCK_SIZE + positions % BLOCK_SIZE
        self.swa_lens[:tokens] = length
        self.swa_indices[:tokens, 0] = cupy.where(present, slots, -1)


def check(fields, expected):
    """Fields are equal to those of the reference backend."""
    for name in FIELDS:
        want, got = getattr(expected, name), fields[name] if isinstance(fields, dict) else getattr(fields, name)
        if want is not None:
            np.testing.assert_array_equal(cupy.asnumpy(got), want, err_msg=name)


def check_indexer(metadata, expected):
    for part, names in (("decode", ("seq_lens", "schedule_metadata")), ("prefill", ("cu_seqlen_ks", "cu_seqlen_ke"))):
        want, got = getattr(expected, part), getattr(metadata, part)
        chunks = zip(want.chunks, got.chunks, strict=True) if part == "prefill" and want else [(want, got)]
        for its, ours in chunks:
            for name in names if its else ():
                np.testing.assert_array_equal(cupy.asnumpy(getattr(ours, name)), getattr(its, name), err_msg=name)


def profile(build, what):
    """Where the host time of a build goes."""
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(2000):
        build()
    profiler.disable()
    cupy.cuda.Device().synchronize()
    print(f"\n{what}: profile of 2,000 builds")
    pstats.Stats(profiler).strip_dirs().sort_stats("tottime").print_stats(16)


def in_turn_us(calls, rounds=25, batch=20):
    """Median host time in us of one call of each, measured in turn: a host's pace changes from second to second."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            cupy.cuda.Device().synchronize()
            start = time.perf_counter()
            for _ in range(batch):
                call()
            times[name].append((time.perf_counter() - start) * 1e6 / batch)
    return {name: statistics.median(its_times) for name, its_times in times.items()}


def measure(report, op, what, builder, config, batches, its_check, with_profile):
    """Rows of one builder and one batch; `batches` on the device and on the host."""
    on_device, on_host = batches
    expected = builder(config, backend="reference").build(0, on_host)
    calls = {}
    for impl in IMPLS:
        build = partial(builder(config, backend=impl).build, 0, on_host if impl == "cpu" else on_device)
        its_check(build(), expected)
        calls[impl] = build
    calls["cuda, unchecked"] = partial(calls["cuda"], validate=False)
    if builder is DeepseekSparseSWAMetadataBuilder:
        calls["cupy-ops"] = partial(OpByOp(config).build, on_device)
        check(calls["cupy-ops"](), expected)
    host_us = in_turn_us(calls)
    for impl, build in calls.items():
        graph = graph_us([build]) if impl in ("cuda", "numba_cuda") else None
        report.add(op, what, impl, us=host_us[impl], us_graph=graph)
    if with_profile:
        profile(calls["cuda"], f"{op}, {what}")


def main():
    parser = arguments(__doc__)
    parser.add_argument("--profile", action="store_true", help="print where the host time goes")
    args = parser.parse_args()
    report = Report(args)
    for what, query_lens, seq_lens, speculative in BATCHES:
        config = dataclasses.replace(SERVING, num_speculative_tokens=speculative)
        compressed = dataclasses.replace(config, compress_ratios=(1, 4), compressed_block_size=4 * BLOCK_SIZE)
        batches = [batch_of(query_lens, seq_lens, xp) for xp in (cupy, np)]
        for op, builder, its_config, its_check in (
            ("sparse_swa.build", DeepseekSparseSWAMetadataBuilder, config, check),
            ("indexer.build", DeepseekV32IndexerMetadataBuilder, compressed, check_indexer),
        ):
            if report.wants(op, what):
                measure(report, op, what, builder, its_config, batches, its_check, args.profile)
    report.finish()


if __name__ == "__main__":
    main()
