"""Where ranks leave word for one another: in a process, in a folder that all see, or with one of them over TCP.

Only words go this way: who is there, what each is about to do, who failed. Arrays go through a communicator.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import tempfile
import threading
import time
from multiprocessing.managers import BaseManager
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote


class Store(Protocol):
    """Values by key. A key is set once by one rank; any may read it."""

    def set(self, key: str, value: Any) -> None: ...

    def get(self, key: str) -> Any:
        """The value, or None where there is none yet."""

    def delete(self, key: str) -> None: ...

    def wait(self, seconds: float) -> None:
        """Return when something was set, or after so many seconds, whichever is sooner; maybe earlier."""


class MemoryStore:
    """For ranks that are threads of one process: values stay what they are."""

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}
        self._changed, self._sets = threading.Condition(), 0
        self._seen = threading.local()  # how many sets there were when this thread's last wait ended

    def set(self, key: str, value: Any) -> None:
        with self._changed:
            self._values[key] = value
            self._sets += 1
            self._changed.notify_all()

    def get(self, key: str) -> Any:
        return self._values.get(key)

    def delete(self, key: str) -> None:
        self._values.pop(key, None)

    def wait(self, seconds: float) -> None:
        with self._changed:
            if getattr(self._seen, "sets", None) == self._sets:  # else something was set between a look and this
                self._changed.wait(seconds)
            self._seen.sets = self._sets


POLL_SECONDS = 0.002


class FileStore:
    """A folder that all ranks see, empty at the start of a run: a file a value."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._folder = Path(folder)
        self._folder.mkdir(parents=True, exist_ok=True)

    def set(self, key: str, value: Any) -> None:
        handle, name = tempfile.mkstemp(dir=self._folder, prefix=".")
        with os.fdopen(handle, "wb") as file:
            pickle.dump(value, file)
        os.replace(name, self._path(key))  # whole or not at all

    def get(self, key: str) -> Any:
        try:
            return pickle.loads(self._path(key).read_bytes())
        except FileNotFoundError:
            return None

    def delete(self, key: str) -> None:
        self._path(key).unlink(missing_ok=True)

    def wait(self, seconds: float) -> None:
        time.sleep(min(seconds, POLL_SECONDS))

    def _path(self, key: str) -> Path:
        return self._folder / quote(key, safe="")


class _Manager(BaseManager):
    values: Any  # as registered


class TcpStore:
    """Values kept by one process, which calls `serve`, and read by the others over TCP.

    address  (host, port) of the one that serves
    key      a secret of the run, without which nobody is let in
    """

    def __init__(self, address: tuple[str, int], key: bytes, time_limit: float = 60.0) -> None:
        _Manager.register("values")
        end = time.monotonic() + time_limit
        while True:
            self._manager = _Manager(address, key)
            try:
                self._manager.connect()
                break
            except ConnectionRefusedError:
                if time.monotonic() > end:
                    raise TimeoutError(f"address: nobody serves {address} after {time_limit:.0f} s") from None
                time.sleep(0.05)
        self._values = self._manager.values()
        self._lock = threading.Lock()

    @staticmethod
    def serve(key: bytes, host: str = "127.0.0.1", port: int = 0) -> tuple[str, int]:
        """Keep values in this process, in a thread, until it ends. Returns the address; port 0: any free one."""
        values: dict[str, Any] = {}
        manager: Any = type("Manager", (BaseManager,), {})
        manager.register("values", callable=lambda: values, exposed=("get", "update", "pop"))
        server = manager((host, port), key).get_server()
        threading.Thread(target=_serve, args=(server,), daemon=True).start()
        return server.address

    def set(self, key: str, value: Any) -> None:
        with self._lock:
            self._values.update({key: pickle.dumps(value)})

    def get(self, key: str) -> Any:
        with self._lock:
            held = self._values.get(key)
        return None if held is None else pickle.loads(held)

    def delete(self, key: str) -> None:
        with self._lock:
            self._values.pop(key, None)

    def wait(self, seconds: float) -> None:
        time.sleep(min(seconds, POLL_SECONDS))


def _serve(server: Any) -> None:
    with contextlib.suppress(SystemExit):
        server.serve_forever()
