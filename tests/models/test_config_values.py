"""Values derived from a configuration, compared with transformers' formulas."""

import math

import numpy as np
import pytest

from cumla.models.deepseek_v4 import DeepseekV4Config
from cumla.models.deepseek_v32 import DeepseekV32Config
from cumla.models.rope import cos_sin_table
from support.models import GoldenLayer, V32Layer, records

V4, V32 = (records("models")[case]["config"] for case in (0, 2))
YARN = {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 64, "beta_fast": 32, "beta_slow": 1}


@pytest.mark.parametrize(
    ("rope", "factor"),
    [
        (None, 1.0),
        (YARN, 1.0),
        (YARN | {"mscale": 1.0}, 1.0),
        (YARN | {"factor": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}, 1.0),
        (YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}, (0.1 * math.log(40) + 1) ** 2),
        (YARN | {"mscale": 1.0, "mscale_all_dim": 0.5}, (0.05 * math.log(40) + 1) ** 2),
    ],
)
def test_softmax_scale_of_v32(rope, factor):
    """1 / sqrt(128 + 64), and YaRN's temperature twice: once for the queries, once for the keys."""
    config = DeepseekV32Config.from_dict(V32 | {"qk_nope_head_dim": 128, "rope_scaling": rope, "rope_parameters": None})
    assert config.softmax_scale == pytest.approx(192**-0.5 * factor, rel=1e-12)


@pytest.mark.parametrize(
    ("mscales", "factor"),
    [
        ({}, 0.1 * math.log(40) + 1),
        ({"mscale": 0.5}, 0.1 * math.log(40) + 1),  # either entry without the other is ignored
        ({"mscale_all_dim": 0.5}, 0.1 * math.log(40) + 1),
        ({"mscale": 1.0, "mscale_all_dim": 1.0}, 1.0),
        ({"mscale": 1.0, "mscale_all_dim": 0.5}, (0.1 * math.log(40) + 1) / (0.05 * math.log(40) + 1)),
        ({"mscale": 1.0, "mscale_all_dim": 1.0, "attention_factor": 0.7}, 0.7),
    ],
)
def test_factor_of_cosines_and_sines(mscales, factor):
    np.testing.assert_allclose(cos_sin_table(64, 10000.0, 1, YARN | mscales)[0, :32], factor, rtol=1e-7)


def test_softmax_scale_reaches_the_layer():
    """A temperature of 2, which does not change cosines, gives the result of queries that are 4 times as large."""
    plain, tempered = GoldenLayer(13), GoldenLayer(13)
    weight = 10 / math.log(YARN["factor"])  # a temperature of 2
    plain.config = plain.config | {"rope_scaling": YARN | {"attention_factor": 1.0}}
    tempered.config = tempered.config | {"rope_scaling": YARN | {"mscale": weight, "mscale_all_dim": weight}}
    plain.weights["q_b_proj.weight"] = 4 * plain.weights["q_b_proj.weight"]
    want, got = V32Layer(plain).run([64, 1]), V32Layer(tempered).run([64, 1])
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * np.abs(want).max())


def test_the_ramp_of_v4_is_rounded_whatever_truncate_says():
    """transformers' V4 computes the ramp without truncate."""
    plain = cos_sin_table(64, 160000.0, 99, YARN), cos_sin_table(64, 160000.0, 99, YARN | {"truncate": False})
    assert np.abs(plain[0] - plain[1]).max() > 0.01
    for rope in (YARN, {"main": {"rope_theta": 10000.0}, "compress": YARN}):
        tables = []
        for truncate in ({}, {"truncate": True}, {"truncate": False}):
            changed = rope | truncate if "main" not in rope else rope | {"compress": YARN | truncate}
            config = DeepseekV4Config.from_dict(V4 | {"rope_parameters": changed})
            tables.append(config.spec(config.compress_ratios.index(4)).cos_sin_table(99))
        for table in tables[1:]:
            np.testing.assert_array_equal(table, tables[0])
