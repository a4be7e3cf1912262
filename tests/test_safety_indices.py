"""No value in an index, a table or a length makes an index map leave its arrays, or its results their range.

Reads outside are detected only where arrays are checked: in Numba's simulator, and in interpreted code
(tests/kernels/test_bounds.py).
"""

import numpy as np
import pytest
from hypothesis import strategies as st

import cumla
from cumla.dispatch.backends import kernels
from cumla.kernels.types.metadata import BatchCounts, SwaBuffers, WindowStep
from support.guarded import Guarded
from support.indexing import anything
from support.properties import for_all, seeds

pytestmark = pytest.mark.filterwarnings("error")

sizes = {
    "requests": st.integers(0, 4),
    "tokens": st.integers(1, 8),
    "columns": st.integers(0, 3),
    "block_size": st.sampled_from((1, 2, 53, 64, 2**31 - 1)),
    "seed": seeds,
}


def outputs(lab, *shapes):
    return [Guarded(lab, np.full(shape, -9, np.int32), (0, 4)) for shape in shapes]


def check_outputs(indices, lens, width):
    for output in (indices, lens):
        output.assert_margins()
    assert (indices.get() >= -1).all()
    assert ((lens.get() >= 0) & (lens.get() <= width)).all()


def test_swa(lab):
    @for_all(lab, examples=60, window=st.sampled_from((1, 5, 64)), **sizes)
    def check(window, requests, tokens, columns, block_size, seed):
        rng = np.random.default_rng(seed)
        out = outputs(lab, (tokens, window), (tokens,))
        cumla.compute_swa_indices_and_lens(
            *(lab.put(anything(rng, n)) for n in (requests + 1, requests, tokens)),
            lab.put(rng.random(tokens) < 0.9), lab.put(anything(rng, (requests, columns))), block_size, window, tokens,
            out=(out[0].array, out[1].array), backend=lab.backend,
        )  # fmt: skip
        check_outputs(*out, window)


@pytest.mark.parametrize("compact", [False, True], ids=["in-place", "compact"])
def test_global_topk(lab, compact):
    @for_all(lab, examples=60, topk=st.sampled_from((0, 1, 5, 64)), **sizes)
    def check(topk, requests, tokens, columns, block_size, seed):
        rng = np.random.default_rng(seed)
        out = outputs(lab, (tokens, topk), (tokens,))
        cumla.compute_global_topk_indices_and_lens(
            lab.put(anything(rng, (tokens, topk))), lab.put(anything(rng, tokens)),
            lab.put(anything(rng, (requests, columns))), block_size, lab.put(rng.random(tokens) < 0.9),
            compact=compact, out=(out[0].array, out[1].array), backend=lab.backend,
        )  # fmt: skip
        check_outputs(*out, topk)


def test_combine(lab):
    @for_all(
        lab,
        examples=60,
        window=st.sampled_from((1, 5, 64)),
        topk=st.sampled_from((0, 5, 60)),
        row_stride=st.sampled_from((1, 7, 100_000)),
        compressed=st.sampled_from((0, 6, 2**30)),
        **sizes,
    )
    def check(window, topk, row_stride, compressed, requests, tokens, columns, block_size, seed):
        rng = np.random.default_rng(seed)
        compressed = min(compressed, row_stride)
        out = outputs(lab, (tokens, 128), (tokens,))
        cumla.combine_topk_swa_indices(
            lab.put(anything(rng, (tokens, topk))),
            *(lab.put(anything(rng, n)) for n in (requests + 1, requests, requests)),
            window, 4, topk, row_stride, compressed, out=(out[0].array, out[1].array), backend=lab.backend,
        )  # fmt: skip
        check_outputs(*out, topk + window)
        assert (out[0].get() < max(requests * row_stride, 1)).all()


def test_mixed(lab):
    @for_all(
        lab,
        examples=60,
        window=st.sampled_from((1, 5)),
        topk=st.sampled_from((0, 5)),
        decodes=st.integers(0, 4),
        local=st.booleans(),
        span=st.sampled_from((1, 64, 2**31 - 1)),
        **sizes,
    )
    def check(window, topk, decodes, local, span, requests, tokens, columns, block_size, seed):
        rng = np.random.default_rng(seed)
        decodes = min(decodes, tokens)
        width = window + -(-max(topk, 3) // 4) * 4
        out = outputs(lab, (tokens, width), (tokens,))
        table = lab.put(anything(rng, (requests, columns)))
        cumla.build_flashinfer_mixed_sparse_indices(
            lab.put(anything(rng, (decodes, window))), lab.put(anything(rng, (decodes, 3))),
            lab.put(anything(rng, decodes)), lab.put(anything(rng, (tokens - decodes, topk))),
            *(lab.put(anything(rng, n)) for n in (requests + 1, requests, tokens)),
            table, block_size, table, block_size, window, 4, topk, local, None, span, span,
            out=(out[0].array, out[1].array), backend=lab.backend,
        )  # fmt: skip
        check_outputs(*out, width)


def test_step(lab):
    """The metadata kernel, called as by its builder, with host counts that contradict the device's numbers."""

    @for_all(lab, examples=60, window=st.sampled_from((1, 5)), width=st.sampled_from((0, 3)), **sizes)
    def check(window, width, requests, tokens, columns, block_size, seed):
        if not requests:
            return
        rng = np.random.default_rng(seed)
        rows = {
            "token_to_req_indices": (tokens,), "is_valid_token": (tokens,), "positions": (tokens,),
            "swa_indices": (tokens, window), "swa_lens": (tokens,), "prefill_gather_lens": (requests,),
            "c128a_indices": (tokens, width), "c128a_lens": (tokens,),
        }  # fmt: skip
        buffers = {
            name: Guarded(lab, np.zeros(shape, np.bool_ if name == "is_valid_token" else np.int32))
            for name, shape in rows.items()
        }
        table = lab.put(anything(rng, (requests, columns)))
        decodes, decode_tokens = int(rng.integers(requests + 1)), int(rng.integers(tokens + 1))
        counts = BatchCounts(requests, decodes, decode_tokens, tokens, tokens, 0)
        kernels(lab.backend, "window_metadata").build_sparse_swa(WindowStep(
            *(lab.put(anything(rng, n)) for n in (requests + 1, requests)),
            lab.put(anything(rng, tokens).astype(np.int64)), table, table if width else None, counts, block_size,
            window, block_size, width, SwaBuffers(**{name: x.array for name, x in buffers.items()}),
        ))  # fmt: skip
        for x in buffers.values():
            x.assert_margins()
        requests_of_tokens = buffers["token_to_req_indices"].get()
        assert ((requests_of_tokens >= 0) & (requests_of_tokens < requests)).all()
        assert (buffers["swa_indices"].get() >= -1).all()
        assert (buffers["prefill_gather_lens"].get() >= 0).all()
        lens = buffers["swa_lens"].get()
        assert ((lens >= 0) & (lens <= window)).all()
