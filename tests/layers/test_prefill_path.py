"""The path that a chunk of prefills takes."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from cumla.layers.prefill_path import COSTS, Costs, cheaper_path, chunk_paths
from cumla.layout import DSV4_BF16, DSV4_FP8, DSV41_FP8, DSV41_FP8_SPLIT
from cumla.metadata.builder import ServingConfig

WINDOW = 128


def metadata(*chunks):
    """Prefills (tokens, length) in chunks, with the fields that select the path."""
    prefills = [prefill for chunk in chunks for prefill in chunk]
    ends = np.cumsum([len(chunk) for chunk in chunks]).tolist()
    plan = [
        (end - len(chunk), end, max(s // 4 for _, s in chunk), max(s // 4 + q + WINDOW for q, s in chunk))
        for end, chunk in zip(ends, chunks, strict=True)
    ]
    return SimpleNamespace(
        get_prefill_chunk_plan=lambda ratio, has_compressed: plan,
        config=SimpleNamespace(window_size=WINDOW, has_compressed_rows=ServingConfig().has_compressed_rows),
        prefill_query_lens_cpu=np.array([q for q, _ in prefills]),
        prefill_seq_lens_cpu=np.array([s for _, s in prefills]),
    )  # fmt: skip


def paths(*chunks, backend="cuda", forced=None, ratio=4, topk=512, layout=DSV4_FP8, heads=64):
    return [chunk.path for chunk in chunk_paths(metadata(*chunks), ratio, heads, topk, backend, layout, forced)]


def test_few_tokens_of_a_long_request_do_not_gather_it():
    assert paths([(8, 1 << 17)]) == ["pages"]


def test_chunks_of_a_step_go_their_own_ways():
    chunks = [(8, 1 << 17)], [(4096, 4096)]
    assert paths(*chunks, forced="pages") == ["pages", "pages"]
    assert paths(*chunks, forced="rows") == ["rows", "rows"]
    assert [c[:3] for c in chunk_paths(metadata(*chunks), 4, 64, 512, "cuda")] == [
        (slice(0, 1), 1 << 15, (1 << 15) + 8 + WINDOW), (slice(1, 2), 1024, 1024 + 4096 + WINDOW)
    ]  # fmt: skip


@pytest.mark.parametrize("layout", [DSV41_FP8, DSV41_FP8_SPLIT], ids=lambda x: x.name)
def test_layers_of_v41_have_costs(layout):
    """A few tokens of a long request read pages; a prompt's rows are dequantised once."""
    assert paths([(8, 1 << 17)], layout=layout) == ["pages"]
    assert paths([(2048, 4096)], layout=layout) == ["rows"]


@pytest.mark.parametrize(
    ("chunks", "options", "expected"),
    [
        ([(256, 16_384)] * 8, {"heads": 16}, "pages"),
        ([(1024, 32_768)] * 4, {"heads": 16}, "rows"),
        ([(2000, 51_200)], {"heads": 16, "ratio": 128, "topk": None}, "pages"),
        ([(2000, 51_200)], {"heads": 32, "ratio": 128, "topk": None}, "pages"),
        ([(2000, 51_200)], {"heads": 64, "ratio": 128, "topk": None}, "rows"),
        ([(2000, 4096)], {"heads": 8, "ratio": 0, "topk": None}, "rows"),
        ([(2000, 4096)], {"heads": 64, "ratio": 0, "topk": None}, "pages"),
        ([(512, 16_384)], {"heads": 32}, "pages"),
    ],
    ids=str,
)
def test_the_faster_path_of_measured_chunks(chunks, options, expected):
    assert paths(chunks, **options) == [expected]


def test_backends_that_were_not_measured_gather():
    assert paths([(8, 1 << 17)], backend="cpu") == ["rows"]
    assert paths([(8, 1 << 17)], layout=DSV4_BF16) == ["rows"]


@pytest.mark.parametrize("heads", [8, 64, 128])
@pytest.mark.parametrize("compressed", [0, 512, 4096])
def test_more_to_gather_never_favours_gathering(heads, compressed):
    taken = [cheaper_path(COSTS["cuda", DSV4_FP8.name], 256, heads, WINDOW, compressed, 1 << n) for n in range(24)]
    assert taken == sorted(taken, reverse=True)  # "rows" first, then "pages"
    assert taken[-1] == "pages"


def test_the_costs_decide():
    costs = Costs(
        pages=1, pages_map=2, pages_tile=1, pages_block=1, rows=1, rows_map=3, gathered=1, wave_tile=1, wave_block=1,
        tiles=2,
    )  # fmt: skip
    # Over pages 1 + 2 + 6 tiles of 1 + 3 blocks, over rows 1 + 3 + gathered + 3 waves of a tile with 3 blocks.
    assert cheaper_path(costs, 3, 65, 64, 100, gathered=10) == "rows"
    assert cheaper_path(costs, 3, 65, 64, 100, gathered=12) == "pages"
    # Without compressed rows 1 + 6 * 2 against 1 + gathered + 3 * 2.
    assert cheaper_path(costs, 3, 65, 64, 0, gathered=5) == "rows"
    assert cheaper_path(costs, 3, 65, 64, 0, gathered=7) == "pages"


def test_chunks_take_what_was_faster_on_a_device():
    """Tokens and positions of chunks of 64 heads; window layers list 128 rows, the others up to 512 more."""
    assert [paths([(t, 2048)], ratio=1, topk=None)[0] for t in (16, 256, 2048)] == ["pages"] * 3
    assert paths([(8131, 16317)], ratio=1, topk=None) == ["rows"]
    assert [paths([(t, 1 << 17)])[0] for t in (16, 256, 512, 1024)] == ["pages"] * 4
    assert [paths([(t, 16384)])[0] for t in (16, 256, 512, 1024, 2048, 8192)] == ["pages"] * 4 + ["rows"] * 2


@pytest.mark.parametrize(
    ("tokens", "context", "heads", "taken"),
    [
        (1991, 16_878, 64, 11), (2000, 16_878, 64, 20), (2025, 5428, 64, 0), (1998, 2000, 64, 0), (1980, 16_878, 64, 0),
        (1991, 16_878, 128, 11), (2000, 16_878, 128, 0), (1991, 16_878, 16, 0), (100, 1 << 16, 64, 0),
    ],
)  # fmt: skip
def test_tokens_of_a_last_wave_that_cost_less_over_pages(tokens, context, heads, taken):
    """Waves of 132 tiles of 64 heads: a small last wave with long lists attends with the decodes."""
    chunks, topk = metadata([(tokens, max(context, tokens))]), 512 if heads == 64 else 1024
    (chunk,) = chunk_paths(chunks, 4, heads, topk, "cuda")
    assert chunk.ahead == (taken if chunk.path == "rows" else tokens)
    (chunk,) = chunk_paths(chunks, 4, heads, topk, "cuda", forced="rows")
    assert chunk.ahead == 0


FREE = Costs(
    pages=0,
    pages_map=0,
    pages_tile=0,
    pages_block=0,
    rows=0,
    rows_map=0,
    gathered=0,
    wave_tile=0,
    wave_block=0,
    tiles=1,
)


@pytest.mark.parametrize(
    ("chunk", "given", "blocks"),
    [
        ([(3, 4096)], {}, 3 * (2 + 8)),  # a window of 128 rows and 512 of 1,024 compressed ones, 64 at a time
        ([(3, 4096)], {"topk": None}, 3 * (2 + 16)),  # all 1,024 compressed rows
        ([(3, 4096)], {"topk": None, "ratio": 128}, 3 * (2 + 1)),
        ([(3, 4096)], {"ratio": 1, "topk": None}, 3 * 2),
        ([(3, 400)], {}, 3 * (2 + 2)),  # 100 compressed rows, fewer than may be selected
        ([(3, 40)], {}, 3 * (1 + 1)),
        ([(3, 4096)], {"heads": 65}, 6 * (2 + 8)),
        ([(3, 40), (2, 4096)], {}, 5 * (2 + 8)),  # cost of the longest request
    ],
)
def test_a_chunk_costs_what_its_tokens_attend_to(monkeypatch, chunk, given, blocks):
    """Window and compressed blocks are counted separately over pages, together over gathered rows, per SM."""
    ratio, topk = given.get("ratio", 4), given.get("topk", 512)
    longest, tokens = max(s for _, s in chunk), sum(q for q, _ in chunk)
    selected = min(0 if ratio == 1 else longest // ratio, topk or longest)
    tiles = tokens * (2 if given.get("heads") else 1)
    waves = tiles / 2 * -(-(min(longest, WINDOW) + selected) // 64)
    gathered = len(chunk) * max(s // 4 + q + WINDOW for q, s in chunk)  # as in `metadata`

    def path(**costs):
        monkeypatch.setitem(COSTS, ("cuda", DSV4_FP8.name), replace(FREE, **costs))
        (taken,) = paths(chunk, **given)
        return taken

    for cost, bound, cheap, dear in (
        ("pages_block", "rows", "pages", "rows"), ("gathered", "pages", "rows", "pages"),
        ("wave_block", "pages", "rows", "pages"),
    ):  # fmt: skip
        count = {"pages_block": blocks, "gathered": gathered, "wave_block": waves}[cost]
        assert path(**{cost: 1, bound: count + 0.5, "tiles": 2}) == cheap
        assert path(**{cost: 1, bound: count - 0.5, "tiles": 2}) == dear
