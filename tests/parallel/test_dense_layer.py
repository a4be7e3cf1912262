"""A dense layer on ranks against attention in float64, starting with the insert of rows."""

from dataclasses import replace

import numpy as np
import pytest

from cumla.layers import MLACommonImpl
from cumla.parallel import Shard, ShardedMLALayer, local_seq_lens, run_threads
from support import ranks
from support.backends import only
from support.lab import BF16, to_float
from support.ranks import Context

NOPE, ROPE, LATENT, V = 128, 64, 512, 128
SECONDS = 60


class Problem:
    """Requests whose last queries are new tokens; projections select latent values and their signs.

    Such projections do not round, so the results must be within attention's bounds.
    """

    def __init__(self, rng, lens, heads):
        self.context = context = Context.make(rng, lens, heads, NOPE + ROPE)
        context.rows = rng.standard_normal((len(context.rows), LATENT + ROPE)).astype(BF16)
        self.pick = np.stack([rng.permutation(LATENT)[: NOPE + V] for _ in range(heads)])
        self.sign = rng.choice([-1.0, 1.0], self.pick.shape)
        self.weight = np.zeros((heads, NOPE + V, LATENT), BF16)
        np.put_along_axis(self.weight, self.pick[..., None], self.sign[..., None].astype(BF16), axis=2)

    def wanted(self):
        """out [T, h, V], lse, and the magnitudes that scale the bounds."""
        q = to_float(self.context.q)
        latent = np.einsum("thp,hpl->thl", q[..., :NOPE], to_float(self.weight[:, :NOPE]))
        whole = replace(self.context, q=np.concatenate([latent, q[..., NOPE:]], axis=2).astype(BF16))
        out, lse, sizes = ranks.dense_on_one(whole)
        out, sizes = (np.take_along_axis(x, self.pick[None, :, NOPE:], axis=2) for x in (out, sizes))
        return out * self.sign[:, NOPE:], lse, sizes

    def on(self, comm, split_heads, backend=None, axis=()):
        """A rank's step, which writes all rows: out [T, h, V] of its heads."""
        context, shard = self.context, Shard(comm.rank, comm.size, 2)
        heads = context.own_heads(comm) if split_heads else slice(None)
        q, weight = np.ascontiguousarray(context.q[:, heads]), self.weight[heads].reshape(-1, LATENT)
        layer = MLACommonImpl(q.shape[1], LATENT + ROPE, (LATENT + ROPE) ** -0.5, kv_b_proj=weight, backend=backend)
        layer.process_weights_after_loading(BF16)
        table, pages = context.pages(shard)
        cache = np.full((pages, ranks.BLOCK, LATENT + ROPE), np.nan, BF16)
        slots, new = context.slots(table, shard, backend), context.starts[1:] - 1  # one query a request, its last row
        old = np.setdiff1d(np.arange(len(slots)), new)
        old = old[slots[old] >= 0]
        cache.reshape(-1, LATENT + ROPE)[slots[old]] = context.rows[old]
        # Memory of earlier steps is reused: parts that are not written must not be read.
        layer.workspace.shaped("latent_q", (*q.shape[:2], LATENT + ROPE), q.dtype, q)[...] = np.nan
        k_pe = context.rows[new, LATENT:].reshape(len(new), *axis, ROPE)
        out = ShardedMLALayer(layer, comm, split_heads=split_heads).forward(
            q, context.rows[new, :LATENT], k_pe, cache, table,
            local_seq_lens(context.seen, shard, backend=backend), slots[new],
        )  # fmt: skip
        return out.reshape(*q.shape[:2], V)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("split_heads", [False, True], ids=["all-heads", "own-heads"])
def test_a_step_gives_what_one_device_gives(rng, size, split_heads):
    problem = Problem(rng, [37, 1, 5, 64], 6)
    outs = run_threads(size, lambda comm: problem.on(comm, split_heads), SECONDS)
    ranks.check_outs(outs, problem.wanted(), split_heads, size)


@pytest.mark.parametrize("split_heads", [False, True], ids=["all-heads", "own-heads"])
def test_every_operation_is_on_the_layers_backend(rng, split_heads):
    problem = Problem(rng, [7, 1], 2)
    with only("reference"):
        outs = run_threads(2, lambda comm: problem.on(comm, split_heads, "reference"), SECONDS)
    ranks.check_outs(outs, problem.wanted(), split_heads, 2)


def test_k_pe_may_have_an_axis_of_one_head(rng):
    problem = Problem(rng, [7, 1], 2)
    want, got = (
        run_threads(2, lambda comm, axis=axis: problem.on(comm, False, axis=axis), SECONDS) for axis in ((), (1,))
    )
    np.testing.assert_array_equal(np.stack(got), np.stack(want))
