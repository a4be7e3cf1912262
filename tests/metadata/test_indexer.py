"""The indexer's builder against what each token may see, written out."""

import dataclasses
import gc
import weakref

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cumla.metadata import (
    DeepseekV32IndexerMetadataBuilder,
    ServingConfig,
    get_max_prefill_buffer_size,
    kv_spans_from_batches,
    split_indexer_prefill_chunks,
)
from metadata.batches import (
    BLOCK,
    THOROUGH,
    addresses_of,
    assert_equal,
    buffers_of,
    compressed_slot,
    make_batch,
    shapes,
    tokens_of,
)
from support import golden
from support.lab import Lab

SMALL_BUDGET = 4 * 24 * 60  # bytes of logits: enough for one short prefill, not for several
SMALL = ServingConfig(
    block_size=BLOCK, compressed_block_size=2 * BLOCK, max_num_batched_tokens=160, max_num_seqs=16, max_model_len=128,
    max_logits_bytes=SMALL_BUDGET, num_sms=5,
)  # fmt: skip
CONFIGS = {
    f"{name}-next_n{spec + 1}": dataclasses.replace(SMALL, compress_ratios=ratios, num_speculative_tokens=spec)
    for name, ratios in (("v32", (1,)), ("v4", (1, 4)))
    for spec in (0, 1, 3)
}
configs = pytest.mark.parametrize("config", [pytest.param(config, id=name) for name, config in CONFIGS.items()])


def page_positions(config):
    return config.compressed_block_size if config.indexer_compress_ratio > 1 else config.block_size


def split(query_lens, config):
    """Number of decodes at the front: requests of up to `next_n` tokens, all with the first one's number of tokens
    if the kernels take requests unflattened; unless all others are padding."""
    next_n = config.decode_threshold
    uniform = next_n in (1, 2)
    if not query_lens or max(query_lens) <= 1 == next_n:
        return len(query_lens)
    first = query_lens[0]
    if uniform and 0 < first <= next_n and all(q in (0, first) for q in query_lens):
        return len(query_lens)
    is_decode = [q == first <= next_n if uniform else q <= next_n for q in query_lens]
    return [*is_decode, False].index(False)


def check(lab, metadata, batch, config, seq_lens, query_lens):
    ratio, next_n = config.indexer_compress_ratio, config.decode_threshold
    decodes = split(query_lens, config)
    decode_tokens = batch.num_actual_tokens if decodes == len(seq_lens) else sum(query_lens[:decodes])
    counts = (metadata.num_decodes, metadata.num_prefills, metadata.num_decode_tokens, metadata.num_prefill_tokens)
    assert counts == (decodes, len(seq_lens) - decodes, decode_tokens, batch.num_actual_tokens - decode_tokens)
    tokens, table = tokens_of(seq_lens, query_lens), lab.get(batch.block_table_tensor)

    if ratio == 1:
        assert metadata.slot_mapping is batch.slot_mapping
    else:
        completed = [compressed_slot(table, r, p, page_positions(config) // ratio, ratio) for r, p in tokens]
        assert_equal(lab, metadata.slot_mapping, completed + [-1] * (len(batch.slot_mapping) - len(tokens)))

    assert (metadata.decode is None) == (decodes == 0)
    if decodes:
        check_decode(lab, metadata.decode, config, seq_lens[:decodes], query_lens[:decodes], decode_tokens, table)
    assert (metadata.prefill is None) == (decodes == len(seq_lens))
    if metadata.prefill:
        check_prefill(lab, metadata.prefill.chunks, config, seq_lens, query_lens, decodes, table)
    assert next_n == config.num_speculative_tokens + 1


def check_decode(lab, decode, config, seq_lens, query_lens, decode_tokens, table):
    ratio, next_n, longest = config.indexer_compress_ratio, config.decode_threshold, max(query_lens)
    native = next_n in (1, 2) and longest == next_n
    entries = [(r, 1) for r, q in enumerate(query_lens)]
    if not native and longest > 1:
        tokens = tokens_of(seq_lens, query_lens)
        padding = decode_tokens - len(tokens)
        assert_equal(lab, decode.seq_lens, [(p + 1) // ratio for _, p in tokens] + [0] * padding)
        assert_equal(lab, decode.decode_lens, [1] * decode_tokens)
        assert not decode.requires_padding
        rows = lab.get(decode.block_table)
        assert rows.shape == (decode_tokens, table.shape[1])
        for row, (r, p) in zip(rows[: len(tokens)], tokens, strict=True):
            pages = -(-(p + 1) // page_positions(config))
            np.testing.assert_array_equal(row[:pages], table[r, :pages])
        assert not rows[len(tokens) :].any()
        entries = rows
    else:
        lens = [[max(s - next_n + 1 + j, 0) // ratio for j in range(next_n)] for s in seq_lens]
        assert_equal(lab, decode.seq_lens, lens if native else [s // ratio for s in seq_lens])
        assert decode.seq_lens.ndim == (2 if native and next_n > 1 else 1)
        assert_equal(lab, decode.decode_lens, query_lens)
        assert decode.requires_padding == (min(query_lens) != longest)
        assert_equal(lab, decode.block_table, table[: len(seq_lens)])
    check_schedule(lab, decode, page_positions(config) // ratio, len(entries), config.num_sms)


def check_schedule(lab, decode, block_size, batch_size, num_sms):
    """Splits are consecutive, cover all work, and differ by one at most, the larger ones first."""
    schedule = lab.get(decode.schedule_metadata).astype(int)
    lens = lab.get(decode.seq_lens).reshape(batch_size, -1)[:, -1]
    splits = -(-lens // (4 * block_size))
    before = np.concatenate([[0], np.cumsum(splits)])
    assert schedule.shape == (num_sms + 1, 2)
    assert schedule[-1].tolist() == [batch_size, 0]
    for entry, split in schedule:
        assert split < splits[entry] if entry < batch_size else split == 0
    shares = np.diff([before[entry] + split for entry, split in schedule])
    assert shares.sum() == before[-1]
    assert sorted(shares, reverse=True) == shares.tolist()
    assert shares.max() - shares.min() <= 1


def check_prefill(lab, chunks, config, seq_lens, query_lens, decodes, table):
    ratio, starts = config.indexer_compress_ratio, np.concatenate([[0], np.cumsum(query_lens)])
    tokens = tokens_of(seq_lens, query_lens)
    covered, rows_before = [], None
    for chunk in chunks:
        owner = {t: r for t, (r, _) in enumerate(tokens)}
        first = next(r for r in range(len(seq_lens)) if (table[r] == lab.get(chunk.block_table)[0]).all())
        requests = range(first, first + chunk.num_reqs)
        assert_equal(lab, chunk.block_table, table[first : first + chunk.num_reqs])
        rows = [(r, row) for r in requests for row in range(seq_lens[r] // ratio)]
        assert chunk.total_seq_lens == len(rows) > 0
        assert_equal(lab, chunk.token_to_seq, [r - first for r, _ in rows])
        assert_equal(lab, chunk.cu_seq_lens, np.cumsum([0, *(seq_lens[r] // ratio for r in requests)]))
        assert starts[first] <= chunk.token_start < chunk.token_end <= starts[requests.stop]
        spans = zip(lab.get(chunk.cu_seqlen_ks), lab.get(chunk.cu_seqlen_ke), strict=True)
        for token, (start, end) in zip(range(chunk.token_start, chunk.token_end), spans, strict=True):
            r, p = tokens[token]
            seen = [(r, row) for row in range(seq_lens[r] // ratio) if (row + 1) * ratio <= p + 1]
            assert rows[start:end] == seen
            assert owner[token] in requests
        queries = chunk.token_end - chunk.token_start
        assert queries * len(rows) <= config.max_logits_bytes // 4 or queries == 1
        assert chunk.skip_kv_gather == (rows == rows_before)
        covered += range(chunk.token_start, chunk.token_end)
        rows_before = rows
    assert covered == sorted(set(covered))
    for token, (r, p) in enumerate(tokens):
        if r >= decodes and (p + 1) // ratio:
            assert token in covered


@configs
@THOROUGH
@given(data=st.data())
def test_every_batch(lab, config, data):
    builder = DeepseekV32IndexerMetadataBuilder(config, backend=lab.backend)
    addresses = None
    for _ in range(data.draw(st.integers(1, 3))):
        uniform = data.draw(st.booleans())
        seq_lens, query_lens = data.draw(shapes(config.decode_threshold, uniform=uniform))
        padding = data.draw(st.integers(0, 3))
        columns = -(-config.max_model_len // page_positions(config))
        batch = make_batch(
            lab, seq_lens, query_lens, block_size=page_positions(config), padding=padding, columns=columns
        )
        check(lab, builder.build(0, batch), batch, config, seq_lens, query_lens)
        addresses = addresses or addresses_of(builder)
        assert addresses_of(builder) == addresses
    fresh = DeepseekV32IndexerMetadataBuilder(config, backend=lab.backend)
    fresh.build(0, batch)
    for name, buffer in buffers_of(lab, fresh).items():
        np.testing.assert_array_equal(buffers_of(lab, builder)[name], buffer, err_msg=f"{name}: stale")


@configs
@pytest.mark.parametrize(
    ("seq_lens", "query_lens", "padding"),
    [
        pytest.param([], [], 0, id="none"),
        pytest.param([], [], 4, id="none-padded"),
        pytest.param([1], [1], 0, id="first-token"),
        pytest.param([65], [1], 0, id="prefix-hit-leaves-one-token"),
        pytest.param([0, 0, 0], [0, 0, 0], 0, id="only-padding-requests"),
        pytest.param([3, 5], [3, 5], 0, id="no-compressed-row-or-one"),
        pytest.param([12] * 16, [1] * 16, 0, id="more-entries-than-multiprocessors"),
    ],
)
def test_batch(lab, config, seq_lens, query_lens, padding):
    batch = make_batch(lab, seq_lens, query_lens, block_size=page_positions(config), padding=padding)
    metadata = DeepseekV32IndexerMetadataBuilder(config, backend=lab.backend).build(0, batch)
    check(lab, metadata, batch, config, seq_lens, query_lens)


@pytest.mark.nowhere(when=lambda x: x.simulated)  # it takes minutes
@pytest.mark.parametrize("name", ["v32-next_n1", "v32-next_n4", "v4-next_n2", "v4-next_n4"])
def test_a_million_tokens(lab, name):
    config = dataclasses.replace(
        CONFIGS[name], max_model_len=1 << 20, block_size=64, compressed_block_size=256, max_num_seqs=3,
        max_logits_bytes=1 << 22,
    )  # fmt: skip
    next_n, seq_lens = config.decode_threshold, [1 << 20, (1 << 20) - 5, 1 << 20]
    query_lens = [next_n, next_n, 6]
    batch = make_batch(lab, seq_lens, query_lens, block_size=page_positions(config))
    metadata = DeepseekV32IndexerMetadataBuilder(config, backend=lab.backend).build(0, batch)
    check_decode(
        lab, metadata.decode, config, seq_lens[:2], query_lens[:2], 2 * next_n, lab.get(batch.block_table_tensor)
    )
    rows = (1 << 20) // config.indexer_compress_ratio
    ends = [(p + 1) // config.indexer_compress_ratio for p in range((1 << 20) - 6, 1 << 20)]
    got = [end for chunk in metadata.prefill.chunks for end in lab.get(chunk.cu_seqlen_ke).tolist()]
    assert got == ends
    for chunk in metadata.prefill.chunks:
        assert chunk.total_seq_lens == len(chunk.token_to_seq) == rows
        assert not lab.get(chunk.token_to_seq).any()


@pytest.mark.nowhere(when=lambda x: x.simulated)  # it takes minutes
def test_thousands_of_requests(lab):
    config = dataclasses.replace(
        CONFIGS["v32-next_n4"], max_num_seqs=2000, max_num_batched_tokens=8000, num_sms=132, max_model_len=64
    )
    query_lens = [1 + i % 4 for i in range(2000)]
    seq_lens = [q + i % 50 for i, q in enumerate(query_lens)]
    batch = make_batch(lab, seq_lens, query_lens)
    metadata = DeepseekV32IndexerMetadataBuilder(config, backend=lab.backend).build(0, batch)
    assert_equal(lab, metadata.decode.seq_lens, [p + 1 for _, p in tokens_of(seq_lens, query_lens)])
    check_schedule(lab, metadata.decode, BLOCK, sum(query_lens), 132)


def test_padding_tokens_that_the_batch_counts_are_empty(lab):
    """A batch at a captured size: its tokens include padding, which belongs to no request."""
    config = CONFIGS["v32-next_n4"]
    batch = make_batch(lab, [9, 20, 0], [4, 4, 0], padding=4, num_actual_tokens=12)
    metadata = DeepseekV32IndexerMetadataBuilder(config, backend=lab.backend).build(0, batch)
    check(lab, metadata, batch, config, [9, 20, 0], [4, 4, 0])
    assert_equal(lab, metadata.decode.seq_lens, [6, 7, 8, 9, 17, 18, 19, 20, 0, 0, 0, 0])


@pytest.mark.parametrize("next_n", [1, 2, 3, 4, 5])
def test_uniform_decodes_of_up_to_two_tokens_are_entries_of_their_own(lab, next_n):
    """Requests with more tokens than DeepGEMM's kernels take are flattened, one entry a token."""
    config = ServingConfig(
        num_speculative_tokens=next_n - 1, block_size=BLOCK, max_num_batched_tokens=64, max_num_seqs=8,
        max_model_len=128,
    )  # fmt: skip
    metadata = DeepseekV32IndexerMetadataBuilder(config, backend=lab.backend).build(
        0, make_batch(lab, [9, 20], [next_n] * 2)
    )
    lens = [[s - next_n + 1 + j for j in range(next_n)] for s in (9, 20)]
    shape = {1: (2,), 2: (2, 2)}.get(next_n, (2 * next_n,))
    assert metadata.decode.seq_lens.shape == shape
    assert_equal(lab, metadata.decode.seq_lens, lens)
    assert_equal(lab, metadata.decode.decode_lens, [next_n] * 2 if next_n <= 2 else [1] * 2 * next_n)


def test_what_the_kernels_take_can_be_widened(lab):
    class Wide(DeepseekV32IndexerMetadataBuilder):
        natively_supported_next_n = (1, 2, 4)

    builder = Wide(CONFIGS["v32-next_n4"], backend=lab.backend)
    decode = builder.build(0, make_batch(lab, [9, 4, 0], [4, 4, 0])).decode
    assert_equal(lab, decode.seq_lens, [[6, 7, 8, 9], [1, 2, 3, 4], [0, 0, 0, 0]])
    assert decode.requires_padding
    decode = builder.build(0, make_batch(lab, [9, 4], [3, 3])).decode
    assert_equal(lab, decode.seq_lens, [7, 8, 9, 2, 3, 4])
    assert not decode.requires_padding


class Flattening(DeepseekV32IndexerMetadataBuilder):
    flattens_ragged = True


@configs
@THOROUGH
@given(data=st.data())
def test_ragged_decodes_may_all_be_flattened(lab, config, data):
    """The window's builder has the same decodes; each token, or its request's entry, has a length and pages."""
    builder, ratio, next_n = Flattening(config, lab.backend), config.indexer_compress_ratio, config.decode_threshold
    for _ in range(data.draw(st.integers(1, 3))):
        seq_lens, query_lens = data.draw(shapes(next_n, uniform=data.draw(st.booleans())))
        columns = -(-config.max_model_len // page_positions(config))
        batch = make_batch(lab, seq_lens, query_lens, block_size=page_positions(config), columns=columns)
        metadata = builder.build(0, batch)
        decodes = [*(q <= next_n for q in query_lens), False].index(False)
        assert (metadata.num_decodes, metadata.num_decode_tokens) == (decodes, sum(query_lens[:decodes]))
        if not decodes:
            continue
        decode, table = metadata.decode, lab.get(batch.block_table_tensor)
        each = decode.seq_lens.shape[1] if decode.seq_lens.ndim == 2 else 1
        tokens = tokens_of(seq_lens[:decodes], query_lens[:decodes])
        lens, rows = lab.get(decode.seq_lens).reshape(-1), lab.get(decode.block_table)
        assert lens[: len(tokens)].tolist() == [(p + 1) // ratio for _, p in tokens]
        for token, (r, p) in enumerate(tokens):
            pages = -(-(p + 1) // page_positions(config))
            np.testing.assert_array_equal(rows[token // each][:pages], table[r, :pages])
        check_schedule(lab, decode, page_positions(config) // ratio, len(rows), config.num_sms)


def test_a_table_of_its_own(lab):
    config = CONFIGS["v4-next_n1"]
    batch = make_batch(lab, [33, 40], [1, 8])
    table = np.array([[3, 1, 7], [2, 9, 5]], np.int32)
    builder = DeepseekV32IndexerMetadataBuilder(config, backend=lab.backend)
    metadata = builder.build(0, batch, block_table=lab.put(table))
    own = dataclasses.replace(batch, block_table_tensor=lab.put(table))
    check(lab, metadata, own, config, [33, 40], [1, 8])


@pytest.mark.parametrize("case", golden.metadata("prepare_decode_tensors"))
def test_golden_decode_tensors(lab, case):
    given_, want = case
    config = ServingConfig(
        num_speculative_tokens=given_["next_n"] - 1, max_model_len=64 * len(given_["block_table"][0]),
        max_num_seqs=8, max_num_batched_tokens=32,
    )  # fmt: skip
    arrays = {name: np.array(value, np.int32) for name, value in given_.items() if isinstance(value, list)}
    got = DeepseekV32IndexerMetadataBuilder(config, backend=lab.backend)._prepare_decode_tensors(
        lab.put(arrays["seq_lens"]), lab.put(arrays["block_table"]), lab.put(arrays["decode_lens"]),
        arrays["decode_lens"], lab.put(arrays["query_start_loc"]), len(arrays["seq_lens"]),
        given_["num_decode_tokens"], given_["use_native"], given_["next_n"], given_["max_decode_len"],
    )  # fmt: skip
    for name, value in zip(("seq_lens", "block_table", "decode_lens"), got[:3], strict=True):
        np.testing.assert_array_equal(lab.get(value), want[name], err_msg=name)
    assert got[3:] == (want["batch_size"], want["requires_padding"])


def test_entries_have_tokens():
    builder = DeepseekV32IndexerMetadataBuilder(CONFIGS["v32-next_n1"])
    two, table = np.ones(2, np.int32), np.zeros((2, 1), np.int32)
    for next_n, longest, message in ((0, 1, "next_n: got 0, expected at least 1"), (1, -1, "max_decode_len: got -1")):
        with pytest.raises(ValueError, match=message):
            builder._prepare_decode_tensors(
                two, table, two, two, np.arange(2, dtype=np.int32), 2, 2, True, next_n, longest
            )


@pytest.mark.parametrize("case", golden.metadata("build_one_prefill_chunk"))
def test_golden_prefill_chunk(lab, case):
    given_, want = case
    requests, queries = slice(*given_["req_slice"]), slice(*given_["query_slice"])
    chunk = DeepseekV32IndexerMetadataBuilder(ServingConfig(), backend=lab.backend).build_one_prefill_chunk(
        requests, queries, np.array(given_["query_start_loc"], np.int32), np.array(given_["seq_lens"], np.int32),
        lab.put(np.array(given_["block_table"], np.int32)), skip_kv_gather=want["skip_kv_gather"],
    )  # fmt: skip
    for name, value in want.items():
        got = getattr(chunk, name)
        np.testing.assert_array_equal(lab.get(got) if isinstance(value, list) else got, value, err_msg=name)


@pytest.mark.parametrize("case", golden.metadata("split_indexer_prefill_chunks"))
def test_golden_split(case):
    given_, want = case
    chunks = split_indexer_prefill_chunks(
        np.array(given_["seq_lens"]), np.array(given_["query_lens"]), given_["workspace_size"],
        given_["max_logits_bytes"], given_["request_offset"],
    )  # fmt: skip
    assert [[r.start, r.stop, q.start, q.stop] for r, q in chunks] == want["chunks"]


@given(
    requests=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 40)), max_size=12),
    workspace=st.integers(1, 90),
    logits=st.integers(1, 400),
    offset=st.integers(0, 3),
)
def test_split_is_greedy_and_within_budget(requests, workspace, logits, offset):
    query_lens, seq_lens = [q for q, _ in requests], [q + context for q, context in requests]
    chunks = split_indexer_prefill_chunks(
        np.array(seq_lens, np.int32), np.array(query_lens, np.int32), workspace, 4 * logits + 3, offset
    )
    seen = []
    for r, q in chunks:
        group = range(r.start - offset, r.stop - offset)
        queries, rows = sum(query_lens[i] for i in group), sum(seq_lens[i] for i in group)
        assert 0 <= q.start < q.stop <= queries
        fits = rows <= workspace and queries * rows <= logits
        assert fits or len(group) == 1
        assert (q.stop - q.start) * rows <= logits or q.stop - q.start == 1
        if fits and group.stop < len(requests):
            more_rows = rows + seq_lens[group.stop]
            assert more_rows > workspace or (queries + query_lens[group.stop]) * more_rows > logits
        seen += [(i, t) for i in group for t in range(query_lens[i])][q]
    assert seen == [(i, t) for i, q in enumerate(query_lens) for t in range(q)]


def test_split_of_an_empty_request_is_empty():
    assert split_indexer_prefill_chunks(np.array([0]), np.array([0]), 10, 40) == []


@pytest.mark.parametrize("case", golden.metadata("kv_spans_from_batches"))
def test_golden_kv_spans(case):
    given_, want = case
    start, end = kv_spans_from_batches(np.array(given_["start_seq_loc"]), np.array(given_["seq_len_per_batch"]))
    assert start.dtype == end.dtype == np.int32
    np.testing.assert_array_equal(start, want["start"])
    np.testing.assert_array_equal(end, want["end"])


def test_kv_spans():
    start, end = kv_spans_from_batches(np.array([0, 2, 4, 7]), np.array([5, 9, 4]))
    assert start.tolist() == [0, 0, 5, 5, 14, 14, 14]
    assert end.tolist() == [4, 5, 13, 14, 16, 17, 18]
    assert [len(a) for a in kv_spans_from_batches(np.array([0, 0]), np.array([3]))] == [0, 0]
    assert [a.tolist() for a in kv_spans_from_batches(np.array([0, 1, 2]), np.array([9, 2**31 - 10]))] == [
        [0, 9],
        [9, 2**31 - 1],
    ]
    with pytest.raises(ValueError, match=r"got shapes \(2,\) and \(2,\), expected \[R \+ 1\] and \[R\]"):
        kv_spans_from_batches(np.array([0, 1]), np.array([3, 4]))


@pytest.mark.gpu
def test_kv_spans_on_a_device():
    import cupy

    start, end = kv_spans_from_batches(np.array([0, 2, 4, 7]), np.array([5, 9, 4]), device=0)
    assert isinstance(start, cupy.ndarray)
    assert end.get().tolist() == [4, 5, 13, 14, 16, 17, 18]


def test_every_query_a_chunk_of_its_own(lab):
    """The largest number of chunks of a step, and views of a buffer that grows between steps."""
    config = dataclasses.replace(CONFIGS["v32-next_n1"], max_num_seqs=4, max_num_batched_tokens=12, max_logits_bytes=4)
    builder = DeepseekV32IndexerMetadataBuilder(config, backend=lab.backend)
    for seq_lens in ([3, 4, 3, 2], [60, 70, 80, 90], [3, 4, 3, 2]):
        query_lens = [3, 4, 3, 2]
        batch = make_batch(lab, seq_lens, query_lens)
        metadata = builder.build(0, batch)
        check(lab, metadata, batch, config, seq_lens, query_lens)
        assert len(metadata.prefill.chunks) == 12


def test_a_launch_for_decodes_and_prefills(emulated):
    """There is one chunk, and none before an error."""
    from cumla.kernels.cuda.launch import recorded_launches

    lab = Lab("cuda", True, emulated=True)
    config = dataclasses.replace(CONFIGS["v4-next_n1"], max_model_len=60)
    builder = DeepseekV32IndexerMetadataBuilder(config)
    with recorded_launches() as launches:
        for seq_lens, query_lens in (([9, 30, 50], [1, 3, 7]), ([9, 30], [1, 1]), ([9, 30], [3, 3])):
            launches.clear()
            batch = make_batch(lab, seq_lens, query_lens)
            check(lab, builder.build(0, batch), batch, config, seq_lens, query_lens)
            assert len(launches) == 1
        builder._chunks.workspace_rows = 10
        launches.clear()
        with pytest.raises(ValueError, match="requests 1 to 1 have 12 rows, expected at most the 10"):
            builder.build(0, make_batch(lab, [9, 50], [1, 7]))
        assert not launches


def test_rows_that_were_outgrown_are_let_go_of():
    lab = Lab("reference", False)
    config = dataclasses.replace(CONFIGS["v32-next_n1"], max_num_batched_tokens=12)
    builder = DeepseekV32IndexerMetadataBuilder(config, backend="reference")
    metadata = builder.build(0, make_batch(lab, [6, 4], [6, 4]))
    outgrown = weakref.ref(metadata.prefill.chunks[0].token_to_seq.base)
    del metadata
    assert outgrown() is not None
    builder.build(0, make_batch(lab, [90, 40], [6, 4]))
    gc.collect()
    assert outgrown() is None


def test_prefill_workspace():
    config = dataclasses.replace(CONFIGS["v32-next_n1"], max_model_len=10)
    assert get_max_prefill_buffer_size(config) == 400
    builder = DeepseekV32IndexerMetadataBuilder(config, backend="reference")
    assert builder.max_prefill_buffer_size == 400
    starts, lens = np.array([0, 2, 4], np.int32), np.array([300, 101], np.int32)
    with pytest.raises(ValueError, match="requests 0 to 1 have 401 rows, expected at most the 400 of the workspace"):
        builder.build_one_prefill_chunk(slice(0, 2), slice(0, 4), starts, lens, np.zeros((2, 1), np.int32))
    v4 = DeepseekV32IndexerMetadataBuilder(CONFIGS["v4-next_n1"], backend="reference")
    none = v4.build_one_prefill_chunk(slice(0, 1), slice(0, 2), starts, np.array([3, 8]), np.zeros((2, 1), np.int32))
    assert none is None
