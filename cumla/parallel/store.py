"""Stores for messages between ranks: in a process, in a folder that all ranks see, or in one rank over TCP.

Messages are short: the ranks that are present, the next call of each, ranks that failed. A communicator moves arrays.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import tempfile
import threading
import time
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Listener, answer_challenge, deliver_challenge
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote


class Store(Protocol):
    """Values by key. A key is set once by one rank; any may read it."""

    def set(self, key: str, value: Any) -> None: ...

    def get(self, key: str) -> Any:
        """The value, or None if the key is not set yet."""

    def delete(self, key: str) -> None: ...

    def wait(self, seconds: float) -> None:
        """Return when a key is set, at the latest after `seconds`; may return earlier."""


class MemoryStore:
    """For ranks that are threads of one process; stores values as objects."""

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}
        self._changed, self._sets = threading.Condition(), 0
        self._seen = threading.local()  # the count of sets when this thread's last wait ended

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
            if getattr(self._seen, "sets", None) == self._sets:  # otherwise a key was set since the last get
                self._changed.wait(seconds)
            self._seen.sets = self._sets


POLL_SECONDS = 0.002


class FileStore:
    """A folder that all ranks see, empty at the start of a run, with one file a value."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._folder = Path(folder).absolute()  # the current directory may change
        self._folder.mkdir(parents=True, exist_ok=True)

    def set(self, key: str, value: Any) -> None:
        handle, name = tempfile.mkstemp(dir=self._folder, prefix=".")
        with os.fdopen(handle, "wb") as file:
            pickle.dump(value, file)
        os.replace(name, self._path(key))  # atomic: a reader sees the whole value or none

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


class TcpStore:
    """Values that one process stores, after it called `serve`, and that the others access over TCP.

    Args:
        address: (host, port) of the serving process
        key: a secret of the run; the server refuses clients without it
        time_limit: seconds to wait for the server to start, and for its answers

    Raises TimeoutError if no process serves, ValueError for another key, ConnectionError if the serving process is
    gone, does not answer, or is not a store.
    """

    def __init__(self, address: tuple[str, int], key: bytes, time_limit: float = 60.0) -> None:
        _check_key(key)
        self._address, self._time_limit, self._lock = address, time_limit, threading.Lock()
        end = time.monotonic() + time_limit
        while True:
            try:
                self._connection = Client(address)
                break
            except ConnectionRefusedError:
                if time.monotonic() > end:
                    raise TimeoutError(f"address: no process serves {address} after {time_limit:.0f} s") from None
                time.sleep(0.05)
        if not self._connection.poll(time_limit):
            raise self._gone()
        try:
            answer_challenge(self._connection, key)
            deliver_challenge(self._connection, key)
        except AuthenticationError:
            raise ValueError(f"key: got another key than the process that serves {address}") from None
        except (AssertionError, EOFError, OSError):  # another protocol, or the process ended
            self._connection.close()
            raise ConnectionError(f"address: the process at {address} is gone, or does not serve a store") from None

    @staticmethod
    def serve(key: bytes, host: str = "127.0.0.1", port: int = 0) -> tuple[str, int]:
        """Serve values from a thread of this process until it ends. Returns the address; port 0: any free port."""
        _check_key(key)
        listener = Listener((host, port), backlog=128)
        threading.Thread(target=_let_in, args=(listener, key), daemon=True).start()
        address: tuple[str, int] = listener.address
        return address

    def set(self, key: str, value: Any) -> None:
        with self._lock:
            self._say("set", key, pickle.dumps(value))

    def get(self, key: str) -> Any:
        with self._lock:
            self._say("get", key, None)
            payload = self._heard()
        return None if payload is None else pickle.loads(payload)

    def delete(self, key: str) -> None:
        with self._lock:
            self._say("delete", key, None)

    def wait(self, seconds: float) -> None:
        time.sleep(min(seconds, POLL_SECONDS))

    def _say(self, *words: Any) -> None:
        """Send a request. Only "get" is answered, so a rank that sets its last message never waits."""
        try:
            self._connection.send(words)
        except OSError:
            raise self._gone() from None

    def _heard(self) -> Any:
        with contextlib.suppress(OSError, EOFError):
            if self._connection.poll(self._time_limit):
                return self._connection.recv()
        raise self._gone()

    def _gone(self) -> ConnectionError:
        self._connection.close()  # otherwise a late answer would be read as the answer to a later request
        return ConnectionError(
            f"address: the process that serves {self._address} is gone, or did not answer for {self._time_limit:g} s"
        )


def _check_key(key: Any) -> None:
    if not isinstance(key, bytes):
        raise TypeError(f"key: got {type(key).__name__}, expected bytes")


def _let_in(listener: Listener, key: bytes) -> None:
    values: dict[str, bytes] = {}
    while True:
        with contextlib.suppress(OSError):  # the client left before it was accepted
            connection = listener.accept()
            threading.Thread(target=_serve, args=(connection, key, values), daemon=True).start()


def _serve(connection: Any, key: bytes, values: dict[str, bytes]) -> None:
    """Answer one process until it disconnects."""
    with connection, contextlib.suppress(OSError, EOFError, AuthenticationError):
        deliver_challenge(connection, key)
        answer_challenge(connection, key)
        while True:
            op, name, value = connection.recv()
            if op == "set":
                values[name] = value
            elif op == "delete":
                values.pop(name, None)
            else:
                connection.send(values.get(name))
