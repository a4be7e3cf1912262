"""Disaggregated serving: one process computes prompts, another the tokens after them. Requests move through shared
memory, packed by `cumla.pages.pack` from all of their page groups.

    python examples/deepseek_v4.py --disaggregated

The prefill process packs a request into a slot of the shared memory, and sends its header over a pipe. The decode
process unpacks the request into pages of its own, and returns the slot. So page numbers, page sizes and numbers of
pages of the two processes may differ.
"""

import ctypes
import json
import multiprocessing
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np

from cumla import pages

SLOTS = 4  # requests that are packed and not yet unpacked


class Packed(NamedTuple):
    """A request whose prompt is computed.

    Attributes:
        number: of the request
        token, logits: the first new token, and its logits
        hit: tokens of the prompt that were not computed, as a prefix had them
        header: of `pack`, with the checksum, JSON
        slot: the packed request is at the beginning of this slot
    """

    number: int
    token: int
    logits: np.ndarray
    hit: int
    header: str
    slot: int


def generate(server: Any, make: Callable[[], Any], requests: list[Any]) -> None:
    """Finish requests that have not begun: a new process computes their prompts, this one the tokens after the first.

    Args:
        server: this process's, with a cache
        make: creates the new process's server, with a cache; it is pickled
        requests: numbered from 0

    Raises RuntimeError for an error of the other process.
    """
    prompts = [list(request.tokens) for request in requests]
    size = max(pages.packed_size(server.model.description, len(prompt)) for prompt in prompts)
    context = multiprocessing.get_context("spawn")  # a forked child could not use the device
    shared = context.RawArray(ctypes.c_uint8, SLOTS * size)
    connection, theirs = context.Pipe()
    process = context.Process(target=prefill, args=(theirs, shared, make, prompts), daemon=True)
    process.start()
    theirs.close()  # so the pipe ends with the other process
    try:
        decode(server, connection, slots_of(shared), requests)
    finally:
        connection.close()
        process.join()


def slots_of(shared: Any) -> np.ndarray:
    return np.frombuffer(shared, np.uint8).reshape(SLOTS, -1)


def decode(server: Any, connection: Connection, slots: np.ndarray, requests: list[Any]) -> None:
    """Finish all requests, each from when its prompt is computed."""
    expected, arrived = len(requests), dict[int, Any]()  # requests by slot
    while expected or server.waiting or server.running:
        while expected and (connection.poll() or not (server.waiting or server.running)):
            packed = receive(connection)
            request, expected = requests[packed.number], expected - 1
            array = slots[packed.slot, : pages.packed_size(server.model.description, len(request.tokens))]
            request.packed = packed.header, array
            request.tokens.append(packed.token)
            request.logits.append(packed.logits)
            request.new_tokens -= 1
            server.cache.hits[request.number] = packed.hit
            arrived[packed.slot] = request
            if request.done:
                server.cancel(request)
            else:
                server.waiting.append(request)
        if server.waiting or server.running:
            server.step()
        for slot in [slot for slot, request in arrived.items() if request.packed is None]:
            del arrived[slot]
            connection.send(slot)


def receive(connection: Connection) -> Packed:
    try:
        packed = connection.recv()
    except EOFError:
        raise RuntimeError("the prefill process ended before all requests arrived") from None
    if isinstance(packed, str):
        raise RuntimeError(f"the prefill process ended with an error:\n{packed}")
    return packed


def prefill(connection: Connection, shared: Any, make: Callable[[], Any], prompts: list[list[int]]) -> None:
    """The prefill process: compute each prompt and its first new token, and send the request."""
    slots, free = slots_of(shared), list(range(SLOTS))
    try:
        server = make()
        cache, on_host = server.cache, server.model.xp is np

        def send(request: Any, token: int) -> None:
            while not free or connection.poll():
                free.append(connection.recv())
            slot = free.pop()
            out = slots[slot] if on_host else None
            header, array = pages.pack(cache.device, cache.tables(request), request.computed, out=out)
            if not on_host:
                slots[slot, : len(array)] = array.get()
                array = slots[slot, : len(array)]
            text = json.dumps(pages.verify(header, array))
            hit = cache.hits.get(request.number, 0)
            connection.send(Packed(request.number, token, request.logits[-1], hit, text, slot))

        server.on_token = send
        server.generate(prompts, 1)
        while len(free) < SLOTS:
            free.append(connection.recv())
    except (BrokenPipeError, EOFError):
        return  # the decode process ended
    except Exception:
        connection.send(traceback.format_exc())
