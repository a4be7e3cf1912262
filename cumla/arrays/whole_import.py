"""Imports that no signal handler's exception ends halfway."""

from __future__ import annotations

import concurrent.futures
import importlib
import sys
import threading
from types import ModuleType


def import_whole(name: str) -> ModuleType:
    """Import a module that takes long, such as Numba.

    A time limit or Ctrl-C during the import raises its exception here, and the import goes on. (A package that was
    imported halfway cannot be imported again.) Handlers of signals run in the main thread, so another thread imports.
    The main thread does not wait in the import system either: an exception there leaves a module locked.
    Raises the import's errors.
    """
    module = sys.modules.get(name)
    if module is not None and not getattr(getattr(module, "__spec__", None), "_initializing", False):
        return module
    if threading.current_thread() is not threading.main_thread():
        return importlib.import_module(name)
    future: concurrent.futures.Future[ModuleType] = concurrent.futures.Future()

    def run() -> None:
        try:
            future.set_result(importlib.import_module(name))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name=f"cumla imports {name}").start()
    return future.result()
