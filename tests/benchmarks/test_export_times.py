"""benchmarks/export.py's measurements, on libcuda's stand-in."""

import ctypes

import export
import numpy as np
import pytest

from cumla.kernels.cuda.device import described
from cumla.specs.inputs import Size
from cumla.specs.measured import Measured
from support import runtime


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    place, out = runtime.folder(), tmp_path_factory.mktemp("host") / "libhost.so"
    source = runtime.HERE.parents[1] / "benchmarks/export_host.c"
    runtime.built(runtime.libcuda(place), "-shared", "-fPIC", "-I", place, "-o", out, source, "-ldl")
    return export.library_at(out)


def test_parts_of_opening(library):
    data = runtime.file("v4")
    assert len(export.opening(library, data, repeats=2)) == len(export.PARTS)
    with pytest.raises(RuntimeError, match="checksum"):
        export.opening(library, data[:-1] + bytes([data[-1] ^ 1]))


def test_calls_of_a_step_are_served_and_measured(library):
    data, handle = runtime.file("v4"), ctypes.c_void_p()
    assert library.cumla_open_memory(data, len(data), 0, ctypes.byref(handle)) == 0
    size = Size(8, 8, tokens=8, rows=8, heads=64, topk=512, window=128, context=1024, block_size=64, pages=40)
    launches = {}
    with described(runtime.H200):
        for operation, given in export.step_calls(Measured("reference", size), runtime.MODELS["v4"]):
            fields, arguments = export.whole(np, operation, given)
            by_c, by_driver, launches[operation] = export.medians(library, handle, fields, arguments, None, batches=2)
            assert min(by_c, by_driver) > 0
    library.cumla_close(handle)
    assert list(launches.values()) == [1, 1, 1, 2, 1]
    ctypes.CDLL(str(runtime.folder() / "libstandin.so")).stand_in_launches((runtime.Launched * 64)())
