"""`python -m benchmarks.trace`: steps of a trace, the peers' chains on cumla's inputs, and the table."""

import json
import pathlib
import subprocess
import sys
import trace as command
import types
from dataclasses import replace

import numpy as np
import pytest
import trace_rows as trace
import trace_table
from trace_layers import Place, Shape
from trace_steps import repeated, steps_of

from cumla.errors import InputError
from cumla.replay.trace import TraceRequest
from support import peers as stand_ins

ROOT = pathlib.Path(__file__).parents[2]
REQUESTS = [
    TraceRequest(0.0, 700, 40, (1, 2)), TraceRequest(1.0, 90, 300, (3,)), TraceRequest(2.0, 1100, 30, (1, 2, 4)),
    TraceRequest(3.0, 300, 500, (5,)),
]  # fmt: skip


@pytest.fixture(autouse=True)
def quickly(monkeypatch):
    monkeypatch.setattr("trace_rows.call_times", lambda calls, seconds: [(call(), 3.0)[1] for call in calls] * 5)
    monkeypatch.setattr("trace.limit_blas_threads", lambda: None)


def blocks_of(step):
    return [block for scheduled in step for block in scheduled.sequence.blocks]


def test_decodes_are_at_positions_of_outputs():
    steps = steps_of("decode6", REQUESTS)
    (step,) = steps.steps
    assert len(step) == 6
    assert {s.sequence.request.input_length for s in step} == {700, 90, 1100, 300}
    for s in step:
        assert s.count == 1
        assert s.sequence.request.input_length <= s.start < s.sequence.request.total_length
        assert len(s.sequence.blocks) * 256 >= s.end
    assert sorted(blocks_of(step)) == list(range(steps.blocks))
    assert [s.start for s in steps_of("decode6", REQUESTS, seed=1).steps[0]] != [s.start for s in step]


def test_drafts_end_at_the_same_positions():
    one, four = (steps_of(name, REQUESTS).steps[0] for name in ("decode6", "mtp4x6"))
    assert [s.end for s in four] == [s.end for s in one]
    assert {s.count for s in four} == {4}


def test_mixed_steps_are_under_load():
    steps = steps_of("mixed3x128", REQUESTS)
    assert len(steps.steps) == 10
    for step in steps.steps:
        counts = [s.count for s in step]
        assert counts == sorted(counts, key=lambda count: count > 1)
        assert counts[-1] > 1
        assert sum(counts) <= 128
        assert set(blocks_of(step)) <= set(range(steps.blocks))
    assert sum(step[0].count == 1 for step in steps.steps) > 5


def test_repeated_requests_share_no_prefix_with_those_before():
    again = list(repeated(REQUESTS, 3))
    assert len(again) == 12
    assert {request.timestamp for request in again} == {0.0}
    seen = [{hash_id for request in again[i : i + 4] for hash_id in request.hash_ids} for i in (0, 4, 8)]
    assert not (seen[0] & seen[1] | seen[1] & seen[2] | seen[0] & seen[2])


@pytest.mark.parametrize("name", ["decode", "decode0", "mixed4", "prefill8", "mtp2x", "mixed0x8"])
def test_steps_that_mean_nothing(name):
    with pytest.raises(InputError, match="--steps: got"):
        steps_of(name, REQUESTS)


@pytest.mark.parametrize("kind", ["window", "c4a", "c128a", "v32"])
@pytest.mark.parametrize(("heads", "name"), [(64, "decode6"), (16, "mixed3x128"), (8, "mtp2x6"), (8, "mtp4x6")])
@pytest.mark.thorough(when=lambda x: x.get("heads") == 8)
def test_peers_compute_what_cumla_does(kind, heads, name, monkeypatch):
    """Each call of a peer gets arguments with which it computes the same as cumla; otherwise it is not timed."""
    pytest.importorskip("torch")
    stand_ins.install(monkeypatch)
    monkeypatch.setattr(trace.Place, "of", lambda backend: Place(backend, "torch"))
    monkeypatch.setattr(Shape, "of", lambda kind, heads: Shape(kind, heads, 128))
    monkeypatch.setattr(trace, "steps_of", lambda *given: first(2, steps_of(*given)))
    rows = list(trace.measured(trace.TraceOptions("cpu", (kind,), (heads,), (name,), layers=2), REQUESTS))
    assert [row for row in rows if row.get("error")] == []
    parts = {"insert", "attention"} | ({"select"} if kind in ("c4a", "v32") else set())
    for part in parts:
        both = [row for row in rows if row["op"] == f"trace {part}"]
        assert {row["impl"] for row in both} == {"cumla", "peers"}
        for row in both:
            assert row["checked"]
            assert row["config"].startswith(f"{kind} h{heads} {name}")
            assert row["config"].endswith(", lengths")
            assert row["limit_us"] > 0
            assert (row["impl"] == "peers") == ("functions" in row)
    assert all(line.ratio == 1 and not line.lacking for line in trace_table.lines(rows))


def test_the_table_says_what_is_left_without_plans():
    times = {"cumla": (2.0, 8.0, 0.0), "peers": (3.0, 17.0, 8.0)}
    rows = [
        {"op": f"trace {part}", "config": "window h64 decode8, lengths", "impl": impl, "us": None, "us_graph": us}
        for impl, of_parts in times.items() for part, us in zip(("insert", "attention", "plan"), of_parts, strict=True)
    ]  # fmt: skip
    (line,) = trace_table.lines(rows)
    assert (line.ratio, line.unplanned) == (2.0, 1.9)
    assert "without plans 1.900" in trace_table.table(rows)[1]
    (line,) = trace_table.lines(row for row in rows if row["op"] != "trace plan")
    assert line.unplanned is None


def first(count, steps):
    return replace(steps, steps=steps.steps[:count])


def test_neighbours_select_alike(monkeypatch):
    monkeypatch.setattr(Shape, "of", lambda kind, heads: Shape(kind, heads, 64))
    monkeypatch.setattr(trace, "steps_of", lambda *given: first(3, steps_of(*given)))
    rows = trace.measured(trace.TraceOptions("cpu", ("c4a",), (2,), ("mixed3x256",), layers=1), REQUESTS)
    overlaps = [row["overlap"] for row in rows if row["op"] == "trace select" and row["overlap"] is not None]
    assert 0.85 < np.mean(overlaps) < 0.97


def test_rows_of_v32_are_compared_by_value(monkeypatch):
    """vLLM 0.26 does not round its scales to powers of two."""
    torch = pytest.importorskip("torch")
    stand_ins.install(monkeypatch)
    monkeypatch.setattr(trace.Place, "of", lambda backend: Place(backend, "torch"))
    right = trace.V32Peers.insert
    options = trace.TraceOptions("cpu", ("v32",), (8,), ("decode4",), layers=1)

    def errors(change):
        def insert(self):
            right(self)
            rows, slots = self.ours.caches.window[0].view(-1, 656), self.ours.batch.slot_mapping
            rows[slots] = change(rows[slots])

        monkeypatch.setattr(trace.V32Peers, "insert", insert)
        return {row.get("error") for row in trace.measured(options, REQUESTS) if row["op"] == "trace insert"}

    def rescaled(rows):
        """The same values under other scales, rounded again."""
        values, scales = rows[:, :512].view(torch.float8_e4m3fn).float(), rows[:, 512:528].contiguous()
        again = (values.reshape(-1, 4, 128) / 1.5).reshape(-1, 512).to(torch.float8_e4m3fn)
        scales = (scales.view(torch.float32) * 1.5).view(torch.uint8)
        return torch.cat([again.view(torch.uint8), scales, rows[:, 528:]], 1)

    assert errors(rescaled) == {None}
    (found,) = errors(lambda rows: torch.cat([rows[:, :3] ^ 128, rows[:, 3:]], 1))  # signs
    assert found.startswith("off by")


@pytest.mark.parametrize(
    ("part", "break_it"),
    [
        ("insert", lambda out: out.view(-1)[:1]), ("attention", lambda out: out[:, :1]),
        ("select", lambda out: out[:, :9]),
    ],
)  # fmt: skip
def test_peers_that_compute_otherwise_are_said_so(part, break_it, monkeypatch):
    pytest.importorskip("torch")
    stand_ins.install(monkeypatch)
    monkeypatch.setattr(trace.Place, "of", lambda backend: Place(backend, "torch"))
    monkeypatch.setattr(Shape, "of", lambda kind, heads: Shape(kind, heads, 64))
    name = {"attention": "attend"}.get(part, part)
    right = getattr(trace.PeerStep, name)

    def wrong(self, *given):
        right(self, *given)
        out = {"insert": self.inserted, "attention": self.out, "select": getattr(self, "selected", None)}[part]
        break_it(out)[...] = 40

    monkeypatch.setattr(trace.PeerStep, name, wrong)
    rows = list(trace.measured(trace.TraceOptions("cpu", ("c4a",), (8,), ("decode6",), layers=1), REQUESTS))
    failed = [row for row in rows if row.get("error")]
    assert {row["op"] for row in failed} == {f"trace {part}"}
    assert not any(row["checked"] for row in failed)


def test_what_fails_leaves_a_row_and_the_others_go_on(monkeypatch):
    pytest.importorskip("torch")
    stand_ins.install(monkeypatch)
    monkeypatch.setattr(trace.Place, "of", lambda backend: Place(backend, "torch"))

    def refuse(*args, **options):
        raise RuntimeError("no such kernel\nand more")

    monkeypatch.setattr(stand_ins.FlashMLA, "flash_mla_with_kvcache", refuse)
    rows = list(trace.measured(trace.TraceOptions("cpu", ("window",), (8,), ("decode4",), layers=1), REQUESTS))
    (failed,) = [row for row in rows if row.get("error")]
    assert (failed["op"], failed["impl"], failed["error"]) == (
        "trace attention", "peers", "RuntimeError: no such kernel"
    )  # fmt: skip
    ours = [row for row in rows if row["op"] == "trace attention" and row["impl"] == "cumla"]
    assert ours[0]["us"] == 3.0
    (line,) = trace_table.lines(rows)
    assert line.lacking
    assert "1.000*" in trace_table.table(rows)[1]


def test_the_command_on_a_cpu(tmp_path, capsys):
    path = tmp_path / "trace.json"
    options = ["--backend", "cpu", "--steps", "decode4,mtp2x2", "--heads", "2,4", "--layers", "1", "--json", str(path)]
    assert command.main(options) == 0
    done = json.loads(path.read_text())
    assert {row["config"] for row in done["rows"]} == {
        f"{kind} h{heads} {steps}, lengths"
        for kind in ("window", "c4a", "c128a", "v32") for heads in (2, 4) for steps in ("decode4", "mtp2x2")
    }  # fmt: skip
    assert {row["op"] for row in done["rows"]} == {
        f"trace {part}" for part in ("metadata", "insert", "select", "attention")
    }
    assert len(done["table"]) == 16
    assert "c4a h2 mtp2x2 (1)" in capsys.readouterr().out


def test_kinds_that_are_none():
    with pytest.raises(InputError, match="--kinds: got 'mla'"):
        command.main(["--backend", "cpu", "--kinds", "mla"])


@pytest.mark.parametrize("start", [["-m", "benchmarks.trace"], ["benchmarks/trace.py"]], ids=["module", "script"])
def test_it_starts_as_a_module_and_as_a_script(start):
    done = subprocess.run([sys.executable, *start, "--help"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "mixedRxT" in done.stdout


class Captured(trace.StepRows):
    """Decodes run in a graph, which refuses allocations; the rest runs eagerly. Nothing is timed."""

    def _times(self, impls, part=""):
        import cupy

        for call in impls.values():
            call()
            if self.steps.mixed or part == "metadata":
                continue
            stream = cupy.cuda.Stream(non_blocking=True)
            with stream:
                stream.begin_capture()
                call()
                call()
                graph = stream.end_capture()
            graph.launch(cupy.cuda.get_current_stream())
        return {name: [3.0] * 5 for name in impls}


@pytest.mark.parametrize("kind", ["window", "c4a", "c128a", "v32"])
@pytest.mark.slow
def test_steps_on_an_emulated_device(kind, here, monkeypatch):
    """All arrays are CuPy's, and all calls can be captured."""
    import cupy

    def normal(self, seed, *shape):
        return cupy.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32))

    def of_numpy(function):
        return lambda x, **options: cupy.asarray(function(x.get(), **options))

    for name in ("cos", "sin", "abs", "sort"):  # functions that the fake CuPy lacks
        monkeypatch.setattr(cupy, name, of_numpy(getattr(np, name)), raising=False)
    pool = types.SimpleNamespace(free_all_blocks=lambda: None)
    monkeypatch.setattr(cupy, "get_default_memory_pool", lambda: pool, raising=False)
    monkeypatch.setattr(Place, "normal", normal)
    monkeypatch.setattr(trace.Place, "of", lambda backend: Place(backend, "cupy"))
    monkeypatch.setattr(Shape, "of", lambda kind, heads: Shape(kind, heads, 64))
    monkeypatch.setattr(trace, "StepRows", Captured)
    monkeypatch.setattr(trace, "PLANNED_LAYERS", 4)  # the two layers run twice
    monkeypatch.setattr(trace, "whole_us", lambda call: 8.0)
    monkeypatch.setattr(trace, "steps_of", lambda *given: first(1, steps_of(*given)))
    options = trace.TraceOptions("cuda", (kind,), (8,), ("decode2", "mixed2x64"), layers=2)
    rows = list(trace.measured(options, [replace(request, output_length=20) for request in REQUESTS[:2]]))
    assert [row for row in rows if row.get("error")] == []
    attention = [row for row in rows if row["op"] == "trace attention"]
    assert [(row["us_graph"], row["us"]) for row in attention] == [(0.75, 2.0)] * 2
    assert [row["us_graph"] for row in rows if row["op"] == "trace plan"] == [0.0]
