"""Batch-invariant layers between their projections: a token's bits in any chunks of a prompt and beside any others."""

import numpy as np
import pytest

from cumla.layers.dense import MLACommonImpl
from cumla.metadata import MLACommonMetadataBuilder, MLAConfig
from cumla.metadata.batch import CommonAttentionMetadata
from support.lab import BF16
from support.operations import assert_same_bits

pytestmark = pytest.mark.attention

HEADS, BLOCK = 3, 16
DIMS = {"qk_nope_head_dim": 32, "v_head_dim": 48}


class Dense:
    """A dense layer, and requests of random tokens.

    Args:
        lens: tokens of each request
        drafts: tokens that a decode may have in addition to its own
    """

    def __init__(self, lab, rng, lens, drafts=2):
        self.lab, self.lens = lab, lens
        self.q = [rng.standard_normal((n, HEADS, 96)).astype(BF16) for n in lens]
        self.rows = [rng.standard_normal((n, 576)).astype(BF16) for n in lens]
        weight = (rng.standard_normal((HEADS * 80, 512)) * 0.04).astype(BF16)
        self.layer = MLACommonImpl(
            HEADS, 576, 96**-0.5, kv_b_proj=lab.put(weight), batch_invariant=True, backend=lab.backend, **DIMS
        )
        self.layer.process_weights_after_loading()
        columns = -(-max(lens) // BLOCK)
        self.table = rng.permutation(len(lens) * columns).astype(np.int32).reshape(-1, columns)
        self.cache = lab.put(np.full((self.table.size, BLOCK, 576), np.nan, BF16))
        self.builder = MLACommonMetadataBuilder(
            MLAConfig(
                block_size=BLOCK, num_heads=HEADS, num_speculative_tokens=drafts, max_num_batched_tokens=512,
                max_num_seqs=8, max_model_len=512, batch_invariant=True,
            ), backend=lab.backend,
        )  # fmt: skip

    def step(self, scheduled):
        """Outputs of (request, first position, count), decodes first."""
        put, names = self.lab.put, [request for request, _, _ in scheduled]
        counts = np.array([count for *_, count in scheduled], np.int32)
        starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        lens = np.array([first + count for _, first, count in scheduled], np.int32)
        slots = [self.table[r, p // BLOCK] * BLOCK + p % BLOCK for r, f, n in scheduled for p in range(f, f + n)]
        batch = CommonAttentionMetadata(
            put(starts), starts, put(lens), lens, lens - counts, len(names), int(starts[-1]), int(counts.max()),
            put(self.table[names]), put(np.array(slots, np.int64)),
        )  # fmt: skip
        q, rows = (
            np.concatenate([of[r][first : first + count] for r, first, count in scheduled])
            for of in (self.q, self.rows)
        )
        metadata = self.builder.build(0, batch)
        out = self.layer.forward(put(q), put(rows[:, :512]), put(rows[:, 512:]), self.cache, metadata)
        return np.split(self.lab.get(out), starts[1:-1])


@pytest.mark.nowhere(when=lambda x: x.simulated)  # slow
@pytest.mark.thorough(when=lambda x: x.emulated)
def test_dense_tokens_of_prompts_chunks_and_decodes(lab, rng, monkeypatch):
    """Whole prompts alone; then chunks of all sizes, decodes of one to three tokens, and both in a step."""
    monkeypatch.setattr("cumla.kernels.cuda.dense_attention.INVARIANT_PART", 1)  # blocks: keys are split
    monkeypatch.setattr("cumla.layers.dense.PREFILL_TOKENS", 5)  # several calls, of equal shapes
    lens = [80, 40]
    run = Dense(lab, rng, lens)
    want = [run.step([(request, 0, n)])[0] for request, n in enumerate(lens)]
    steps = [
        [(0, 0, 30)], [(0, 30, 1), (1, 0, 17)], [(0, 31, 2), (1, 17, 2)], [(1, 19, 3), (0, 33, 3)],
        [(1, 22, 1), (0, 36, 20)], [(0, 56, 1), (1, 23, 1)], [(0, 57, 8), (1, 24, 10)], [(0, 65, 15), (1, 34, 6)],
    ]  # fmt: skip
    for step in steps:
        for (request, first, count), out in zip(step, run.step(step), strict=True):
            assert_same_bits(out, want[request][first : first + count])


def test_dense_prompts_are_near_the_default(rng):
    """The same prompts by projected keys, as layers without the mode attend."""
    from support.lab import Lab

    run = Dense(Lab("cpu", on_device=False), rng, [70])
    got = run.step([(0, 0, 70)])[0].astype(np.float64)
    run.layer.batch_invariant = False
    run.builder = MLACommonMetadataBuilder(
        MLAConfig(block_size=BLOCK, num_heads=HEADS, max_num_batched_tokens=512, max_num_seqs=8, max_model_len=512)
    )
    want = run.step([(0, 0, 70)])[0].astype(np.float64)
    assert np.abs(got - want).max() < 0.02 * np.abs(want).max()


def test_a_dense_layer_and_metadata_of_two_modes_are_refused(rng):
    from support.lab import Lab

    run = Dense(Lab("cpu", on_device=False), rng, [5])
    run.builder = MLACommonMetadataBuilder(MLAConfig(block_size=BLOCK, num_heads=HEADS, max_model_len=512))
    with pytest.raises(ValueError, match="attn_metadata: got batch_invariant=False in the builder's config, expected"):
        run.step([(0, 0, 5)])


def test_a_sliding_window_of_prompts_is_refused():
    with pytest.raises(ValueError, match="sliding_window: got 64 with batch_invariant=True, expected None"):
        MLAConfig(sliding_window=64, batch_invariant=True)
