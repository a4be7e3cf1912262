"""Page groups of models: positions, bytes, hits; compared with the allocated caches."""

import dataclasses
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cumla import pages
from cumla.models import (
    DeepseekV4Config,
    DeepseekV32Config,
    DeepseekV41Config,
    LayerCaches,
    config_from,
    serving_of,
)
from cumla.parallel import Shard

V32 = DeepseekV32Config(256, 8, 128)
GLM = config_from({
    "model_type": "glm_moe_dsa", "hidden_size": 256, "num_attention_heads": 8, "q_lora_rank": 128,
    "num_hidden_layers": 5, "indexer_types": ["full", "full", "shared", "shared", "full"],
})  # fmt: skip
FLASH = config_from({
    "model_type": "glm5_next_text", "hidden_size": 256, "num_attention_heads": 8, "q_lora_rank": 128,
    "num_hidden_layers": 4, "index_kpool": 4, "indexer_types": ["full", "full", "full", "shared"],
    "layer_types": ["indexed_attention", "linear_attention", "indexed_attention", "indexed_attention"],
})  # fmt: skip
V4 = DeepseekV4Config(256, 8, 128, 2, 64, compress_ratios=(1, 128, 4, 128, 4))
V41 = DeepseekV41Config(
    256, 8, 128, 2, 64, compress_ratios=(0, 2, 2, 1, 1, 0), kv_source_layer_ids=(1, 3),
    index_source_layer_ids=(1, 3, 4), num_hidden_layers=5,
)  # fmt: skip


def described(kind, **options):
    return {
        "v32": lambda: pages.describe(V32, layers=3, **options), "v4": lambda: pages.describe(V4, **options),
        "glm": lambda: pages.describe(GLM, drafts=1, **options),
        "flash": lambda: pages.describe(FLASH, drafts=1, num_speculative_tokens=9, **options),
        "v41": lambda: pages.describe(V41, drafts=1, num_speculative_tokens=9, **options),
    }[kind]()  # fmt: skip


@pytest.mark.parametrize("kind", ["v32", "v4", "v41", "glm", "flash"])
@pytest.mark.parametrize("sizes", [(64, 256), (32, 128)])
def test_pages_are_the_allocated_ones(kind, sizes):
    """Bytes, rows and strides of every array of every layer's caches, and no array is left out."""
    formats = {"v41": ("fp4", "fp8_split", "fp4_split", "bfloat16")}.get(kind, ("fp8", "bfloat16", "float32"))
    for cache_format in formats:
        made = described(kind, cache_format=cache_format, block_size=sizes[0], compressed_block_size=sizes[1])
        options = {"block_size": sizes[0], "compressed_block_size": sizes[1]}
        caches, config = [], {"v32": V32, "v4": V4, "v41": V41, "glm": GLM, "flash": FLASH}[kind]
        for layer in range(made.layers + made.drafts):
            if kind == "flash" and layer == 1:
                caches.append(LayerCaches())  # of linear attention
                continue
            spec, serving = config.spec(layer), serving_of(config, num_speculative_tokens=9, **options)
            owner = None if spec.row_source in (None, layer) else caches[spec.row_source]
            pages_of = dict.fromkeys(spec.groups(), 3)
            caches.append(LayerCaches.allocate(spec, serving, pages_of, owner=owner, cache_format=cache_format))
        left = {id(x) for its in caches for x in vars(its).values() if x is not None}
        for group in made:
            for cache in group.caches:
                for layer in cache.layers:
                    array = getattr(caches[layer], cache.cache)
                    page = array[0]
                    assert page.nbytes == cache.page_bytes == cache.rows * (cache.row_bytes + cache.tail_bytes)
                    assert array.strides[0] == cache.stride
                    assert cache.stride % cache.alignment == 0
                    assert cache.whole or array.shape[1] == cache.rows
                    if group.tokens:
                        assert cache.rows * cache.positions == group.tokens
                    left.discard(id(array))
        assert not left


def test_what_a_hit_needs():
    of = {name: described(name) for name in ("v32", "v4", "v41")}
    for n in range(1, 700):
        (rows,) = of["v32"].needs(n).parts
        assert (rows.first, rows.end, rows.pages) == (0, n, range(-(-n // 64)))
        needs = of["v4"].needs(n)
        window, states4, states128 = (needs.part(name) for name in ("window", "states4", "states128"))
        assert (window.first, window.end) == (max(0, n - 127), n)
        assert window.pages == range(window.first // 64, -(-n // 64))
        assert (states4.first, states4.end) == (max(0, 4 * (n // 4) - 4), n)
        assert (states128.first, states128.end) == (128 * (n // 128), n)
        compressed = of["v4"].group("compressed")
        assert {(cache.positions, compressed.rows(cache, n)) for cache in compressed.caches} == {
            (4, (0, n // 4)), (128, (0, n // 128)),
        }  # fmt: skip
        needs = of["v41"].needs(n)
        assert (needs.part("rings").first, needs.part("rings").end) == (2 * (n // 2), n)
        assert needs.part("rings").pages == range(n % 2)
        assert (needs.part("draft_window").first, needs.part("draft_window").end) == (max(0, n - 128), n)
    assert [group.name for group in of["v41"]] == ["window", "compressed", "rings", "draft_window"]


def test_layers_that_share_a_selection_have_no_keys():
    """Draft layers have rows and keys of their own."""
    of = described("glm")
    layers = {(group.name, cache.cache): cache.layers for group in of for cache in group.caches}
    assert layers == {
        ("rows", "rows"): (0, 1, 2, 3, 4), ("rows", "indexer"): (0, 1, 4),
        ("draft_rows", "rows"): (5,), ("draft_rows", "indexer"): (5,),
    }  # fmt: skip
    assert of.packed_bytes(10) == 10 * (656 * 6 + 132 * 4)


def test_pooled_keys_and_their_rings():
    of = described("flash")
    layers = {
        (group.name, cache.cache): (cache.layers, cache.rows, cache.positions) for group in of for cache in group.caches
    }
    assert layers == {
        ("rows", "rows"): ((0, 2, 3), 64, 1), ("rows", "indexer"): ((0, 2), 16, 4),
        ("draft_rows", "rows"): ((4,), 64, 1), ("draft_rows", "indexer"): ((4,), 16, 4),
        ("rings", "ring"): ((0, 2), 16, 1), ("rings", "restart_rows"): ((0, 2), 1, 1),
        ("rings", "restart_positions"): ((0, 2), 1, 1), ("draft_rings", "ring"): ((4,), 16, 1),
        ("draft_rings", "restart_rows"): ((4,), 1, 1), ("draft_rings", "restart_positions"): ((4,), 1, 1),
    }  # fmt: skip
    for n in range(1, 200):
        needs, rows = of.needs(n), of.group("rows")
        assert (needs.part("rows").first, needs.part("rows").end, needs.part("rows").pages) == (
            0,
            n,
            range(-(-n // 64)),
        )
        assert {cache.cache: rows.rows(cache, n) for cache in rows.caches} == {"rows": (0, n), "indexer": (0, n // 4)}
        assert (needs.part("rings").first, needs.part("rings").end) == (4 * (n // 4), n)
        assert needs.part("rings").pages == range(n % 4 > 0)
    # A ring's row is 512 bytes; three such rows and a position allow a step to be run again.
    assert of.packed_bytes(10) == 4 * 10 * 528 + 3 * (2 * 132 + 2 * 512 + 3 * 512 + 4)


def test_pooled_keys_and_rings_are_on_every_rank():
    of = described("flash", ranks=2, rank=1)
    found = {group.name: (group.tokens, [(x.cache, x.sharded) for x in group.caches]) for group in list(of)[:3]}
    rings = [("ring", False), ("restart_rows", False), ("restart_positions", False)]
    assert found == {
        "rows": (64, [("indexer", False)]), "rank_rows": (128, [("rows", True)]), "rings": (0, rings)
    }  # fmt: skip
    needs = of.needs(131)
    assert needs.part("rows")[1:] == (0, 128, range(2), -1)
    assert needs.part("rank_rows")[1:] == (0, 131, range(2), 1)
    assert needs.part("rings")[1:] == (128, 131, range(1), -1)


def test_pages_that_later_tokens_write_into_are_copied():
    of = described("v4")
    assert {part.group: part.written for part in of.needs(256).parts} == {
        "window": -1, "compressed": -1, "states4": -1, "states128": -1,
    }  # fmt: skip
    assert {part.group: part.written for part in of.needs(262).parts} == {
        "window": 4, "compressed": 1, "states4": 65, "states128": 32,
    }  # fmt: skip
    assert of.needs(258).part("compressed").written == -1  # page 1 has no row yet


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_hits_are_the_longest_for_which_all_is_kept(data):
    of = described(data.draw(st.sampled_from(["v32", "v4", "v41"])))
    tokens, copies = data.draw(st.integers(1, 600)), data.draw(st.booleans())
    bound = st.integers(0, 620)
    kept = {
        group.name: data.draw(st.lists(st.tuples(bound, bound).map(lambda x: tuple(sorted(x))), max_size=3))
        + ([(0, 620)] if data.draw(st.integers(0, 3)) else [])
        for group in of
    }  # fmt: skip

    def is_kept(n):
        there = {name: {p for first, end in its for p in range(first, end)} for name, its in kept.items()}
        return all({*range(part.first, part.end)} <= there[part.group] for part in of.needs(n).parts)

    unit = 1 if copies else of.page_multiple
    want = max(n for n in range(0, tokens, unit) if n == 0 or is_kept(n))
    assert of.hit(tokens, kept, copies) == of.needs(want)


def test_hits_of_long_prompts():
    kept = {"rows": [(0, 300_000)]}
    assert described("v32").hit(1_000_000, kept).tokens == 300_000
    assert described("v32").hit(300_000, kept).tokens == 299_999  # a token is left to compute
    assert described("v32").hit(1_000_000, kept, copies=False).tokens == 300_000 // 64 * 64
    assert described("v32").hit(9, {}).tokens == 0
    with pytest.raises(ValueError, match="group: got 'window', expected 'rows'"):
        described("v32").hit(9, {"window": []})


@pytest.mark.parametrize("kind", ["v32", "v4", "v41"])
def test_bytes_of_requests(kind):
    """Pages during a step: those of the tokens before it that it reads, and those that it writes."""
    of = described(kind)
    for tokens, step in ((1, 1), (64, 64), (300, 1), (300, 300), (1000, 130)):
        want = 0
        for group in of:
            columns = set(group.part(tokens - step).pages)
            for cache in group.caches:
                written = range((tokens - step) // cache.positions, tokens // cache.positions)
                columns |= {row // cache.rows for row in written} if group.tokens else {0}
            want += len(columns) * sum(cache.stride * len(cache.layers) for cache in group.caches)
        assert of.request_bytes(tokens, step) == want
    assert of.checkpoint_bytes(257) == sum(
        group.page_bytes * len(group.part(257).pages) for group in of if group.lifetime != "request"
    )


@pytest.mark.parametrize("kind", ["v32", "v4", "v41"])
@pytest.mark.parametrize("interleave", [1, 16, 64])
def test_ranks_have_their_own_rows(kind, interleave):
    whole = described(kind)
    for tokens in (1, 63, 128, 700, 1537):
        rows = 0
        for rank in range(3):
            of = described(kind, ranks=3, rank=rank, interleave=interleave)
            group = of.group("rank_rows")
            for cache in group.caches:
                count = Shard(rank, 3, interleave).local_len(tokens // cache.positions)
                assert group.rows(cache, tokens) == (0, count)
                rows += count * len(cache.layers)
                assert len(group.part(tokens).pages) >= -(-count // cache.rows)
            replicated = [x for x in of if x.name != "rank_rows"]
            assert {x.name for x in replicated} == {x.name for x in whole}
            for one in replicated:
                assert one.part(tokens) == whole.group(one.name).part(tokens)
        name = "rows" if kind == "v32" else "compressed"
        sharded = [cache for group in whole for cache in group.caches if cache.cache == name]
        assert rows == sum(tokens // cache.positions * len(cache.layers) for cache in sharded)


@pytest.mark.parametrize("kind", ["v32", "v4", "v41"])
def test_descriptions_are_plain_data(kind):
    of = described(kind)
    assert pages.Description.from_json(json.loads(json.dumps(of.to_json()))) == of
    assert described(kind).digest == of.digest


def test_digests_are_of_what_layers_compute():
    other = dataclasses.replace(V4, rope_theta=20000.0)
    assert pages.describe(other).digest != described("v4").digest
    assert pages.describe(V4, cache_format="float32").digest == described("v4").digest


def test_config_json_is_a_configuration():
    config = {"model_type": "deepseek_v32", "hidden_size": 256, "num_attention_heads": 8, "q_lora_rank": 128}
    assert pages.describe(config | {"num_hidden_layers": 3}).groups == described("v32").groups


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: pages.describe(3), "config: got int, expected the configuration of a model"),
        (lambda: pages.describe(V32), "layers: got None, expected the number of layers, which DeepseekV32Config lacks"),
        (lambda: pages.describe(V4, layers=4), "layers: got 4, expected 5 as the configuration has"),
        (lambda: pages.describe(V4, 2, rank=2), "rank: got 2, expected at most 1"),
        (lambda: pages.describe(V4, cache_format="fp4"), "cache_format: got 'fp4'"),
        (lambda: pages.describe(V32, layers=1, key_format="mxfp4"), "key_format: got 'mxfp4' with cache_format 'fp8'"),
        (lambda: pages.describe(V4, compressed_block_size=64), "compressed_block_size: got 64, expected a multiple of"),
        (lambda: pages.describe(V4, state_block_sizes={4: 4}), "state_block_sizes: got {4: 4}, expected one for ratio"),
        (lambda: pages.describe(V4, drafts=1), "layer: got 5, expected at most 4"),
        (lambda: pages.describe(V4).group("rows"), "group: got 'rows', expected 'window'"),
        (lambda: pages.describe(V4).needs(-1), "tokens: got -1, expected at least 0"),
    ],
)
def test_errors_name_the_argument(call, match):
    with pytest.raises((TypeError, ValueError), match=match):
        call()


def tables_of(of, requests, columns=40):
    return {
        group.name: np.arange(requests * columns).reshape(requests, columns) if group.tokens else np.arange(requests)
        for group in of
    }  # fmt: skip


def test_missing_pages_are_named():
    of = described("v41")
    tables = tables_of(of, 3)
    assert pages.missing(of, tables, [70, 3, 0]) == []
    tables["window"][0, 0] = -7
    tables["compressed"][1] = -1
    tables["rings"][1] = -1
    found = pages.missing(of, tables, [70, 3, 0])
    assert [str(x) for x in found] == [
        "request 0 needs a page of window for position 0: it is swapped out to page 5",
        "request 1 needs a page of compressed for position 0: it is absent",
        "request 1 needs a page of rings for position 2: it is absent",
    ]
    assert pages.missing(of, tables, [200, 2, 0])[0].group == "compressed"  # the window has gone on, the ring is even
    assert len(pages.missing(of, tables, [200, 2, 0])) == 1
    assert [x.group for x in pages.missing(of, tables, [200, 3, 0], [1, 1, 0])] == ["compressed", "rings"]


def test_new_tokens_need_pages_too():
    of = described("v4")
    tables = tables_of(of, 1)
    tables["states128"][0, 17] = -1
    tables["window"][0, 2] = 99
    assert pages.missing(of, tables, [136], None, {"window": 1 << 20}) == []
    (found,) = pages.missing(of, tables, [137], [1])
    assert (found.group, found.column, found.position) == ("states128", 17, 136)
    (found,) = pages.missing(of, tables, [136], None, {"window": 99})
    assert str(found).endswith("for position 128: it is page 99, which the pool lacks")


def test_narrow_tables_lack_pages():
    of = described("v32")
    (found,) = pages.missing(of, {"rows": np.zeros((1, 2), np.int32)}, [129])
    assert (found.column, found.page) == (2, -1)


def test_debug_raises_for_missing_pages():
    import cumla

    of = described("v4")
    tables = tables_of(of, 2)
    tables["states4"][1, 24] = -3
    pages.check_tables(of, tables, [101, 101], [1, 1])
    with cumla.debug(), pytest.raises(ValueError, match="request 1 needs a page of states4 for position 96: it"):
        pages.check_tables(of, tables, [101, 101], [1, 1])
    tables["states4"][1, 24] = 3
    with cumla.debug():
        pages.check_tables(of, tables, [101, 101], [1, 1])


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"tables": {}}, "tables: got , expected one for each of rows"),
        ({"tables": {"rows": np.zeros(3)}}, r"tables\['rows'\]: got dtype float64, expected integers"),
        (
            {"tables": {"rows": np.zeros((3, 2), int)}},
            r"tables\['rows'\]: got shape \(3, 2\), expected a row for each of 2",
        ),
        ({"query_lens": [3, 9]}, r"query_lens: got \[3, 9\], expected 0 to \[3, 4\], as seq_lens has"),
        ({"description": V4}, "description: got DeepseekV4Config"),
    ],
)
def test_tables_that_do_not_fit(changes, match):
    arguments = {"description": described("v32"), "tables": {"rows": np.zeros((2, 9), int)}, "seq_lens": [3, 4]}
    with pytest.raises((TypeError, ValueError), match=match):
        pages.missing(**(arguments | changes))
