#!/usr/bin/env python3
"""Rewrite the tables of layers' weights in Markdown pages from `cumla.models.expected_weights`.

A table is between `<!-- weights of NAME -->` and an empty line; LAYERS has the names.
tests/models/test_weight_tables.py compares the page with this script's output.

tools/weight_tables.py docs/reference/layer-weights.md
"""

import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from cumla.models import config_from, expected_weights  # noqa: E402
from tools.published import CONFIGS  # noqa: E402

# The layers of a model that have all weights between them, with one that predicts further tokens.
LAYERS = {
    "V3.2": (0,), "V4": (0, 3), "V4.1": (2, 20, 40), "GLM-5.2": (0, 78), "GLM-5.3-Flash": (3, 45),
    "Mistral Large 4": (0,), "Hy4": (0, 34),
}  # fmt: skip
HEADINGS = ("layers", "tensor", "in transformers", "shape", "of each of 8 ranks", "in FP8 checkpoints")
RANKS = 8
TABLE = re.compile(r"^<!-- weights of ([\w. -]+?) -->\n(?:\|[^\n]*\n)*", re.MULTILINE)


def rewritten(page: str) -> str:
    """The page with the tables of the models that it names."""
    return TABLE.sub(lambda found: found[0].partition("\n")[0] + "\n" + table(found[1]), page)


def table(model: str) -> str:
    config = config_from(CONFIGS[model])
    layers: dict[str, list[int]] = {}
    for layer in LAYERS[model]:
        for name in expected_weights(config, layer):
            layers.setdefault(name, []).append(layer)
    rows = [HEADINGS, ("---",) * len(HEADINGS)]
    for name, having in layers.items():
        weight, part = (expected_weights(config, having[0], ranks=ranks)[name] for ranks in (1, RANKS))
        kind = weight.dtype if weight.block is None else f"{weight.dtype}, scales {shape(weight.scale_shape)}"
        cut = "the whole" if part.part is None else shape(part.shape)
        rows.append((
            ", ".join(map(str, having)), f"`{weight.tensor}`", f"`{weight.transformers}`", shape(weight.shape), cut,
            kind,
        ))  # fmt: skip
    return "".join("| " + " | ".join(row) + " |\n" for row in rows)


def shape(sizes: tuple[int, ...]) -> str:
    return " x ".join(f"{size:,}" for size in sizes)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        path = pathlib.Path(name)
        path.write_text(rewritten(path.read_text()))
