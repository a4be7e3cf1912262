"""A replay on several ranks: the results of one device, a shard of the rows on each, and its errors."""

import functools
from dataclasses import replace

import numpy as np
import pytest

from cumla.parallel import RankError
from cumla.replay.engine import Engine
from cumla.replay.options import ReplayOptions, parse_layers
from cumla.replay.ranks import run_on_ranks, sharding_of
from cumla.replay.summary import ATTENTION_OPS, summarize, summarize_ranks
from cumla.replay.trace import TraceRequest
from support.lab import to_float

OPTIONS = ReplayOptions(
    backend="cpu", layers=("swa", "c4a", "c128a"), heads=2, window=16, topk=8, batch_tokens=300, cache_tokens=4096,
    max_len=None, seed=1,
)  # fmt: skip
REQUESTS = [
    TraceRequest(0.0, 600, 2, (0, 1)),
    TraceRequest(0.0, 40, 3, (2,)),
    TraceRequest(5000.0, 690, 2, (0, 3)),  # shares a prefix
]


def engine_steps(options, comm=None, verify=True, requests=REQUESTS):
    """An engine, its steps, and every output of every layer."""
    engine, outs = Engine(options, requests, verify, comm), []

    def kept(step, *arguments):
        out = step(*arguments)
        outs.append(to_float(out).copy())
        return out

    for layer in engine.layers:
        layer.step = functools.partial(kept, layer.step)
    return engine, list(engine.steps()), outs


@pytest.mark.parametrize("size", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (3, 4, 8))])
def test_results_are_those_of_one_device(size):
    options = replace(OPTIONS, ranks=size)
    runs = run_on_ranks(options, lambda comm: engine_steps(options, comm))
    _, _, want = engine_steps(OPTIONS, verify=False)
    for _, _, outs in runs:
        assert len(outs) == len(want)
        for got, one in zip(outs, want, strict=True):
            np.testing.assert_allclose(got, one, atol=2e-2, rtol=2 * 2.01 / 128)
    engine, records, _ = runs[0]
    for _, others, _ in runs[1:]:  # ranks alternate in checking
        for record, other in zip(records, others, strict=True):
            record.samples.extend(other.samples)
    verification = summarize(engine, records, 1.0)["verification"]
    assert verification["failures"] == []
    assert verification["samples"] > len(want)
    ranks = summarize_ranks([run[:2] for run in runs])
    for rank in ranks:
        assert rank["sent_bytes"] > 0
        assert rank["seconds"]["exchange"] > 0
        assert rank["bytes_on_one"] - rank["cache_bytes"] == rank["compressed_bytes_on_one"] - rank["compressed_bytes"]
        if 64 % size == 0:
            assert rank["compressed_bytes"] < 0.75 * rank["compressed_bytes_on_one"]


@pytest.mark.parametrize("cache", ["bf16", "fp8"])
def test_dense_layers(cache):
    options = replace(OPTIONS, ranks=2, layers=("mla",), mla_cache=cache)
    samples = 0
    for engine, records in run_on_ranks(options, lambda comm: dense_steps(options, comm)):
        summary = summarize(engine, records, 1.0)
        assert summary["verification"]["failures"] == []
        samples += summary["verification"]["samples"]
        (rank,) = summarize_ranks([(engine, records)])
        assert 2 * rank["cache_bytes"] == rank["bytes_on_one"]
        assert rank["sent_bytes"] > 0
    assert samples > len(records)


@pytest.mark.parametrize(("layer", "size"), [("swa", 1), ("mla", 1), ("mla", 2), ("v32", 1)])
def test_time_is_that_of_the_tokens_it_was_spent_on(layer, size):
    """Without decodes no time is attributed to decodes, by either way to attribute tokens; and no time is lost."""
    options = replace(OPTIONS, ranks=size, layers=(layer,))
    requests = [TraceRequest(0.0, 70, 1, (0,)), TraceRequest(5000.0, 30, 9, (1,))]
    runs = [steps_of(options, requests[:1]), steps_of(options, requests)]
    alone, both = (summarize(engine, records, 1.0) for engine, records in runs)
    assert alone["totals"]["decode"]["seconds"] == 0 < alone["totals"]["prefill"]["seconds"]
    for summary, tokens in ((alone, (70, 0)), (both, (100, 8))):
        totals = [summary["totals"][kind] for kind in ("prefill", "decode")]
        assert tuple(total["tokens"] for total in totals) == tokens
        spent = sum(op["seconds"] for op in summary["ops"] if op["op"] in (*ATTENTION_OPS, "metadata"))
        assert sum(total["seconds"] for total in totals) == pytest.approx(spent)


def steps_of(options, requests):
    """The engine and the steps of the first rank."""

    def on(comm=None):
        engine = Engine(options, requests, False, comm)
        return engine, list(engine.steps())

    return on() if options.ranks == 1 else run_on_ranks(options, on)[0]


def dense_steps(options, comm):
    engine = Engine(options, REQUESTS, True, comm)
    return engine, list(engine.steps())


@pytest.mark.parametrize("rows", [64, 2])
@pytest.mark.parametrize("size", range(1, 9))
def test_rows_stay_in_the_pages_of_their_block(rows, size):
    """Otherwise requests that share a prefix's blocks would write into one another's rows."""
    found = set()
    for rank in range(size):
        sharding = sharding_of(rows, rank, size)
        held = [
            row for row in range(rows * size * 3)
            if row // sharding.shard.interleave % size == rank
        ]  # fmt: skip
        first, step = sharding.table
        for local, row in enumerate(held):
            assert first + local // sharding.rows * step == row // rows
        found.update(held)
    assert found == set(range(rows * size * 3))


def test_a_rank_that_fails_is_named():
    def on(comm):
        for record in Engine(replace(OPTIONS, ranks=2), REQUESTS, False, comm).steps():
            if comm.rank == 1 and record.step == 1:
                raise ValueError("out of luck")

    with pytest.raises(RankError, match="rank 1 failed: ValueError: out of luck"):
        run_on_ranks(replace(OPTIONS, ranks=2), on)


def test_a_row_on_the_wrong_rank_is_found():
    """Verification detects the missing row in the merged result."""

    def on(comm):
        engine = Engine(replace(OPTIONS, ranks=2), REQUESTS, True, comm)
        records = []
        for record in engine.steps():
            records.append(record)
            if comm.rank == 1:
                engine.layers[1].compressed_cache[...] = 0
        return [sample for record in records for sample in record.samples]

    failures = [sample.failure for samples in run_on_ranks(replace(OPTIONS, ranks=2), on) for sample in samples]
    assert any(failure is not None and "c4a" in failure for failure in failures)


@pytest.mark.parametrize("size", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (3, 4, 8))])
@pytest.mark.parametrize("models", ["v4,v32", "v41", "glm52,glm53,hy4", "mistral4"])
def test_layers_of_models(models, size):
    """Outputs equal one device's, and are equal on all ranks."""
    options = replace(OPTIONS, layers=parse_layers(models))
    requests = [TraceRequest(0.0, 270, 2, (0, 1)), TraceRequest(0.0, 40, 3, (2,))]
    _, _, want = engine_steps(options, None, False, requests)
    runs = run_on_ranks(replace(options, ranks=size), lambda comm: engine_steps(options, comm, False, requests))
    for _, _, outs in runs:
        assert len(outs) == len(want) > 8
        for got, one in zip(outs, want, strict=True):
            np.testing.assert_allclose(got, one, atol=2e-2 * np.abs(one).max(), rtol=2e-2)
    for engine, records, _ in runs:
        (rank,) = summarize_ranks([(engine, records)])
        assert rank["sent_bytes"] > 0
        assert rank["bytes_on_one"] - rank["cache_bytes"] == rank["compressed_bytes_on_one"] - rank["compressed_bytes"]
        if 64 % size == 0:
            assert rank["compressed_bytes"] < 0.75 * rank["compressed_bytes_on_one"]
