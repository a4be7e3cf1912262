"""How a call treats its arguments."""

import numpy as np
import pytest

from support.calls import NAMES, call
from support.capsules import Foreign
from support.operations import rebuilt


class Counted(Foreign):
    """An array of another library that counts how often it is exported."""

    exports = 0

    def __dlpack__(self, stream=None):
        self.exports += 1
        return super().__dlpack__(stream)


@pytest.mark.parametrize("name", NAMES)
def test_an_argument_is_borrowed_once(name):
    right, counted = call(name), {}

    def count(name, value):
        if isinstance(value, tuple | list):
            return rebuilt(value, [count(f"{name}[{i}]", x) for i, x in enumerate(value)])
        if not isinstance(value, np.ndarray) or not value.flags.c_contiguous:
            return value
        counted[name] = Counted(value)
        return counted[name]

    arguments = {key: count(key, value) for key, value in right.arguments.items()}
    right.function(**{"backend": "reference", **arguments})
    assert {key: array.exports for key, array in counted.items() if array.exports > 1} == {}
