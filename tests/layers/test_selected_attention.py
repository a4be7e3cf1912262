"""V3.2's attention over selected rows by either path, against float64; and the path that a step takes."""

from types import SimpleNamespace

import numpy as np
import pytest

import cumla
from cumla.kernels.reference.sparse_attention import attend
from cumla.layers import selected_attention
from cumla.layers.selected_attention import Chosen, SelectedAttention, listed_rows
from cumla.metadata import DeepseekSparseSWAMetadataBuilder, ServingConfig
from cumla.metadata.batch import CommonAttentionMetadata
from support.bounds import assert_same_direction, assert_within
from support.lab import BF16, to_float

pytestmark = pytest.mark.attention

BLOCK, HEADS, TOPK, SCALE = 8, 3, 9, 576**-0.5


class Step:
    """Decodes, then prefills, then `padding` tokens, of requests with random rows in a cache."""

    def __init__(self, lab, rng, seq_lens, query_lens, padding=0, layout=cumla.V32_FP8):
        self.layout, width = layout, layout.head_dim
        self.lab, self.seq_lens, self.query_lens = lab, seq_lens, query_lens
        count, requests = sum(query_lens), len(seq_lens)
        tokens, columns = count + padding, -(-max(seq_lens) // BLOCK)
        table = rng.permutation(requests * columns + 3)[: requests * columns].reshape(requests, -1).astype(np.int32)
        k = rng.standard_normal((requests * columns * BLOCK, width)).astype(BF16)
        slots = (table[:, :, None] * BLOCK + np.arange(BLOCK)).reshape(-1)
        self.cache = layout.allocate(requests * columns + 3, BLOCK, lab.xp)
        cumla.quantize_and_insert_k_cache(lab.put(k), self.cache, lab.put(slots), layout=layout, backend=lab.backend)
        self.rows = np.empty((requests, columns * BLOCK, width), np.float32)
        cumla.dequantize_and_gather_k_cache(
            self.rows, lab.get(self.cache), np.full(requests, columns * BLOCK, np.int32), None, table,
            layout=layout, backend="reference",
        )  # fmt: skip
        self.q = rng.standard_normal((tokens, HEADS, width)).astype(BF16)
        self.selected = np.full((tokens, TOPK + 2), -1, np.int32)
        self.wanted = np.zeros((tokens, HEADS, 512))
        token = 0
        for r, (s, n) in enumerate(zip(seq_lens, query_lens, strict=True)):
            for position in range(s - n, s):
                chosen = rng.permutation(s + 2)[:TOPK]  # future rows, too, which the layer ignores
                self.selected[token, np.sort(rng.permutation(TOPK + 2)[: len(chosen)])] = chosen
                keys = self.rows[r][chosen[chosen <= position]]
                self.wanted[token] = attend(to_float(self.q[token]), keys, np.full(HEADS, -np.inf), SCALE)[0][:, :512]
                token += 1
        self.selected[count:] = 0
        starts = np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32)
        mapping = np.full(tokens, -1, np.int64)
        for r, (s, n) in enumerate(zip(seq_lens, query_lens, strict=True)):
            mapping[starts[r] : starts[r + 1]] = slots.reshape(requests, -1)[r, s - n : s]
        config = ServingConfig(
            window_size=4, compress_ratios=(1,), block_size=BLOCK, num_heads=HEADS, index_topk=TOPK + 2,
            max_num_batched_tokens=tokens + 3, max_num_seqs=requests + 1, max_model_len=columns * BLOCK,
        )  # fmt: skip
        lens = np.array(seq_lens, np.int32)
        batch = CommonAttentionMetadata(
            lab.put(starts), starts, lab.put(lens), lens, lens - np.array(query_lens, np.int32), requests, count,
            max(query_lens), lab.put(table), lab.put(mapping),
        )  # fmt: skip
        self.metadata = DeepseekSparseSWAMetadataBuilder(config, backend=lab.backend).build(0, batch)

    def attend(self, path, **changes):
        """Results, and which parts ran."""
        lab, tokens, observed = self.lab, len(self.q), []
        attention = SelectedAttention(
            self.cache, self.layout, SCALE, path, lab.backend,
            lambda part: observed.append(part) or selected_attention.nullcontext(),
        )  # fmt: skip
        arrays = {
            "q": self.q, "selected": self.selected, "slots": np.full((tokens, TOPK + 2), 99, np.int32),
            "lens": np.full(tokens, 99, np.int32), "out": np.full((tokens, HEADS, 512), 7, BF16),
            "lse": np.zeros((tokens, HEADS, 1), np.float32),
        }  # fmt: skip
        arrays = {name: lab.put(x) for name, x in arrays.items()}
        chosen = Chosen(*(arrays.pop(name) for name in ("selected", "slots", "lens")))
        attention.attend(metadata=self.metadata, chosen=chosen, **arrays, **changes)
        return to_float(lab.get(arrays["out"])), observed


STEPS = {
    "mixed": ([20, 9, 25, 3, 30], [1, 1, 6, 3, 4]),
    "prefills": ([12, 31], [12, 5]),
    "one token": ([17], [4]),
}


@pytest.mark.parametrize("path", ["pages", "rows"])
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("padding", [0, 2])
@pytest.mark.parametrize("room", [1, 64], ids=["a request a chunk", "all in one"])
def test_both_paths_give_attention_to_what_is_selected(lab, rng, monkeypatch, path, step, padding, room):
    monkeypatch.setattr(selected_attention, "WORKSPACE_ROWS", room)
    check_step(Step(lab, rng, *STEPS[step], padding), path)


@pytest.mark.parametrize("path", ["pages", "rows"])
@pytest.mark.thorough(when=lambda x: x.emulated)
def test_rows_without_a_16_bit_tail(lab, rng, path):
    check_step(Step(lab, rng, *STEPS["mixed"], layout=cumla.V32_NOPE_FP8), path)


def check_step(step, path):
    got, observed = step.attend(path)
    assert ("gather" in observed) == (path == "rows")
    largest = np.abs(step.rows).max()
    for token, want in enumerate(step.wanted):
        assert_within(f"token {token}", got[token], want, 1e-3 * largest, 3.01 / 128)
        assert_same_direction(f"token {token}", got[token], want, 7e-6)


@pytest.mark.parametrize("padding", [0, 2])
@pytest.mark.thorough(when=lambda x: x.simulated)
def test_first_tokens_of_prefills_may_attend_with_the_decodes(lab, rng, monkeypatch, padding):
    chunks_of = SelectedAttention._chunks
    monkeypatch.setattr(SelectedAttention, "_chunks", lambda *given: (chunks_of(*given)[0], 5))
    check_step(Step(lab, rng, *STEPS["mixed"], padding), "rows")


def test_chunks_take_as_many_requests_as_their_rows_have_room(lab, rng, monkeypatch):
    step = Step(lab, rng, [20, 9, 8, 30], [3, 3, 3, 3])
    for room, chunks in ((1 << 20, 1), (40, 3), (20, 3), (16, 4), (60, 2)):
        monkeypatch.setattr(selected_attention, "WORKSPACE_ROWS", room)
        _, observed = step.attend("rows")
        assert observed.count("gather") == chunks, room


def test_a_step_without_prefills_reads_pages(lab, rng):
    _, observed = Step(lab, rng, [20, 9], [1, 1]).attend("rows")
    assert observed == ["map", "decode"]


def test_a_backend_whose_costs_were_not_measured_reads_pages(lab, rng):
    _, observed = Step(lab, rng, *STEPS["mixed"]).attend(None)
    assert ("gather" in observed) == (lab.backend == "cuda" and observed.count("gather") > 0)


def test_how_many_rows_tokens_select():
    for s, n, topk in ((5, 5, 3), (9, 2, 4), (4, 1, 9), (7, 7, 7)):
        want = sum(min(position + 1, topk) for position in range(s - n, s))
        assert listed_rows(np.array([s]), np.array([n]), topk) == want


@pytest.mark.parametrize(
    ("tokens", "context", "heads", "wanted"),
    [
        (2004, 20_000, 64, "rows"),
        (64, 120_000, 64, "pages"),
        (2004, 20_000, 128, "rows"),
        (16, 4_000, 128, "pages"),
        (2004, 20_000, 16, "pages"),
        (2004, 400_000, 64, "pages"),
    ],
)
def test_long_prompts_are_dequantised_once_and_few_tokens_of_long_contexts_are_not(
    monkeypatch, tokens, context, heads, wanted
):
    monkeypatch.setattr(selected_attention, "choose", lambda *unused, **more: "cuda")
    monkeypatch.setattr(selected_attention.streams, "is_capturing", lambda: False)
    metadata = SimpleNamespace(
        num_prefills=1, prefill_seq_lens_cpu=np.array([context]), prefill_query_lens_cpu=np.array([tokens])
    )
    attention = SelectedAttention(np.empty(0), cumla.V32_FP8, SCALE, backend="cuda")
    chunks, with_decodes = attention._chunks(metadata, heads, 2048)
    assert ("rows" if chunks else "pages") == wanted
    assert with_decodes == (24 if chunks and heads == 64 else 0)  # 15 whole waves of 64 heads are left
