"""The steps of benchmarks/residency.py: as many rows miss as they say, also when the steps are repeated."""

import numpy as np
import pytest
import residency


@pytest.mark.parametrize("new", [0, 2, 8])
def test_new_rows_miss_in_every_replay(new):
    steps = residency.Steps(np, requests=2, topk=8, hot=20, new=new, steps=30)
    caches = residency.Caches(np, steps, pinned=False)
    for replay in range(2):
        for i in range(30):
            slots, misses = steps.resolve(i, "cpu")
            caches.fetch(steps, "cpu")
            residency.check(steps, caches)
            assert (slots >= 0).all()
            if replay or i:
                assert ((misses >= 0).sum(axis=1) == new).all()


def test_a_step_attends_to_resident_rows():
    steps = residency.Steps(np, requests=2, topk=8, hot=20, new=2, steps=3)
    caches, step = residency.Caches(np, steps, pinned=False), residency.Step(np, steps)
    steps.resolve(0, "cpu")
    step.run(steps, caches, None)  # no row was fetched: all are 0
    before = step.out.copy()
    caches.fetch(steps, "cpu")
    step.run(steps, caches, None)
    assert np.isfinite(step.out.astype(np.float32)).all()
    assert not np.array_equal(before, step.out)
