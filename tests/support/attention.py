"""Problems of sparse attention."""

import contextlib
import functools
from unittest import mock

import numpy as np
import pytest

import cumla
from cumla.bounds import FLOAT16_WEIGHTS
from cumla.kernels.reference import sparse_attention as reference
from support.bounds import assert_decode, largest_values
from support.lab import BF16, Lab, to_float


def make_cache(rng, layout, num_blocks, block_size, page_stride=None, spread=1.0):
    """A cache of normal values with a different scale for each token."""
    cache = layout.allocate(num_blocks, block_size, page_stride=page_stride)
    slots = num_blocks * block_size
    k = rng.standard_normal((slots, layout.head_dim)) * np.exp(rng.uniform(-spread, spread, (slots, 1)))
    k = k.astype(BF16)
    if layout.quantized_dim:
        cumla.quantize_and_insert_k_cache(
            k, cache, np.arange(slots), block_size, layout=layout, backend="reference"
        )  # fmt: skip
        return cache
    for page, rows in enumerate(k.view(np.uint8).reshape(num_blocks, block_size, -1)):
        cache[page] = rows
    return cache


def make_indices(rng, b, s_q, topk, slots, absent=0.1):
    indices = rng.integers(0, slots, (b, s_q, topk), dtype=np.int32)
    bad = rng.choice(np.array([-1, -(2**31), slots, 2**31 - 1], np.int32), indices.shape)
    return np.where(rng.random(indices.shape) < absent, bad, indices)


def make_q(rng, b, s_q, heads, layout, size=1.0):
    return (rng.standard_normal((b, s_q, heads, layout.head_dim)) * size).astype(BF16)


def steep(heads):
    """A size of q for each head: scores of the first heads are flat, scores of the last heads have distant maxima.

    Running maxima then rise from block to block, by less and by more than kernels may defer.
    """
    return np.exp2(np.linspace(-3, 5, heads))[:, None]


@contextlib.contextmanager
def nothing_attended_again():
    """Fast kernels do all work: no exact kernel recomputes values that they wrongly flag as out of range."""
    import cupy

    from cumla.kernels.cuda.sparse import kernels as sparse_kernels
    from cumla.kernels.cuda.sparse.work import PackedSegment, SparseProblem

    fields = SparseProblem._fields
    unsafe_at = fields.index("unsafe") + 2 * len(PackedSegment._fields) - 1  # of the values of a problem
    launch_epilogue, launch = sparse_kernels.launch_epilogue, sparse_kernels.FastKernel.launch

    def with_marks(problem, marks):  # after the word that marks all tiles
        return *problem[:unsafe_at], marks.data.ptr + 4, *problem[unsafe_at + 1 :]

    def launch_of_one_attempt(fast, division, work, problem):
        marks = cupy.zeros(2, np.int32)  # with marks, a kernel that recomputes its tiles leaves them
        launch(fast, division, work, with_marks(problem, marks) if fast.recomputes else problem)

    def epilogue_without_marks(work, problem, memory=None, **options):
        if memory is None:
            return  # marks are in the results, and there is no epilogue
        no_marks = cupy.zeros(1 + work.tiles, np.int32)
        launch_epilogue(work, with_marks(problem, no_marks), memory=memory, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sparse_kernels, "launch_epilogue", epilogue_without_marks)
        patch.setattr(sparse_kernels.FastKernel, "launch", launch_of_one_attempt)
        yield


class Problem:
    """Arguments of sparse_mla_decode as NumPy arrays, and the reference's result."""

    def __init__(self, q, cache, indices, **options):
        self.q, self.cache, self.indices, self.options = q, cache, indices, options

    def on(self, lab, **more):
        options = {name: lab.put(x) if isinstance(x, np.ndarray) else x for name, x in self.options.items()}
        return cumla.sparse_mla_decode(
            lab.put(self.q), lab.put(self.cache), lab.put(self.indices), backend=lab.backend, **options, **more
        )

    @functools.cached_property
    def want(self):
        return self.on(Lab("reference", False))

    def check(self, lab, size=1.0, **more):
        """The bounds are for values of ordinary size; `size` is the factor by which these are larger."""
        out, lse = self.on(lab, **more)
        want_out, want_lse = (out, lse) if lab.backend == "reference" else self.want
        out, lse = lab.get(out), lab.get(lse)
        size = max(size, 1.0)
        rounding = (lambda: FLOAT16_WEIGHTS * self.magnitudes() / size) if lab.backend == "cuda" else None
        assert_decode(to_float(out) / size, lse, to_float(want_out) / size, want_lse, rounding)
        return out, lse

    def magnitudes(self):
        """The sum of |weight x value| of each result."""
        attend = reference.attend

        def of_magnitudes(q, keys, attn_sink, softmax_scale):
            out, top, lse = attend(q, keys, attn_sink, softmax_scale)
            if not len(keys):
                return out, top, lse
            weights = np.exp(softmax_scale * (q @ keys.T) - lse[:, None])
            sink = 1.0 if attn_sink is None else 1 + np.exp(attn_sink - lse)[:, None]
            return weights @ np.abs(keys[:, : out.shape[1]]) / sink, top, lse

        with mock.patch.object(reference, "attend", of_magnitudes):
            return to_float(self.on(Lab("reference", False))[0])


def marks_of_kernels(emulated=frozenset(), of_the_reference=frozenset()):
    """Marks of a module of sparse attention tests that take `kernel`.

    Args:
        emulated: tests that run the exact kernel without a device: its emulation is slow, and the other kernels call it
            where necessary
        of_the_reference: tests that check the reference itself, with which the others compare
    """

    def is_none(x):
        kernel = x.get("kernel", "chosen")
        return (
            (kernel != "chosen" and x.backend != "cuda")  # only cuda has several kernels
            or (kernel == "exact" and x.emulated and x.test not in emulated)
            or (x.backend == "reference" and x.test not in of_the_reference)
        )

    return [pytest.mark.attention, pytest.mark.nowhere(when=is_none)]


def values_of_weights(lab, kernel, kv, indices):
    """`largest` for assert_prefill: Hopper's prefill kernel has bfloat16 weights."""
    return largest_values(kv, indices) if lab.backend == "cuda" and kernel == "chosen" else 1.0
