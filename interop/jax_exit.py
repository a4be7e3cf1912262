"""Waits at exit for calls of operations on the host.

They run in XLA's threads, which must not enter Python while the interpreter shuts down. JAX keeps a token of each
running program that has an effect, and jax.effects_barrier waits for the tokens. The callback itself has no side
effect: XLA does not partition a program of several devices around a custom call that has one. A primitive that does
nothing has the effect. It is the effect of jax.debug, as JAX allows this one in loops, checkpoints and custom
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
    """The arrays unchanged; the exit hook waits for a program that computes them, also if no array of it is alive."""
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
        # An error of a running call has been raised already or can no longer be handled.
        with contextlib.suppress(Exception):
            jax.effects_barrier()
        with contextlib.suppress(Exception):  # no such platform
            for array in jax.live_arrays("cpu"):
                with contextlib.suppress(Exception):
                    array.block_until_ready()

    atexit.register(wait)
