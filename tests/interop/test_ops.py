"""What compilers of frameworks are told of an operation's results is what it gives."""

import numpy as np
import pytest

import cumla
from cumla.interop.ops import OPS
from support import operations


def told_and_given(case, arguments):
    op = OPS[operations.operation(case)]
    results = getattr(cumla, op.name)(**arguments, backend="reference")
    given = () if results is None else results if isinstance(results, tuple) else (results,)
    told = [(tuple(shape), dtype) for shape, dtype in op.results(arguments)]
    return told, [(x.shape, str(x.dtype)) for x in given]


@pytest.mark.parametrize("case", operations.CASES)
def test_shapes_and_dtypes(case, rng):
    told, given = told_and_given(case, operations.CASES[case](rng))
    assert told == given


@pytest.mark.parametrize("topk", [0, 124, 125, 126, 253, 512])
def test_widths_of_combined_rows(topk, rng):
    """Whole multiples of 128 among them, as models have them."""
    arguments = operations.CASES["combine_topk_swa_indices"](rng)
    arguments |= {"topk": topk, "topk_indices": np.zeros((6, topk), np.int32)}
    told, given = told_and_given("combine_topk_swa_indices", arguments)
    assert told == given
    assert told[0] == ((6, -(-(topk + arguments["window_size"]) // 128) * 128), "int32")


@pytest.mark.parametrize("topk", [3, 4, 5, 8])
@pytest.mark.parametrize("decode_topk", [1, 4, 8])
def test_widths_of_mixed_rows(topk, decode_topk, rng):
    arguments = operations.CASES["build_flashinfer_mixed_sparse_indices"](rng)
    arguments |= {
        "topk": topk, "prefill_topk_indices": np.zeros((4, topk), np.int32),
        "decode_compressed_indices": np.zeros((2, decode_topk), np.int32),
    }  # fmt: skip
    told, given = told_and_given("build_flashinfer_mixed_sparse_indices", arguments)
    assert told == given
