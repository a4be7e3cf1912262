"""Shapes and dtypes that operations declare to frameworks' compilers equal the results' shapes and dtypes."""

import numpy as np
import pytest

import cumla
from cumla.interop.ops import OPS
from support import operations


def inferred_and_returned(case, arguments):
    op = OPS[operations.operation(case)]
    results = getattr(cumla, op.name)(**arguments, backend="reference")
    given = () if results is None else results if isinstance(results, tuple) else (results,)
    inferred = [(tuple(shape), dtype) for shape, dtype in op.results(arguments)]
    return inferred, [(x.shape, str(x.dtype)) for x in given]


@pytest.mark.parametrize("case", operations.CASES)
def test_shapes_and_dtypes(case, rng):
    inferred, given = inferred_and_returned(case, operations.CASES[case](rng))
    assert inferred == given


@pytest.mark.parametrize("topk", [0, 124, 125, 126, 253, 512])
def test_widths_of_combined_rows(topk, rng):
    """Includes multiples of 128, which models have."""
    arguments = operations.CASES["combine_topk_swa_indices"](rng)
    arguments |= {"topk": topk, "topk_indices": np.zeros((6, topk), np.int32)}
    inferred, given = inferred_and_returned("combine_topk_swa_indices", arguments)
    assert inferred == given
    assert inferred[0] == ((6, -(-(topk + arguments["window_size"]) // 128) * 128), "int32")


@pytest.mark.parametrize("topk", [3, 4, 5, 8])
@pytest.mark.parametrize("decode_topk", [1, 4, 8])
def test_widths_of_mixed_rows(topk, decode_topk, rng):
    arguments = operations.CASES["build_flashinfer_mixed_sparse_indices"](rng)
    arguments |= {
        "topk": topk, "prefill_topk_indices": np.zeros((4, topk), np.int32),
        "decode_compressed_indices": np.zeros((2, decode_topk), np.int32),
    }  # fmt: skip
    inferred, given = inferred_and_returned("build_flashinfer_mixed_sparse_indices", arguments)
    assert inferred == given
