"""Computes the numbers of a run for the tables and the JSON file."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence, Set
from dataclasses import asdict
from typing import Any

import numpy as np

from .engine import Engine, StepRecord
from .groups import groups_of, hits_by_group
from .verify import FP4_MEAN_BOUND, FP8_MEAN_BOUND, Direction, Sample, directions_of

PREFILL_OPS, DECODE_OPS = ("gather", "project", "prefill", "context"), ("absorb", "decode")
SHARED_OPS = ("projections", "insert", "compress", "select", "map", "exchange", "merge", "output")
PERCENTILES = (50, 90, 99)
ATTENTION_OPS = (*SHARED_OPS, *DECODE_OPS, *PREFILL_OPS)


def summarize(engine: Engine, records: Sequence[StepRecord], wall_seconds: float) -> dict[str, Any]:
    """Totals of a run and its series by step: plain dicts, lists, numbers and strings."""
    sequences = engine.scheduler.finished
    in_use = np.array([record.blocks_held for record in records])
    blocks = engine.pool.num_blocks
    prompt_tokens = sum(sequence.request.input_length for sequence in sequences)
    shared_tokens = sum(sequence.shared for sequence in sequences)
    samples = [sample for record in records for sample in record.samples]
    return {
        "totals": {
            "wall_seconds": wall_seconds,
            "steps": len(records),
            "requests": len(sequences),
            "requests_that_waited": sum(sequence.waited for sequence in sequences),
            **_throughput(records, wall_seconds, {layer.name for layer in engine.layers if layer.attends_alike}),
        },
        "latency": _latency(engine, records),
        "ops": _by_op(records),
        "cache": {
            "blocks": blocks,
            "bytes": sum(layer.cache_bytes for layer in engine.layers),
            "held_peak": float(in_use.max() / blocks),
            "held_mean": float(in_use.mean() / blocks),
            "idle_peak": max(record.blocks_idle for record in records) / blocks,
        },
        "prefix": {
            "prompt_tokens": prompt_tokens,
            "shared_tokens": shared_tokens,
            "shared_share": shared_tokens / prompt_tokens,
            "requests_with_hits": sum(sequence.shared > 0 for sequence in sequences),
            **_groups(engine),
        },
        "verification": _verification(samples, [] if engine.offload is None else engine.offload.failures),
        "steps": [_step(record) for record in records],
    }


def summarize_ranks(runs: Sequence[tuple[Engine, Sequence[StepRecord]]]) -> list[dict[str, Any]]:
    """Memory, times and traffic of each rank."""
    ranks = []
    for rank, (engine, records) in enumerate(runs):
        layers = engine.layers
        names = {layer.name for layer in layers}
        sent = [record.bytes.get((name, "exchange"), 0) for record in records for name in names]
        ranks.append(
            {
                "rank": rank,
                "cache_bytes": sum(layer.cache_bytes for layer in layers),
                "bytes_on_one": sum(layer.unsharded_cache_bytes for layer in layers),
                "compressed_bytes": sum(layer.compressed_bytes for layer in layers),
                "compressed_bytes_on_one": sum(layer.unsharded_compressed_bytes for layer in layers),
                "sent_bytes": sum(sent),
                "seconds": {op: sum(op_seconds(record, (op,)) for record in records) for op in ATTENTION_OPS},
            }
        )
    return ranks


def _groups(engine: Engine) -> dict[str, Any]:
    """Hits by page group, and what went to host memory and back: of one device, as a rank has parts of the groups."""
    if engine.options.ranks > 1:
        return {}
    hits = [sequence.shared for sequence in engine.scheduler.finished]
    found: dict[str, Any] = {"groups": hits_by_group(groups_of(engine.layers, engine.options), hits)}
    if engine.offload is not None:
        found["host"] = {"bytes": engine.offload.num_bytes, **engine.offload.counts}
    return found


def op_seconds(record: StepRecord, ops: Iterable[str]) -> float:
    """Seconds of a step in these ops, all layers together."""
    return sum(seconds for (_, op), seconds in record.seconds.items() if op in ops)


def _throughput(records: Sequence[StepRecord], wall_seconds: float, alike: Set[str]) -> dict[str, Any]:
    """Tokens a second. Insert, map, metadata and all ops of layers `alike` serve both kinds: split by tokens."""
    result = {}
    for kind, own_ops in (("prefill", PREFILL_OPS), ("decode", DECODE_OPS)):
        tokens, seconds = 0, 0.0
        for record in records:
            mine = record.prefill_tokens if kind == "prefill" else record.decode_tokens
            share = mine / (record.prefill_tokens + record.decode_tokens)
            tokens += mine
            for (layer, op), time in record.seconds.items():
                if op in SHARED_OPS or op == "metadata" or (layer in alike and op in ATTENTION_OPS):
                    seconds += share * time
                elif op in own_ops:
                    seconds += time
        result[kind] = {
            "tokens": tokens,
            "seconds": seconds,
            "tokens_per_second": tokens / seconds if tokens else 0.0,
            "tokens_per_wall_second": tokens / wall_seconds,
        }
    return result


def _latency(engine: Engine, records: Sequence[StepRecord]) -> dict[str, dict[str, float]]:
    """Milliseconds of a step's attention, and of all steps from a request's arrival to its first output.

    Requests arrive by the simulated clock; only the time of attention and metadata counts.
    """
    steps = np.array([op_seconds(record, (*ATTENTION_OPS, "metadata")) for record in records]) * 1e3
    until = np.concatenate([[0], np.cumsum(steps)])
    outputs = [until[s.output_step + 1] - until[s.arrival_step] for s in engine.scheduler.finished]
    return {
        what: {f"p{p}": float(np.percentile(times, p)) for p in PERCENTILES} | {"max": float(np.max(times))}
        for what, times in (("step_ms", steps), ("first_output_ms", outputs))
    }


def _by_op(records: Sequence[StepRecord]) -> list[dict[str, Any]]:
    seconds: dict[tuple[str, str], float] = defaultdict(float)
    moved: dict[tuple[str, str], int] = defaultdict(int)
    for record in records:
        for key, value in record.seconds.items():
            seconds[key] += value
        for key, count in record.bytes.items():
            moved[key] += count
    return [
        {
            "layer": layer,
            "op": op,
            "seconds": seconds[layer, op],
            "bytes": moved.get((layer, op)),
            "gbps": moved[layer, op] / seconds[layer, op] / 1e9 if (layer, op) in moved else None,
        }
        for layer, op in seconds
    ]


def _verification(samples: Sequence[Sample], changed: Sequence[str]) -> dict[str, Any]:
    """Worst and mean errors of the samples. NaN stays NaN, as in np.max. changed: failures of swaps."""
    failures = [*changed, *(failure for sample in samples if (failure := sample.failure) is not None)]
    by_layer: dict[str, list[Sample]] = defaultdict(list)
    by_kind: dict[str, list[Sample]] = defaultdict(list)
    directions: dict[str, list[Direction]] = defaultdict(list)
    for sample in samples:
        by_kind[sample.kind].append(sample)
        if sample.fp8_rms is not None:
            by_layer[sample.layer].append(sample)
    for direction in directions_of(samples):
        directions[direction.kind].append(direction)
        if direction.failure is not None:
            failures.append(direction.failure)
    fp8 = {
        layer: {
            "samples": len(group),
            "fp4": group[0].fp4,
            "rms_worst": float(np.max([sample.fp8_rms for sample in group])),
            "rms_mean": float(np.mean([sample.fp8_rms for sample in group])),
            "cosine_worst": float(np.max([sample.fp8_cosine for sample in group])),
            "cosine_mean": float(np.mean([sample.fp8_cosine for sample in group])),
        }
        for layer, group in by_layer.items()
    }
    for layer, numbers in fp8.items():
        through, bound = ("FP4", FP4_MEAN_BOUND) if numbers["fp4"] else ("FP8", FP8_MEAN_BOUND)
        if not numbers["rms_mean"] <= bound:
            failures.append(
                f"layer {layer}: mean relative rms error through {through} is {numbers['rms_mean']:.3g}, "
                f"expected at most {bound:.3g}"
            )
    return {
        "samples": len(samples),
        "failures": failures,
        "exactness": {
            kind: {
                "samples": len(group),
                "error_worst": float(np.max([sample.max_error for sample in group])),
                "bound_share_worst": float(np.max([sample.bound_share for sample in group])),
                "cosine_worst": float(np.max([direction.cosine for direction in directions[kind]])),
                "cosine_bound": directions[kind][0].bound,
            }
            for kind, group in sorted(by_kind.items())
        },
        "fp8": fp8,
    }


def _step(record: StepRecord) -> dict[str, Any]:
    plain = asdict(record)
    for key in ("seconds", "bytes"):
        plain[key] = {f"{layer}/{op}": x for (layer, op), x in plain[key].items()}
    return plain
