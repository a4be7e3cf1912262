"""Prefixes in host memory: what a hit needs of every page group leaves and comes back, and the run is undisturbed."""

import json
from dataclasses import replace

import numpy as np
import pytest

from cumla.__main__ import main
from cumla.arrays.memory import to_host
from cumla.models import DeepseekV4Config, LayerCaches, serving_of
from cumla.pages import describe
from cumla.replay.engine import Engine
from cumla.replay.groups import LayerGroups, groups_of, hits_by_group
from cumla.replay.offload import Offload
from cumla.replay.options import ReplayOptions, parse_layers
from cumla.replay.trace import TraceRequest
from cumla.timing import Stopwatch

OPTIONS = ReplayOptions(
    backend="cpu", layers=parse_layers("swa,c4a,c128a,mla,v4,v32,v41,glm53"), heads=2, window=128, topk=8,
    batch_tokens=700, cache_tokens=4096, max_len=None, seed=1,
)  # fmt: skip
TIGHT = replace(OPTIONS, cache_tokens=1280, host_pages=64)
# Two blocks of a prefix stay idle after the first request. The second needs them, and the third asks for the prefix.
REQUESTS = [
    TraceRequest(0.0, 600, 2, (0, 1)),
    TraceRequest(50_000.0, 1100, 2, (2, 3, 4)),
    TraceRequest(90_000.0, 690, 3, (0, 5)),
]
SPARSE = {"window": (127, 2), "compressed": (512, 2)}  # tokens and pages that a hit of 512 tokens needs
NEEDED = {
    "sparse": SPARSE, "mla": {"rows": (512, 8)}, "v4": {**SPARSE, "states4": (4, 1), "states128": (0, 0)},
    "v32": {"rows": (512, 8)}, "v41": {**SPARSE, "rings": (0, 0)}, "glm53": {"rows": (512, 8), "rings": (0, 0)},
}  # fmt: skip


def outputs_of(options, requests=REQUESTS, prepare=lambda engine: None):
    """The engine, its records, and the bytes of each layer's outputs in each step of the last request."""
    engine, found = Engine(options, requests), []
    prepare(engine)
    for layer in engine.layers:

        def step(batch, *rest, layer=layer, original=layer.step):
            out = original(batch, *rest)
            if batch.scheduled[0].sequence.index == len(requests) - 1:
                found.append((layer.name, to_host(out).tobytes()))
            return out

        layer.step = step
    return engine, list(engine.steps()), found


def poison(engine):
    """Blocks that were freed have bytes that are NaN in every format."""
    store = engine.offload.store

    def stored(prefixes, pinned):
        store(prefixes, pinned)
        for _, blocks in prefixes:
            for side in engine.offload.sides:
                for pool in side.device.pools:
                    per_block = 256 // (pool.group.tokens or 256)
                    if pool.group.tokens:
                        for block in blocks:
                            pool.array[block * per_block : (block + 1) * per_block] = 255

    engine.offload.store = stored


@pytest.fixture(scope="module")
def undisturbed():
    return outputs_of(OPTIONS)


def test_a_prefix_that_was_swapped_out_gives_the_outputs_of_the_undisturbed_run(undisturbed):
    engine, records, outputs = outputs_of(TIGHT, prepare=poison)
    counts = engine.offload.counts
    assert engine.scheduler.finished[2].shared == 512
    assert counts["prefixes_out"] >= 1
    assert (counts["prefixes_in"], counts["compared"], counts["dropped"]) == (1, 1, 0)
    assert engine.offload.failures == []
    assert [s.failure for record in records for s in record.samples if s.failure] == []
    assert outputs == undisturbed[2]
    assert max(record.prefixes_on_host for record in records) == 1
    assert any(("step", "swap in") in record.seconds for record in records)


def test_prefixes_move_on_every_backend(lab, rng):
    """Two prefixes leave at once and come back into other blocks: window rows, compressed rows and states."""
    config = DeepseekV4Config(256, 2, 128, 2, 64, compress_ratios=(1, 4))
    counts = {"window": 32, "compressed": 8, "states4": 512}
    serving = serving_of(config, block_size=64, compressed_block_size=256)
    caches = [LayerCaches.allocate(spec, serving, counts, xp=lab.xp) for spec in config.specs()]
    description = describe(config)
    offload = Offload(
        [LayerGroups("v4", description, caches)], 4, Stopwatch(np), lab.backend, pinned=lab.on_device
    )  # fmt: skip
    (side,) = offload.sides
    for pool in side.device.pools:
        pool.array[:] = lab.put(rng.integers(0, 256, pool.array.shape, np.uint8))
    before = [lab.get(pool.array).copy() for pool in side.device.pools]
    prefixes = [(0, 7), (1, 9)]
    offload.store(list(zip(prefixes, [(0, 1), (2, 3)], strict=True)))
    assert all(prefix in offload for prefix in prefixes)
    for pool in side.device.pools:
        pool.array[: len(pool.array) // 2] = 0
    offload.restore(list(zip(prefixes, [(4, 6), (7, 5)], strict=True)))
    assert offload.failures == []
    assert len(offload) == 0
    assert all(side.free.left(group.name) == 4 for group in description)
    moved = {"window": {6: 26, 7: 27, 14: 22, 15: 23}, "compressed": {0: 4, 1: 6, 2: 7, 3: 5}}
    moved["states4"] = {127: 64 * 6 + 63, 255: 64 * 5 + 63}
    for pool, its in zip(side.device.pools, before, strict=True):
        now = lab.get(pool.array)
        for old, new in moved[pool.group.name].items():
            np.testing.assert_array_equal(now[new], its[old])


@pytest.mark.gpu
def test_swaps_on_the_device():
    device = {"backend": "cuda", "tiny": True}
    _, _, want = outputs_of(replace(OPTIONS, **device))
    engine, _, outputs = outputs_of(replace(TIGHT, **device))
    assert engine.offload.counts["prefixes_in"] == 1
    assert engine.offload.failures == []
    assert outputs == want


def test_hits_need_the_newest_rows_of_each_group(undisturbed):
    engine, records, _ = undisturbed
    rows = hits_by_group(groups_of(engine.layers, OPTIONS), [s.shared for s in engine.scheduler.finished])
    found = {}
    for row in rows:
        assert row["bytes"] == row["pages"] * row["page_bytes"]
        assert row["hits"] == 1
        found.setdefault(row["layers"], {})[row["group"]] = row["positions"], row["pages"]
    assert found == NEEDED
    assert (records[-1].admitted_tokens, records[-1].hit_tokens) == (600 + 1100 + 690, 512)


def test_without_host_pages_the_prefix_is_computed_again():
    engine, records, _ = outputs_of(replace(TIGHT, host_pages=0, layers=("swa",)))
    assert engine.scheduler.finished[2].shared == 0
    assert records[-1].hit_tokens == 0


@pytest.mark.parametrize(("layers", "pages", "dropped"), [(("swa",), 2, 1), (("mla",), 7, 3)])
def test_a_full_host_pool_drops_what_was_stored_first(layers, pages, dropped):
    """swa needs two pages of a prefix, mla eight. The requests use the prefixes 0; 2; 3, 4; and then 3 again."""
    requests = [
        TraceRequest(0.0, 600, 2, (0, 1)),
        TraceRequest(50_000.0, 520, 2, (2, 9)),
        TraceRequest(90_000.0, 1020, 2, (3, 4)),
        TraceRequest(130_000.0, 600, 2, (2, 5)),
    ]
    options = replace(TIGHT, layers=layers, cache_tokens=1024, host_pages=pages)
    engine, records, _ = outputs_of(options, requests)
    hit = 512 if layers == ("swa",) else 0
    assert engine.scheduler.finished[3].shared == hit
    assert engine.offload.counts["dropped"] >= dropped
    assert engine.offload.failures == []
    assert [s.failure for record in records for s in record.samples if s.failure] == []


def test_a_changed_byte_in_host_memory_is_a_failure():
    def damage(engine):
        restore = engine.offload.restore

        def damaged(prefixes):
            if prefixes:
                for side in engine.offload.sides:
                    side.host.pools[-1].array[:, 5] ^= 1
            restore(prefixes)

        engine.offload.restore = damaged

    engine, _, _ = outputs_of(replace(TIGHT, layers=("c4a",)), prepare=damage)
    assert engine.offload.failures == ["positions 0 to 511 of hash id 0 came back changed"]


TRACE = "\n".join(
    json.dumps(
        {"timestamp": r.timestamp, "input_length": r.input_length, "output_length": r.output_length, "hash_ids": ids}
    )
    for r in REQUESTS
    for ids in [list(r.hash_ids)]
)
COMMAND = ["--layers", "c4a", "--heads", "2", "--max-len", "1200", "--cache-tokens", "1280", "--backend", "cpu"]


def test_the_report_of_a_run_with_host_pages(tmp_path, capsys, monkeypatch):
    (tmp_path / "trace.jsonl").write_text(TRACE)
    command = ["replay", str(tmp_path / "trace.jsonl"), *COMMAND, "--host-pages", "8", "--json", str(tmp_path / "x")]
    assert main(command) == 0
    out = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "swapped in 1 times 512 tokens: 4 pages" in out
    assert "sparse compressed 256 512 2 0." in out
    assert "Prefixes that came back from host memory unchanged: 1 of 1." in out
    prefix = json.loads((tmp_path / "x").read_text())["prefix"]
    assert prefix["host"]["bytes_in"] == sum(row["bytes"] for row in prefix["groups"])
    monkeypatch.setattr("cumla.replay.offload.Offload._checksum", lambda self, *_: np.random.default_rng().random())
    assert main(command) == 1
    assert "hash id 0 came back changed" in capsys.readouterr().out


def test_ranks_have_no_host_pages(capsys):
    assert main(["replay", *COMMAND, "--host-pages", "8", "--ranks", "2"]) == 2
    assert "--host-pages: got 8 with --ranks, expected one device" in capsys.readouterr().err
