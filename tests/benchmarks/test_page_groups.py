"""The plans of benchmarks/page_groups.py: what it moves are the pages of the requests."""

import numpy as np
import page_groups
import pytest

from cumla import pages


@pytest.mark.parametrize("name", ["V4", "V3.2"])
def test_plans_move_every_needed_page_once(name):
    model = page_groups.models(4)[name]
    counts, pairs = page_groups.plan(model, 3, 300, np.random.default_rng(0))
    for part in model.needs(300).parts:
        assert len(pairs[part.group]) == 3 * len(part.pages) <= counts[part.group]
    pools = [pages.Pools.allocate(model, counts) for _ in range(2)]
    for pool in pools[0].pools:
        pool.array[:] = 5
    pages.swap_out(*pools, pairs)
    for pool in pools[1].pools:
        assert pool.array.all() == (len(pairs[pool.group.name]) > 0)
