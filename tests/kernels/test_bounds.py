"""Repeats tests with bounds checks on indices: cpu kernels as interpreted code (support/checked.py)."""

import os
import pathlib
import subprocess
import sys

import pytest

TESTS = pathlib.Path(__file__).parent.parent
# Small tests that call all compiled functions of each file of kernels/cpu, which the plugin checks.
FILES = {
    "test_safety_indices.py": "cpu",
    "test_safety_cache.py": "cpu and not large",
    "test_safety_attention.py": "any_row_and_length and cpu or any_index and cpu-layout0",
    "metadata/test_sparse_swa.py": "test_batch and cpu",
    "metadata/test_indexer.py": "test_batch and cpu and v4",
    "metadata/test_slots.py": "cpu",
    "ops/test_indexer.py": "cpu and (test_queries and bfloat16-True-True or without_scales and F32)",
    "ops/test_indexer_topk.py": "cpu and choice_is_the_references and 300",
    "ops/test_compressor.py": "cpu and (test_compressor and ratio4 and (DSV4_FP8 or INDEXER_FP8) or any_value)",
    "ops/test_norms.py": (
        "cpu and (norms_of and bfloat16 or queries_and_window and DSV4_FP8 or inverse_rope or test_rope and 64"
        " or indexer_keys and INDEXER_FP8)"
    ),
    "ops/test_shards.py": "cpu and (hostile or test_merge and 1-40)",
    "ops/test_sparse_attention.py": "float32_rows and cpu",
    "kernels/test_cpu_attention.py": "huge_value",
    "ops/test_sparse_cache.py": "cpu and test_gather and (DSV4_FP8 or DSV41_FP4)",
    "ops/test_candidates.py": "cpu and not published",
    "ops/test_index_rotations.py": "cpu",
    "ops/test_key_pools.py": "cpu and (test_keys and 4 or rotated or several_requests or rejected_drafts and cpu-3)",
    "ops/test_latents.py": "cpu and not published",
    "ops/test_linear.py": "cpu and (groups or special or nothing)",
    "ops/test_mxfp4_queries.py": "cpu",
    "metadata/test_v41.py": "cpu and noncausal",
    "ops/test_residency.py": "cpu",
}


@pytest.mark.slow
def test_no_array_is_left():
    chosen = " or ".join(f"({pathlib.Path(file).name} and ({words}))" for file, words in FILES.items())
    options = ("-q", "-n", "0", "-p", "no:cacheprovider", "-p", "no:warnings", "-p", "support.checked", "-k", chosen)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *(str(TESTS / file) for file in FILES)],
        env={**os.environ, "NUMBA_DISABLE_JIT": "1", "PYTHONPATH": str(TESTS)}, cwd=TESTS.parent, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
