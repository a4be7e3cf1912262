"""The steps of benchmarks/residency.py: as many rows miss as they say, also when the steps are repeated."""

import types

import numpy as np
import pytest
import residency


@pytest.mark.parametrize("new", [0, 2, 8])
def test_new_rows_miss_in_every_replay(new):
    steps = residency.Steps(np, requests=2, topk=8, hot=20, new=new, steps=30)
    caches = residency.Caches(np, steps, residency.FORMATS["V4"], pinned=False)
    for replay in range(2):
        for i in range(30):
            slots, misses = steps.resolve(i, "cpu")
            caches.fetch(steps, "cpu")
            residency.check(steps, caches)
            assert (slots >= 0).all()
            if replay or i:
                assert ((misses >= 0).sum(axis=1) == new).all()


@pytest.mark.parametrize("name", residency.FORMATS)
def test_a_step_attends_to_resident_rows(name, monkeypatch):
    monkeypatch.setattr(residency, "HEADS", 2)
    steps, of = residency.Steps(np, requests=2, topk=8, hot=20, new=2, steps=3), residency.FORMATS[name]
    caches, step = residency.Caches(np, steps, of, pinned=False), residency.Step(np, steps, of)
    steps.resolve(0, "cpu")
    step.run(steps, caches, None)  # no row was fetched: all are 0
    before = step.out.copy()
    caches.fetch(steps, "cpu")
    step.run(steps, caches, None)
    assert np.isfinite(step.out.astype(np.float32)).all()
    assert not np.array_equal(before, step.out)


def test_the_measurements_run(emulated, monkeypatch):
    """The graphs, in which a second stream fetches rows under a product."""
    import cupy

    monkeypatch.setattr(residency, "cupy", cupy)
    monkeypatch.setattr(cupy.cuda, "get_elapsed_time", lambda start, end: 1.0, raising=False)
    monkeypatch.setattr(residency, "pcie_gbps", lambda caches: 50.0)
    for name, small in (("STEPS", 2), ("REPLAYS", 3), ("HEADS", 2), ("RANK", 128)):
        monkeypatch.setattr(residency, name, small)
    rows = []
    report = types.SimpleNamespace(add=lambda *row, **options: rows.append(row[:3]))
    residency.measure(report, "V4.1", requests=2, topk=8, hot=20, new=2)
    assert [(op, by) for op, _, by in rows] == [
        ("resolve_resident", "cumla"),
        ("fetch_resident", "cumla"),
        ("fetch_resident", "PCIe pace"),
        ("step", "cumla"),
    ]
    assert {config for _, config, _ in rows} == {"V4.1, 2 x 8, 20 slots, 25% miss"}
