"""Steps at the edges of what a layer takes: values that are no numbers, padding, no requests, any views."""

import dataclasses

import ml_dtypes
import numpy as np
import pytest

from cumla.models.deepseek_v4 import DeepseekV4Attention, DeepseekV4Config
from cumla.models.deepseek_v32 import (
    DeepseekV32Attention,
    DeepseekV32Config,
)
from support.lab import to_float
from support.models import GoldenLayer, Started
from support.refused import read_only

BF16 = ml_dtypes.bfloat16


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("activations", ["bfloat16", "float32"])
@pytest.mark.parametrize("case", [2, 3, 8, 13])
def test_poison_stays_with_its_request(case, activations):
    """NaN, infinities and huge values of one request: the bits of the others, now and in the next step."""
    following = [(0, 7, 1), (2, 9, 1), (1, 12, 1)]

    def run(poison):
        of = Started(case, activations=activations)
        x = of.hidden(Started.BATCH)
        if poison is not None:
            x[1] = poison  # a decode of request 2
            x[2 + 4 :] = poison  # the last tokens of request 1
        first = of.made.layer.step(x, of.caches, of.metadata(Started.BATCH))
        second = of.made.layer.step(of.hidden(following), of.caches, of.metadata(following))
        return [first[0], first[2 : 2 + 4], second[0]]

    want = run(None)
    for poison in (np.nan, np.inf, -np.inf, 1e30):
        for got, right in zip(run(poison), want, strict=True):
            np.testing.assert_array_equal(got.view(np.uint8), right.view(np.uint8))


@pytest.mark.parametrize("case", [2, 3, 8, 13])
def test_a_batch_without_requests(case):
    of = Started(case)
    before, x = of.held(), of.hidden(Started.BATCH)[:0]
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


@pytest.mark.parametrize("case", [3, 13])
def test_numpy_integers_make_the_same_layer(case):
    golden = GoldenLayer(case)
    config, layer = (DeepseekV4Config, DeepseekV4Attention) if case == 3 else (DeepseekV32Config, DeepseekV32Attention)
    plain = {name: type(value) is int for name, value in golden.config.items()}
    numbers = {name: np.int64(value) if plain[name] else value for name, value in golden.config.items()}
    made = layer(config.from_dict(numbers), np.int32(0), golden.weights, max_position=np.int64(64))
    q_b = golden.weights["q_b_proj.weight"]
    np.testing.assert_array_equal(made.queries.q_b[: len(q_b)], q_b)


VIEWS = {
    "every other row": lambda x: np.repeat(x, 2, axis=0)[::2],
    "every other column": lambda x: np.repeat(x, 2, axis=1)[:, ::2],
    "columns of more": lambda x: np.concatenate([x, x], axis=1)[:, : x.shape[1]],
    "columns first": np.asfortranarray,
    "backwards": lambda x: x[::-1].copy()[::-1],
    "read-only": read_only,
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
