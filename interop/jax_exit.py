"""Waits at exit for calls of operations on the host.

The calls run in XLA's threads, which must not enter Python while the interpreter shuts down. JAX keeps a token of each
running program that has an effect, and jax.effects_barrier waits for the tokens. The callback itself has no side
effect: XLA does not partition a program of several devices around a custom call with a side effect. Instead a primitive
that does nothing has the effect. It is the effect of jax.debug, which JAX allows in loops, checkpoints and custom
derivatives.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
from collections.abc import Sequence
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import mlir


def waited_for(arrays: Sequence[Any]) -> list[Any]:
    """The arrays unchanged; the exit hook waits for the program that computes them, even if no array is alive."""
    return _waited_for().bind(*arrays)


@functools.cache
def _waited_for() -> Primitive:
    effects = jax.make_jaxpr(lambda: jax.debug.callback(lambda: None))().effects
    primitive = Primitive("cumla_waited_for")
    primitive.multiple_results = True
    primitive.def_effectful_abstract_eval(lambda *arrays: (list(arrays), effects))
    primitive.def_impl(lambda *arrays: list(arrays))
    mlir.register_lowering(primitive, lambda context, *arrays: list(arrays))
    return primitive


@functools.cache
def wait_at_exit() -> None:
    """Register the exit hook after JAX's own hooks, so that it runs before them."""

    def wait() -> None:
        # An error of a running call was already raised or can no longer be handled.
        with contextlib.suppress(Exception):
            jax.effects_barrier()
        with contextlib.suppress(Exception):  # no such platform
            for array in jax.live_arrays("cpu"):
                with contextlib.suppress(Exception):
                    array.block_until_ready()

    atexit.register(wait)
