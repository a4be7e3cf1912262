"""Checks that all calls of a layer run on the backend that the layer was given."""

import contextlib
from unittest import mock

from cumla.dispatch import call


@contextlib.contextmanager
def only(backend):
    """A context in which an operation on another backend is an error: a call then did not pass `backend` on."""
    choose, others = call.choose, set()

    def chosen(name, on_device):
        found = choose(name, on_device)
        if found != backend:
            others.add(found)
        return found

    with mock.patch.object(call, "choose", chosen):
        yield
    assert not others, f"operations on {sorted(others)}, expected {backend} alone"
