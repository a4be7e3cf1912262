"""The oracles against golden outputs of the models' code in float64, and the test of a selection's margin."""

import numpy as np
import pytest

import oracles
from cumla.models import config_from
from oracles.selection import best, gap
from oracles.v41 import Shared
from support import family_stack
from support.family_stack import GOLDEN as FAMILY
from support.models import DeepseekV4Config, DeepseekV32Config, GoldenLayer, records, relative_rms
from support.v41_stack import AMBIGUOUS, GOLDEN, golden_arrays, hidden_states, oracle_of

CONFIGS = {"v4": DeepseekV4Config, "v32": DeepseekV32Config}
BOUND = 2e-6  # RoPE's table is float32 in all of the models' code
TIES = {7: [371], 9: [312]}  # tokens with a tie that torch broke (tests/data/README.md)
SHORT = 320  # tokens


def cases(count_of, count):
    return [case if count_of(case) <= SHORT else pytest.param(case, marks=pytest.mark.slow) for case in range(count)]


@pytest.mark.parametrize("case", cases(lambda case: sum(records("layers")[case]["splits"]), len(records("layers"))))
def test_layers_of_v4_and_v32(case):
    golden = GoldenLayer(case)
    config = CONFIGS[golden.record["model"]].from_dict(golden.config)
    layer, x = oracles.layer_of(config, 0, golden.weights, golden.tokens), golden.hidden.astype(np.float64)
    if golden.topk is None:
        assert relative_rms(layer(x), golden.out) < BOUND
        return
    visible = np.arange(1, golden.tokens + 1) // getattr(layer, "ratio", 1)
    given = [np.unique(row[(row >= 0) & (row < end)]) for row, end in zip(golden.topk, visible, strict=True)]
    assert relative_rms(layer(x, given), golden.out) < BOUND
    different = [t for t, chosen in enumerate(layer.chosen(x)) if not np.array_equal(chosen, given[t])]
    if golden.record["model"] == "v4":
        assert different == TIES.get(case, [])
    else:  # scores are often exactly 0
        assert len(different) < 0.05 * golden.tokens


@pytest.mark.parametrize(
    ("case", "request_"),
    [
        pytest.param(case, request, marks=[] if sum(tokens) <= SHORT else pytest.mark.slow)
        for case, record in enumerate(GOLDEN["cases"])
        for request, tokens in enumerate(record["requests"])
    ],
)
def test_stacks_of_v41(case, request_):
    prefix, shared, found = f"{case}/{request_}", Shared(), golden_arrays()
    tokens, picked = (found[f"{prefix}/{name}"] for name in ("rows", "pick_rows"))
    for number, x in enumerate(hidden_states(case, request_).astype(np.float64)):
        layer = oracle_of(case, number)
        out = layer(x, shared)
        assert relative_rms(out[tokens], found[f"{prefix}/out"][number]) < BOUND
        if layer.mode not in ("full", "reindex"):
            continue
        clear = found[f"{prefix}/gap{number}"] > AMBIGUOUS
        assert clear.mean() > 0.9
        for token, want in zip(picked, found[f"{prefix}/picks{number}"], strict=True):
            if clear[token]:
                np.testing.assert_array_equal(shared.chosen[token], want[want >= 0])


@pytest.mark.parametrize(
    ("case", "request_"),
    [
        pytest.param(case, request, marks=[] if sum(tokens) <= SHORT else pytest.mark.slow)
        for case, record in enumerate(FAMILY["stacks"])
        for request, tokens in enumerate(record["requests"])
    ],
)
def test_stacks_of_the_family(case, request_):
    """Layers of GLM, GLM-5.3-Flash, Mistral Large 4 and Hy4, over their own rows and selections or a source's."""
    record, prefix, found = FAMILY["stacks"][case], f"{case}/{request_}", family_stack.golden_arrays()
    config, longest = config_from(record["config"]), sum(record["requests"][request_])
    hidden, tokens = family_stack.hidden_states(case, request_).astype(np.float64), found[f"{prefix}/rows"]
    rows, chosen = {}, {}
    for index, number in enumerate(record["attention_layers"]):
        spec, x = config.spec(number), hidden[index]
        layer = oracles.layer_of(config, number, family_stack.weights_of_module(case, number), longest)
        if spec.owns_rows:
            rows[number] = layer.rows(x, np.arange(longest))
        clear = found[f"{prefix}/gap{spec.selection_source}"] > AMBIGUOUS
        assert clear.mean() > 0.9
        if spec.selects:
            chosen[number] = layer.chosen(x)
            for token, want in zip(found[f"{prefix}/pick_rows"], found[f"{prefix}/picks{number}"], strict=True):
                if clear[token]:
                    want = want[want >= 0, None] * spec.pool + np.arange(spec.pool)
                    last = np.arange((token + 1) // spec.pool * spec.pool, token + 1)
                    np.testing.assert_array_equal(chosen[number][token], [*want.ravel(), *last])
        out = layer(x, chosen[spec.selection_source], rows[spec.row_source])
        shown = clear[tokens]
        assert relative_rms(out[tokens[shown]], found[f"{prefix}/out"][index][shown]) < BOUND


def test_the_best_of_equal_scores_are_the_first():
    np.testing.assert_array_equal(best(np.array([1.0, 3, 1, 0, 1]), 3), [0, 1, 2])
    np.testing.assert_array_equal(best(np.array([1.0, 0]), 3), [0, 1])


def test_the_gap_of_a_choice():
    scores = np.array([3.0, 1, 2, 0])
    assert gap(scores, np.array([0, 2]), 2) == 0
    assert gap(scores, np.array([0, 1, 2, 3]), 8) == 0
    assert gap(scores, np.array([0, 1]), 2) == pytest.approx(1 / scores.std())
    for wrong in ([0], [0, 0], [2, 0], [0, 4], [0, 1, 2]):
        assert gap(scores, np.array(wrong), 2) == float("inf")
