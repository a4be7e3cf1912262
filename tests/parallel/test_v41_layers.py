"""V4.1's layers on several ranks: every rank selects what one device selects, and has its outputs."""

import numpy as np
import pytest

from cumla.parallel import run_threads
from support.ranked_stack import RankStack
from support.v41_stack import check_outputs, check_picks

SECONDS = 60


@pytest.mark.parametrize(("case", "size"), [(0, 1), (0, 3), (1, 2), (2, 2)])
def test_ranks_select_and_give_what_one_device_does(case, size):
    def on(comm):
        stack = RankStack(case, comm)
        tokens = stack.hidden[0].shape[1]
        return stack, stack.run(0, [tokens - 23, 1, 3, 19])

    found = run_threads(size, on, SECONDS)
    for stack, out in found:
        check_picks(stack, case, 0)
        check_outputs(stack, case, 0, out, 1e-5)
        for layer, picks in stack.picks.items():
            for token, chosen in picks[0].items():
                np.testing.assert_array_equal(chosen, found[0][0].picks[layer][0][token])
