"""The example's GLM-5.2 and GLM-5.3-Flash, tiny: transformers' logits and greedy tokens."""

import re

import glm
import pytest

from support.family_stack import GOLDEN, check_tiny_model

GLM_52, FLASH = 0, 1  # golden cases


@pytest.mark.parametrize(("case", "kind"), [(GLM_52, glm.Model), (FLASH, glm.Flash)])
def test_logits_and_greedy_tokens_are_transformers(case, kind):
    check_tiny_model(case, kind)


@pytest.mark.parametrize(("case", "config"), [(GLM_52, glm.TOY), (FLASH, glm.FLASH)])
def test_a_toy_has_the_weights_of_transformers(case, config):
    ours, theirs = (
        {re.sub(r".*layers\.\d+\.", "", name) for name in names}
        for names in (glm.shapes_of(config), GOLDEN["models"][case]["parameters"])
    )
    assert ours == theirs
