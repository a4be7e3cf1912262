"""The peers' own outputs (tests/data/README.md)."""

import functools
import json
import pathlib

import numpy as np

DATA = pathlib.Path(__file__).parent.parent / "data"


@functools.cache
def kernels():
    with np.load(DATA / "kernels.npz") as archive:
        return dict(archive)


def cases(function):
    """The case numbers of a function in kernels.npz."""
    return sorted({key.split("/")[1] for key in kernels() if key.startswith(function + "/")}, key=int)


def case(function, number):
    """The arrays of one case; copies, so that tests may write."""
    prefix = f"{function}/{number}/"
    found = {key[len(prefix) :]: value for key, value in kernels().items() if key.startswith(prefix)}
    return {key: value.item() if value.ndim == 0 else value.copy() for key, value in found.items()}


def metadata(function):
    """The cases of a function in metadata.json, as (in, out)."""
    records = json.loads((DATA / "metadata.json").read_text())
    return [(record["in"], record["out"]) for record in records if record["fn"] == function]
