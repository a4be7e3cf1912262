"""When `cumla.debug` is on: in its thread, within its context, with arrays of any framework, and not in a graph."""

import contextlib
import threading

import numpy as np
import pytest

import cumla
from cumla.dispatch import launch_cache
from support.lab import BF16

BLOCK = 8


def insert(lab, slot, stream=None):
    k, cache = lab.put(np.zeros((2, 512), BF16)), lab.put(cumla.DSV4_FP8.allocate(2, BLOCK))
    slots = lab.put(np.array([0, slot]))
    cumla.quantize_and_insert_k_cache(k, cache, slots, backend=lab.backend, stream=stream)


def test_tensors_of_torch():
    torch = pytest.importorskip("torch")
    k, cache = torch.zeros((2, 576), dtype=torch.bfloat16), torch.from_numpy(cumla.V32_FP8.allocate(2, BLOCK))
    with cumla.debug(), pytest.raises(ValueError, match="slot_mapping: row 0 and row 1 both have slot 3"):
        cumla.quantize_and_insert_k_cache(k, cache, torch.tensor([3, 3]))


def test_nothing_is_read_while_it_is_off(lab, monkeypatch):
    monkeypatch.setattr("cumla.dispatch.debug_checks.values.host", None)
    insert(lab, 99)
    with cumla.debug(), pytest.raises(TypeError):
        insert(lab, 99)
    insert(lab, 99)


def test_it_is_on_while_it_is_on(lab):
    insert(lab, 99)
    with cumla.debug():
        with cumla.debug():
            pass
        with pytest.raises(ValueError, match="slot_mapping: row 1 has slot 99"):
            insert(lab, 99)
    insert(lab, 99)
    with contextlib.suppress(KeyError), cumla.debug():
        raise KeyError
    insert(lab, 99)


def test_it_is_on_in_its_thread(lab):
    failed = []

    def run():
        try:
            insert(lab, 99)
        except ValueError as error:
            failed.append(error)

    with cumla.debug():
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    assert not failed


class TestDevice:
    def test_the_launch_cache_makes_no_call(self, here, monkeypatch):
        insert(here, 5)
        insert(here, 5)
        again, made = launch_cache.KnownCall.again, []
        monkeypatch.setattr(launch_cache.KnownCall, "again", lambda *x: made.append(1) or again(*x))
        with cumla.debug():
            insert(here, 6)
        assert not made
        insert(here, 6)
        assert made

    def test_a_capture_is_an_error(self, here):
        import cupy

        insert(here, 5)
        stream = cupy.cuda.Stream(non_blocking=True)
        cupy.cuda.Device().synchronize()
        k, cache = here.put(np.zeros((1, 512), BF16)), here.put(cumla.DSV4_FP8.allocate(2, BLOCK))
        slots = here.put(np.array([0]))
        with stream, cumla.debug():
            stream.begin_capture()
            try:
                with pytest.raises(ValueError, match=r"cumla\.debug: got a call while a CUDA graph is being captured"):
                    cumla.quantize_and_insert_k_cache(k, cache, slots)
            finally:
                stream.end_capture()


def test_inside_jit_nothing_is_checked():
    jax = pytest.importorskip("jax")
    ops = pytest.importorskip("cumla.interop.jax")
    cache = jax.numpy.asarray(cumla.V32_FP8.allocate(2, BLOCK))
    with cumla.debug():
        out = jax.jit(ops.quantize_and_insert_k_cache)(jax.numpy.zeros((2, 576)), cache, jax.numpy.array([0, 99]))
        jax.block_until_ready(out)
