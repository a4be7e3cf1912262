"""Small runs of the whole loop: shared rows, waiting, compressed rows, and errors that verification must find."""

from dataclasses import replace

import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided

import cumla.layers.sparse
from cumla.layout import DSV4_FP8
from cumla.replay.activations import apply_rope
from cumla.replay.engine import Engine
from cumla.replay.options import ReplayOptions
from cumla.replay.trace import TraceRequest
from cumla.replay.verify import Sample, cached_rows, cosine_distance, directions_of, measured
from support.lab import BF16, to_float

OPTIONS = ReplayOptions(
    backend="cpu", layers=("swa", "c4a", "c128a"), heads=2, window=16, topk=8, batch_tokens=300, cache_tokens=4096,
    max_len=None, seed=1,
)  # fmt: skip
REQUESTS = [
    TraceRequest(0.0, 600, 3, (0, 1)),
    TraceRequest(0.0, 40, 6, (2,)),
    TraceRequest(5000.0, 690, 4, (0, 3)),
]


def run(options=OPTIONS, requests=REQUESTS, verify=True):
    engine = Engine(options, requests, verify)
    return engine, list(engine.steps())


@pytest.fixture(scope="module")
def finished():
    """The engine and the steps of a complete run."""
    return run()


def samples_of(records):
    return [sample for record in records for sample in record.samples]


def sequence(engine, index):
    return next(s for s in engine.scheduler.finished if s.index == index)


def test_shared_prefix_skips_work_and_gives_the_same_rows(finished):
    shared, records = finished
    alone, alone_records = run(requests=[replace(REQUESTS[2])], verify=False)
    assert sequence(shared, 2).shared == 512
    tokens = sum(record.prefill_tokens + record.decode_tokens for record in records)
    assert tokens == sum(request.total_length for request in REQUESTS) - 512
    assert sum(record.prefill_tokens for record in alone_records) == 690
    # Output tokens belong to a request, the prompt to its hash ids.
    for layer, other in zip(shared.layers, alone.layers, strict=True):
        for name, rows_per_block, rows in (("swa_cache", 256, 690), ("compressed_cache", 256 // layer.ratio, 0)):
            cache = getattr(layer, name)
            if cache is not None:
                positions = np.arange(rows or 690 // layer.ratio)
                np.testing.assert_array_equal(
                    cached_rows(cache, sequence(shared, 2).slots(positions, rows_per_block), np),
                    cached_rows(getattr(other, name), sequence(alone, 0).slots(positions, rows_per_block), np),
                )


def test_samples_are_within_bounds(finished):
    _, records = finished
    samples = samples_of(records)
    assert [sample.failure for sample in samples if sample.failure] == []
    for record in records:
        assert {sample.layer for sample in record.samples} == set(OPTIONS.layers)
        assert len(record.samples) == 3 * ((record.prefill_tokens > 0) + (record.decode_tokens > 0))
    assert 0 < np.mean([sample.fp8_rms for sample in samples]) < 0.06


def test_runs_repeat(finished):
    _, again = run()
    assert [record.samples for record in finished[1]] == [record.samples for record in again]


def test_waiting_changes_no_row():
    tight = replace(OPTIONS, cache_tokens=768)
    engine, records = run(tight)
    assert sorted(s.index for s in engine.scheduler.finished) == [0, 1, 2]
    assert any(record.waiting for record in records)
    assert max(record.blocks_held for record in records) <= 3
    assert [sample.failure for sample in samples_of(records) if sample.failure] == []


def test_compressed_rows_are_means(finished):
    engine, _ = finished
    done = sequence(engine, 1)  # 40 tokens of prompt, then single tokens: groups that span steps
    layer = engine.layers[1]
    rows = to_float(layer.activations.k_rows(done.token_keys)).astype(np.float64)[:44].reshape(11, 4, 512).mean(axis=1)
    want = apply_rope(rows.astype(np.float32), np.arange(11) * 4, np)
    got = cached_rows(layer.compressed_cache, done.slots(np.arange(11), 64), np)
    np.testing.assert_allclose(got, to_float(want), rtol=0.07, atol=2e-3)
    keys = np.zeros((1, 16, 128), np.float32)
    cumla.dequantize_and_gather_k_cache(
        keys,
        layer.indexer.cache,
        np.array([11], np.int32),
        None,
        (done.slots(np.arange(11), 64)[None, :1] // 64).astype(np.int32),
        64,
        0,
        layout=cumla.INDEXER_FP8,
    )
    np.testing.assert_allclose(keys[0, :11], rows[:, :128], rtol=0.07, atol=2e-3)


@pytest.mark.parametrize("op", ["sparse_mla_decode", "sparse_mla_prefill"])
def test_wrong_output_is_found(monkeypatch, op):
    original = getattr(cumla.layers.sparse, op)

    def off_by_a_little(*args, out, **kwargs):
        original(*args, out=out, **kwargs)
        array = out[0] if isinstance(out, tuple) else out
        array[:] = (to_float(array) + 0.05).astype(BF16)

    monkeypatch.setattr(cumla.layers.sparse, op, off_by_a_little)
    failures = [sample.failure for sample in samples_of(run()[1]) if sample.failure]
    assert failures
    kind = op.rpartition("_")[2]
    assert all(f"({kind}): error" in failure for failure in failures)
    assert "request" in failures[0]


def test_wrong_window_is_found(monkeypatch):
    """Metadata without the oldest row: the reference takes its positions from the scheduler."""
    from cumla.metadata import DeepseekSparseSWAMetadataBuilder

    build = DeepseekSparseSWAMetadataBuilder.build

    def shortened(self, *args, **kwargs):
        metadata = build(self, *args, **kwargs)
        metadata.decode_swa_indices[..., 0] = -1
        return metadata

    monkeypatch.setattr(DeepseekSparseSWAMetadataBuilder, "build", shortened)
    assert any(sample.failure and sample.kind == "decode" for sample in samples_of(run()[1]))


def test_corrupted_cache_is_found():
    """Kernels agree with the reference over a wrong byte; the rows before quantisation do not."""
    engine = Engine(OPTIONS, REQUESTS)
    failures = []
    for record in engine.steps():
        failures += [sample.failure for sample in record.samples if sample.failure]
        for layer in engine.layers:
            # The scales, UE8M0, are at the end of a page of 64 tokens.
            blocks, block_size, token_bytes = layer.swa_cache.shape
            pages = as_strided(layer.swa_cache, (blocks, block_size * token_bytes), (layer.swa_cache.strides[0], 1))
            pages[:, block_size * DSV4_FP8.row_bytes :] = 124
    assert failures
    assert all("through FP8" in failure for failure in failures)


def test_nan_is_beyond_every_bound():
    sample = Sample(0, "swa", 0, 0, "decode", float("nan"), float("nan"), 8, 1.0, 2.0, 0.0, 0.0)
    assert sample.failure is not None
    assert replace(sample, max_error=0.0, bound_share=0.0).failure is None


def test_cosine_distance():
    x = np.array([1.0, 2.0])
    assert cosine_distance(x, x) == 0
    assert cosine_distance(x, -x) == 2
    assert cosine_distance(np.zeros(2), np.zeros(2)) == 0


def test_layers_take_turns_where_steps_are_faster_than_checks(monkeypatch):
    monkeypatch.setattr("cumla.replay.verify.takes_device_arrays", lambda backend: True)
    _, records = run()
    assert len(records) > len(OPTIONS.layers)
    for record in records:
        checked = {sample.layer for sample in record.samples}
        assert checked == {OPTIONS.layers[record.step % len(OPTIONS.layers)]}


def measured_samples(errors, heads):
    """Samples whose out is `exact` plus an orthogonal part of the given size."""
    rng = np.random.default_rng(0)
    for error in errors:
        exact, other = rng.standard_normal((2, heads, 128))
        other -= exact * (exact * other).sum() / (exact * exact).sum()
        got = exact + error * other
        yield measured(0, "mla", 0, 0, "decode", got, exact, None)


def test_the_direction_of_several_heads_is_a_tokens_own():
    assert [x.failure is None for x in directions_of(measured_samples([1e-3, 4e-3, 1e-3], heads=2))] == [
        True,
        False,
        True,
    ]


def test_the_direction_of_a_single_head_is_that_of_many_tokens():
    """A single token may be rotated by more, but not all tokens."""
    alone, few = [4e-3] + [1e-3] * 70, [4e-3] * 3
    assert [(len(x.samples), x.failure) for x in directions_of(measured_samples(alone, heads=1))] == [
        (32, None),
        (39, None),
    ]
    rotated = directions_of(measured_samples([4e-3] * 32 + [1e-3] * 32, heads=1))
    assert [x.failure is None for x in rotated] == [False, True]
    assert "and 31 more, layer mla (decode): cosine distance is" in rotated[0].failure
    assert [x.failure for x in directions_of(measured_samples(few, heads=1))] == [None]  # too few to decide
