"""NVTX ranges around operations. They are chosen at import, so each test has a process of its own."""

import os
import subprocess
import sys
import textwrap

import pytest

RECORDER = """
import numpy as np
import cumla
from cumla.dispatch import ranges

events = []

ranges.library = lambda: (events.append, lambda: events.append("end"))
"""


def run(code, value="1", **options):
    environment = os.environ | {"CUMLA_NVTX": value}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        **options,
    )
    assert done.returncode == 0, done.stderr
    return done


CALLS = RECORDER + textwrap.dedent("""
    k, cache = np.zeros((2, 512), np.float32), cumla.DSV4_FP8.allocate(1, 64)
    for _ in range(2):
        cumla.quantize_and_insert_k_cache(k, cache, np.arange(2), backend="reference")
    try:
        cumla.quantize_and_insert_k_cache(k, cache, None, backend="reference")
    except TypeError:
        pass
    cumla.copy_spans([cache], [cache.copy()], np.zeros((0, 7), np.int32), backend="reference")
    print(events)
""")


def test_each_call_is_one_range_also_if_it_raises():
    insert = ["cumla.quantize_and_insert_k_cache", "end"]
    assert run(CALLS).stdout.strip() == str(insert * 3 + ["cumla.copy_spans", "end"])


@pytest.mark.parametrize("value", ["", "0"])
def test_no_range_unless_asked_for(value):
    assert run(CALLS, value).stdout.strip() == "[]"


def test_repeated_calls_are_ranges():
    code = (
        "import sys; sys.path.insert(0, 'tests')"
        + RECORDER
        + textwrap.dedent("""
        import emulation

        if emulation.unavailable():
            sys.exit()
        with emulation.devices():
            import cupy
            from cumla.dispatch import launch_cache

            repeats = []
            again = launch_cache.KnownCall.again
            launch_cache.KnownCall.again = lambda *x: repeats.append(1) or again(*x)
            out, prefix, suffix = (cupy.zeros((1, 1, 128), np.float32) for _ in range(3))
            lse = cupy.zeros((1, 1), np.float32)
            for _ in range(3):
                cumla.merge_attn_states(out, prefix, lse, suffix, lse)
            assert repeats
            assert events == ["cumla.merge_attn_states", "end"] * 3, events
    """)
    )
    run(code)


def test_without_cupy_a_warning_is_logged_once():
    code = textwrap.dedent("""
        import logging, sys
        sys.modules["cupy"] = None
        logging.basicConfig()
        import numpy as np
        import cumla
        k, cache = np.zeros((2, 512), np.float32), cumla.DSV4_FP8.allocate(1, 64)
        for _ in range(2):
            cumla.quantize_and_insert_k_cache(k, cache, np.arange(2), backend="reference")
    """)
    assert run(code).stderr.count("CUMLA_NVTX: expected CuPy") == 1


@pytest.mark.gpu
def test_ranges_of_cupy():
    run("import cumla, cupy\nfrom cumla.dispatch import ranges\nassert 'nvtx' in ranges.library()[0].__module__\n"
        "k, cache = cupy.zeros((2, 512), 'float32'), cumla.DSV4_FP8.allocate(1, 64, xp=cupy)\n"
        "cumla.quantize_and_insert_k_cache(k, cache, cupy.arange(2))\n")  # fmt: skip
