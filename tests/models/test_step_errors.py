"""A layer's step: what does not fit is named before anything is written, and values stay where they belong."""

import dataclasses

import ml_dtypes
import numpy as np
import pytest

from cumla.metadata import ServingConfig
from cumla.models.deepseek_v4 import DeepseekV4Attention, DeepseekV4Caches, DeepseekV4Config
from cumla.models.deepseek_v32 import (
    DeepseekV32Attention,
    DeepseekV32Caches,
    DeepseekV32Config,
    DeepseekV32StepBuilder,
)
from cumla.models.step import DeepseekV4StepBuilder
from support.lab import to_float
from support.models import GoldenLayer, V4Layer, V32Layer

BF16 = ml_dtypes.bfloat16
BATCH = [(0, 6, 1), (2, 8, 1), (1, 5, 7)]  # (request, first position, tokens): two decodes, and a prefill
OTHER = [(0, 6, 1), (2, 8, 2)]


class Started:
    """A layer of V4 with an indexer, or of V3.2, with three running requests; bfloat16 and FP8."""

    def __init__(self, case=8, cache_format="fp8", activations="bfloat16"):
        golden = GoldenLayer(case)
        make = V4Layer if golden.record["model"] == "v4" else V32Layer
        self.made = make(golden, 3, activations=activations, cache_format=cache_format)
        self.made.step([(0, 0, 6), (1, 0, 5), (2, 0, 8)], given=False)
        self.caches = self.made.caches
        self.arguments = {
            "hidden_states": self.hidden(BATCH), "layer_caches": self.caches, "metadata": self.metadata(BATCH)
        }  # fmt: skip

    def hidden(self, batch):
        spans = [self.made.golden.hidden[first : first + count] for _, first, count in batch]
        return np.concatenate(spans).astype(self.made.layer.activations)

    def metadata(self, batch):
        return self.made.build(*self.made.paged.batch(batch))

    def held(self):
        """Bytes of all caches."""
        return [array.tobytes() for array in vars(self.caches).values() if array is not None]


def caches(**changes):
    return lambda s: {"layer_caches": dataclasses.replace(s.caches, **{n: make(s) for n, make in changes.items()})}


def metadata(**changes):
    def of(s):
        other = s.metadata(OTHER)
        found = {name: getattr(other, name) if value is None else value for name, value in changes.items()}
        return {"metadata": dataclasses.replace(s.arguments["metadata"], **found)}

    return of


def selection(shape, dtype=np.int32):
    return lambda s: {"topk_indices": np.full(shape, -1, dtype)}


def none(s):
    return None


def first(name, pages):
    """The first pages of a cache."""
    return caches(**{name: lambda s: getattr(s.arguments["layer_caches"], name)[:pages]})


def rows(layout, block):
    return lambda s: getattr(s.made.layer.layouts, layout).allocate(9, block)


V4_WRONG = {
    "hidden_states as a list": ("hidden_states", lambda s: {"hidden_states": [[1.0]]}, TypeError),
    "hidden_states float32": ("hidden_states", lambda s: {"hidden_states": s.hidden(BATCH).astype("f4")}, TypeError),
    "hidden_states short": ("hidden_states", lambda s: {"hidden_states": s.hidden(BATCH)[1:]}, ValueError),
    "no caches": ("layer_caches", lambda s: {"layer_caches": None}, TypeError),
    "no window": ("layer_caches.window", caches(window=none), TypeError),
    "no compressed rows": ("layer_caches.compressed", caches(compressed=none), ValueError),
    "no states": ("layer_caches.state", caches(state=none), ValueError),
    "no keys": ("layer_caches.indexer", caches(indexer=none), ValueError),
    "no states of keys": ("layer_caches.indexer_state", caches(indexer_state=none), ValueError),
    "a window of another page": ("layer_caches.window", caches(window=rows("v4", 32)), ValueError),
    "rows of another page": ("layer_caches.compressed", caches(compressed=rows("v4", 32)), ValueError),
    "keys of another page": ("layer_caches.indexer", caches(indexer=rows("indexer", 32)), ValueError),
    **{
        f"{name} of no pages": (f"layer_caches.{name}: got 0 pages, expected at least 1", first(name, 0), ValueError)
        for name in ("window", "compressed", "state", "indexer", "indexer_state")
    },
    "rows of another format": (
        "layer_caches.compressed", caches(compressed=lambda s: np.zeros((9, 64, 512), BF16)), TypeError
    ),
    "keys of another format": (
        "layer_caches.indexer", caches(indexer=lambda s: np.zeros((9, 64, 128), BF16)), TypeError
    ),
    "states of another page": (
        "layer_caches.state", caches(state=lambda s: np.zeros((9, 8, 2048), np.float32)), ValueError
    ),
    "both states of another page": (
        "layer_caches.state",
        caches(state=lambda s: np.zeros((9, 8, 2048), "f4"), indexer_state=lambda s: np.zeros((9, 8, 512), "f4")),
        ValueError,
    ),
    "states float64": ("layer_caches.state", caches(state=lambda s: s.caches.state.astype(np.float64)), TypeError),
    "states read-only": ("layer_caches.state", caches(state=lambda s: read_only(s.caches.state)), ValueError),
    "no metadata": ("metadata", lambda s: {"metadata": None}, TypeError),
    "no metadata of the indexer": (
        "metadata.indexer",
        lambda s: {"metadata": dataclasses.replace(s.arguments["metadata"], indexer=None)}, ValueError,
    ),
    "the indexer's of another batch": ("metadata.indexer", metadata(indexer=None), ValueError),
    "the compressor's of another batch": ("metadata", metadata(compressors=None), ValueError),
    "no compressor's": ("metadata", metadata(compressors={}), ValueError),
    "topk_indices int64": ("topk_indices", selection((9, 16), np.int64), TypeError),
    "topk_indices short": ("topk_indices", selection((8, 16)), ValueError),
    "topk_indices flat": ("topk_indices", selection((9,)), ValueError),
    "out of another shape": ("out", lambda s: {"out": np.zeros((3, 3), BF16)}, ValueError),
    "out read-only": ("out", lambda s: {"out": read_only(s.hidden(BATCH))}, ValueError),
}  # fmt: skip
V32_WRONG = {
    "no caches": ("layer_caches", lambda s: {"layer_caches": None}, TypeError),
    "no rows": ("layer_caches.rows", caches(rows=none), TypeError),
    "no keys": ("layer_caches.indexer", caches(indexer=none), TypeError),
    "rows of another page": ("layer_caches.rows", caches(rows=rows("v32", 32)), ValueError),
    "keys of another page": ("layer_caches.indexer", caches(indexer=rows("indexer", 32)), ValueError),
    "rows of no pages": ("layer_caches.rows: got 0 pages, expected at least 1", first("rows", 0), ValueError),
    "keys of no pages": ("layer_caches.indexer: got 0 pages, expected at least 1", first("indexer", 0), ValueError),
    "rows of another format": ("layer_caches.rows", caches(rows=lambda s: np.zeros((9, 64, 576), BF16)), TypeError),
    "no metadata": ("metadata", lambda s: {"metadata": None}, TypeError),
    "the indexer's of another batch": ("metadata.indexer", metadata(indexer=None), ValueError),
    "topk_indices short": ("topk_indices", selection((8, 16)), ValueError),
}


def read_only(array):
    array = array.copy()
    array.flags.writeable = False
    return array


@pytest.fixture(scope="module")
def started():
    return {case: Started(case) for case in (8, 13)}


@pytest.mark.parametrize(
    ("case", "wrong"), [(8, name) for name in V4_WRONG] + [(13, name) for name in V32_WRONG], ids=str
)
def test_what_does_not_fit_is_named_before_anything_is_written(started, case, wrong):
    name, change, error = (V4_WRONG if case == 8 else V32_WRONG)[wrong]
    of = started[case]
    before = of.held()
    with pytest.raises(error, match=name.replace(".", r"\.")):
        of.made.layer.step(**(of.arguments | change(of)))
    assert of.held() == before


@pytest.mark.parametrize(("case", "name", "rows"), [(3, "compressed", 4), (8, "indexer", 4), (13, "rows", 1)])
def test_fewer_pages_than_the_longest_sequence_has(case, name, rows):
    """No two pages of a sequence are the same: the host knows that some of its rows cannot be in the cache."""
    of = Started(case)
    per_page = of.caches.rows.shape[1] if case == 13 else getattr(of.caches, name).shape[1]
    long = dataclasses.replace(of.arguments["metadata"])
    tokens = "tokens" if case == 13 else "window"
    ratio = {3: 128, 8: 4, 13: 1}[case]
    window = dataclasses.replace(getattr(long, tokens), longest=2 * per_page * ratio + ratio)
    before = of.held()
    with pytest.raises(ValueError, match=f"layer_caches.{name}: got 2 pages, expected at least 3 for the"):
        of.made.layer.step(
            **of.arguments | first(name, 2)(of) | {"metadata": dataclasses.replace(long, **{tokens: window})}
        )
    assert of.held() == before


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("activations", ["bfloat16", "float32"])
@pytest.mark.parametrize("case", [2, 3, 8, 13])
def test_poison_stays_with_its_request(case, activations):
    """NaN, infinities and huge values of one request: the bits of the others, now and in the next step."""
    following = [(0, 7, 1), (2, 9, 1), (1, 12, 1)]

    def run(poison):
        of = Started(case, activations=activations)
        x = of.hidden(BATCH)
        if poison is not None:
            x[1] = poison  # a decode of request 2
            x[2 + 4 :] = poison  # the last tokens of request 1
        first = of.made.layer.step(x, of.caches, of.metadata(BATCH))
        second = of.made.layer.step(of.hidden(following), of.caches, of.metadata(following))
        return [first[0], first[2 : 2 + 4], second[0]]

    want = run(None)
    for poison in (np.nan, np.inf, -np.inf, 1e30):
        for got, right in zip(run(poison), want, strict=True):
            np.testing.assert_array_equal(got.view(np.uint8), right.view(np.uint8))


@pytest.mark.parametrize("case", [2, 3, 8, 13])
def test_a_batch_without_requests(case):
    of = Started(case)
    before, x = of.held(), of.hidden(BATCH)[:0]
    out = of.made.layer.step(x, of.caches, of.metadata([]))
    assert out.shape == x.shape
    assert of.held() == before


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("case", [2, 3, 8, 13])
def test_padding_is_not_read(case):
    """Slots of -1 after the tokens: whatever hidden states are there, the same bits, and zeros for the padding.

    The tokens alone give the same up to rounding: a BLAS may add up in another order for another number of rows.
    """
    decodes, results = [(0, 6, 1), (2, 8, 1)], []
    alone = Started(case)
    want = alone.made.layer.step(alone.hidden(decodes), alone.caches, alone.metadata(decodes))
    for padding in (0.0, np.nan, np.inf, 1e30):
        padded = Started(case)
        batch, tables = padded.made.paged.batch(decodes)
        batch = dataclasses.replace(batch, num_actual_tokens=4, slot_mapping=np.append(batch.slot_mapping, [-1, -1]))
        x = np.concatenate([padded.hidden(decodes), np.full((2, want.shape[1]), padding, BF16)])
        got = padded.made.layer.step(x, padded.caches, padded.made.build(batch, tables))
        results.append((got.tobytes(), padded.held()))
        assert (got[2:] == 0).all()
        np.testing.assert_allclose(
            to_float(got[:2]), to_float(want), rtol=0.02, atol=1e-3 * np.abs(to_float(want)).max()
        )
    assert all(result == results[0] for result in results)


@pytest.mark.parametrize("case", [3, 8, 13])
def test_sequences_beyond_the_tables_are_named(case):
    """Rows and queries after the last position of RoPE's tables would not be rotated."""
    of = Started(case)
    before, cos_sin = of.held(), of.made.layer.cos_sin
    of.made.layer.cos_sin = cos_sin[:11]
    with pytest.raises(ValueError, match=r"metadata: got sequences of up to 12 tokens, expected at most the 11"):
        of.made.layer.step(**of.arguments)
    assert of.held() == before
    of.made.layer.cos_sin = cos_sin[:12]
    of.made.layer.step(**of.arguments)


@pytest.mark.parametrize("window", [64, 127, 129, 256])
def test_metadata_of_another_window_is_named(window):
    of = Started(3)
    before = of.held()
    config = dataclasses.replace(of.made.builder.config, window_size=window)
    of.made.builder = DeepseekV4StepBuilder(config)
    with pytest.raises(ValueError, match=rf"metadata: got a window_size of {window} in the builder's config, .* 128"):
        of.made.layer.step(**(of.arguments | {"metadata": of.metadata(BATCH)}))
    assert of.held() == before


TABLES = {
    "states": ("state", lambda x: x[:, :2], ValueError, "3 columns"),
    "states that are not int32": ("state", lambda x: x.astype(np.int64), TypeError, "int64"),
    "states of other requests": ("state", lambda x: x[:2], ValueError, "shape"),
    "compressed rows": ("compressed", lambda x: x[:, :0], ValueError, "1 columns"),
    "compressed rows that are not int32": ("compressed", lambda x: x.astype(np.int64), TypeError, "int64"),
}


@pytest.mark.parametrize("wrong", TABLES)
def test_tables_that_do_not_hold_a_steps_sequences_are_named(wrong):
    """Sequences of up to 12 tokens: states of 4 positions a page, compressed rows of 256."""
    pool, change, error, says = TABLES[wrong]
    made = Started().made
    batch, tables = made.paged.batch(BATCH)
    name = {"state": r"state_block_tables\[4\]", "compressed": "compressed_block_table"}[pool]
    with pytest.raises(error, match=f"^{name}: .*{says}"):
        made.build(batch, tables | {pool: change(tables[pool])})
    made.build(batch, tables | {"state": tables["state"][:, :3], "compressed": tables["compressed"][:, :1]})


OPTIONS = {
    "layer beyond the model": ("layer", {"layer": 99}, ValueError),
    "layer negative": ("layer", {"layer": -1}, ValueError),
    "layer a float": ("layer", {"layer": 0.0}, TypeError),
    "activations of integers": ("activations", {"activations": "int8"}, ValueError),
    "unsupported activations of 16 bits": ("activations", {"activations": np.float16}, ValueError),
    "no activations": ("activations", {"activations": None}, ValueError),
    "an unknown format": ("cache_format", {"cache_format": "int4"}, ValueError),
    "no position": ("max_position", {"max_position": 0}, ValueError),
    "scratch that is none": ("scratch", {"scratch": {}}, TypeError),
    "no weights": ("weights", {"weights": None}, TypeError),
    "a configuration that was not read": ("config", {"config": {"hidden_size": 256}}, TypeError),
    "an unknown backend": ("backend", {"backend": "cobol"}, ValueError),
    "weights transposed": ("q_b_proj.weight", {"q_b_proj.weight": lambda w: w.T}, ValueError),
    "weights of integers": ("q_b_proj.weight", {"q_b_proj.weight": lambda w: w.astype(np.int32)}, TypeError),
    "weights in a list": ("q_b_proj.weight", {"q_b_proj.weight": lambda w: w.tolist()}, TypeError),
}


SERVING = ServingConfig(compress_ratios=(4, 128))
MADE_OF = {
    "another ratio": (lambda: DeepseekV4Caches.allocate(5, SERVING, 1), "compress_ratio: got 5, expected 1, 4 or 128"),
    "a ratio of 0": (lambda: DeepseekV4Caches.allocate(0, SERVING, 1), "compress_ratio: got 0"),
    "no serving": (lambda: DeepseekV4Caches.allocate(4, None, 1), "serving: got None"),
    "pages below none": (lambda: DeepseekV4Caches.allocate(4, SERVING, -1), "blocks: got -1"),
    "pages of numbers below none": (
        lambda: DeepseekV4Caches.allocate(4, SERVING, -1, cache_format="float32"), "blocks: got -1"
    ),
    **{
        f"{name} left out, {kind}": (
            lambda kind=kind, given=given: DeepseekV4Caches.allocate(*given, cache_format=kind),
            f"{name}: got 0, expected at least 1",
        )
        for kind in ("fp8", "bfloat16", "float32")
        for name, given in (
            ("blocks", (1, SERVING, 0)), ("compressed_blocks", (4, SERVING, 1)), ("state_blocks", (128, SERVING, 1, 1)),
        )
    },
    "no pages of V3.2": (lambda: DeepseekV32Caches.allocate(0, cache_format="bfloat16"), "blocks: got 0"),
    "compressed pages below none": (lambda: DeepseekV4Caches.allocate(4, SERVING, 1, -1), "compressed_blocks: got -1"),
    "states below none": (lambda: DeepseekV4Caches.allocate(4, SERVING, 1, 1, -1), "state_blocks: got -1"),
    "states of no position": (
        lambda: DeepseekV4Caches.allocate(4, SERVING, 1, 1, 1, state_block_size=0), "state_block_size: got 0"
    ),
    "pages of half a token": (
        lambda: DeepseekV32Caches.allocate(1, 0.5, "bfloat16"), "block_size: got 0.5 of type float"
    ),
    "no config": (lambda: DeepseekV4StepBuilder(None), "config: got None"),
    "no config of V3.2": (lambda: DeepseekV32StepBuilder(None), "config: got None"),
    "V4's config": (lambda: DeepseekV32StepBuilder(SERVING), "config.compress_ratios: got"),
    "V4.1's config for V3.2": (
        lambda: DeepseekV32StepBuilder(ServingConfig(compress_ratios=(1,), has_c1a=True)), "config.has_c1a: got True"
    ),
    "V4.1's config for V4": (
        lambda: DeepseekV4StepBuilder(dataclasses.replace(SERVING, has_c1a=True)), "config.has_c1a: got True"
    ),
    "blocks of draft layers for V3.2": (
        lambda: DeepseekV32StepBuilder(ServingConfig(noncausal_decodes=True)), "config.noncausal_decodes: got True"
    ),
    "V4.1's ratio for V4": (
        lambda: DeepseekV4StepBuilder(ServingConfig(compress_ratios=(0, 2))), "config.compress_ratios: got"
    ),
    "no sizes": (lambda: DeepseekV4StepBuilder(SERVING, state_block_sizes=None), "state_block_sizes: got None"),
    "a size that is missing": (
        lambda: DeepseekV4StepBuilder(SERVING, state_block_sizes={4: 4}), r"state_block_sizes: got \{4: 4\}, .* for 128"
    ),
    **{
        f"a size of {size}": (
            lambda size=size: DeepseekV4StepBuilder(SERVING, state_block_sizes={4: 4, 128: size}),
            r"state_block_sizes\[128\]: got",
        )
        for size in (0, 1.5, "4", 2**31, None)
    },
}  # fmt: skip


@pytest.mark.parametrize("wrong", MADE_OF)
def test_builders_and_caches_say_what_they_do_not_take(wrong):
    make, text = MADE_OF[wrong]
    with pytest.raises((TypeError, ValueError), match=f"^{text}"):
        make()


def is_of_v4_alone(x):
    """A V3.2 configuration has no list of layers."""
    return x.get("case") == 13 and x.get("wrong") == "layer beyond the model"


@pytest.mark.nowhere(when=is_of_v4_alone)
@pytest.mark.parametrize("wrong", OPTIONS)
@pytest.mark.parametrize("case", [3, 13])
def test_a_layer_says_what_it_does_not_take(case, wrong):
    name, change, error = OPTIONS[wrong]
    golden = GoldenLayer(case)
    config, layer = (DeepseekV4Config, DeepseekV4Attention) if case == 3 else (DeepseekV32Config, DeepseekV32Attention)
    arguments = {"config": config.from_dict(golden.config), "layer": 0, "weights": golden.weights, "max_position": 64}
    weights = {name: value(golden.weights[name]) for name, value in change.items() if name in golden.weights}
    arguments |= {"weights": golden.weights | weights} if weights else change
    with pytest.raises(error, match=name.replace(".", r"\.")):
        layer(**arguments)


@pytest.mark.parametrize("case", [3, 13])
def test_numpy_integers_make_the_same_layer(case):
    golden = GoldenLayer(case)
    config, layer = (DeepseekV4Config, DeepseekV4Attention) if case == 3 else (DeepseekV32Config, DeepseekV32Attention)
    plain = {name: type(value) is int for name, value in golden.config.items()}
    numbers = {name: np.int64(value) if plain[name] else value for name, value in golden.config.items()}
    made = layer(config.from_dict(numbers), np.int32(0), golden.weights, max_position=np.int64(64))
    q_b = golden.weights["q_b_proj.weight"]
    np.testing.assert_array_equal((made.q_b if case == 3 else made.queries)[: len(q_b)], q_b)


VIEWS = {
    "every other row": lambda x: np.repeat(x, 2, axis=0)[::2],
    "every other column": lambda x: np.repeat(x, 2, axis=1)[:, ::2],
    "columns of more": lambda x: np.concatenate([x, x], axis=1)[:, : x.shape[1]],
    "columns first": np.asfortranarray,
    "backwards": lambda x: x[::-1].copy()[::-1],
    "read-only": lambda x: read_only(x),
}


@pytest.mark.parametrize("kind", VIEWS)
def test_views_are_taken_as_they_are(kind):
    of, again = Started(), Started()
    want = of.made.layer.step(**of.arguments)
    x = again.arguments["hidden_states"]
    out = np.zeros((2 * len(x), x.shape[1]), x.dtype)[::2]
    got = again.made.layer.step(VIEWS[kind](x), again.caches, again.arguments["metadata"], out=out)
    assert got is out
    np.testing.assert_array_equal(got.view(np.uint16), want.view(np.uint16))
