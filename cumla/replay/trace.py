"""Reads the requests of a trace file: one JSON object a line, plain or gzipped (the format of Mooncake's traces)."""

from __future__ import annotations

import contextlib
import gzip
import importlib.resources
import io
import json
import sys
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from ..dispatch.values import shown
from ..errors import InputError

HASH_TOKENS = 512  # tokens that one hash id stands for
OUTPUT_SHARE = 16  # output is at most 1/16 of a clipped request, near the share in the trace
STDIN = Path("-")
GZIP_MAGIC = b"\x1f\x8b"
INT32_MAX = 2**31 - 1
MOST_CHARACTERS = 1 << 25  # in a line: a request with 2^31 tokens has four million hash ids


@dataclass(frozen=True)
class TraceRequest:
    """One request. Equal hash ids mean equal tokens, and equal tokens before them.

    Attributes:
        timestamp: time of arrival in ms
        input_length: tokens of the prompt
        output_length: tokens to generate
        hash_ids: one for each 512 tokens of the prompt; the last may stand for fewer
    """

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]

    @property
    def total_length(self) -> int:
        """Positions that the cache will contain: the last generated token is never fed back."""
        return self.input_length + max(self.output_length, 1) - 1

    def clipped(self, max_len: int | None, max_output: int | None = None) -> TraceRequest:
        """The request with prompt and output cut to `max_len` tokens in all, and the output to `max_output`.

        A longer prompt loses its end.
        """
        input_length, output_length = self.input_length, self.output_length
        if max_output is not None:
            output_length = min(output_length, max_output)
        if max_len is not None:
            output_length = min(output_length, max(max_len // OUTPUT_SHARE, 1))
            input_length = min(input_length, max_len - output_length)
        if (input_length, output_length) == (self.input_length, self.output_length):
            return self
        hash_ids = self.hash_ids[: -(-input_length // HASH_TOKENS)]
        return replace(self, input_length=input_length, output_length=output_length, hash_ids=hash_ids)


@dataclass(frozen=True)
class Share:
    """The part of a trace that runs. Tokens count prompts and outputs.

    Attributes:
        requests, tokens: requests that run, and their tokens
        whole_requests: requests that run uncut
        tokens_uncut: tokens of the same requests in the trace
        trace_requests, trace_tokens: all requests of the trace, and their tokens
    """

    requests: int
    tokens: int
    whole_requests: int
    tokens_uncut: int
    trace_requests: int
    trace_tokens: int

    @classmethod
    def of(cls, trace: list[TraceRequest], taken: list[TraceRequest], requests: list[TraceRequest]) -> Share:
        """trace: all requests; taken: the trace's requests that run; requests: the same, perhaps cut, in any order."""
        taken_ids = {id(request) for request in taken}
        counts = [sum(x.input_length + x.output_length for x in subset) for subset in (requests, taken, trace)]
        num_uncut = sum(id(request) in taken_ids for request in requests)  # `clipped` returns an uncut request itself
        return cls(len(requests), counts[0], num_uncut, counts[1], len(trace), counts[2])

    def __str__(self) -> str:
        text = f"{self.requests:,} of the trace's {self.trace_requests:,} requests"
        if self.tokens == self.tokens_uncut:
            return f"{text}, uncut"
        cut = self.requests - self.whole_requests
        return f"{text}, {cut:,} of them cut, to {self.tokens:,} of their {self.tokens_uncut:,} tokens"


def in_order(requests: list[TraceRequest]) -> list[TraceRequest]:
    """Requests in order of arrival."""
    return sorted(requests, key=lambda request: request.timestamp)


def requests_of(path: Path | None) -> list[TraceRequest]:
    """The requests of a trace file; None: of the trace that cumla ships, STDIN: of standard input.

    Raises InputError for a file that cannot be read, has another format, or has no requests.
    """
    name = "the shipped trace" if path is None else "stdin" if path == STDIN else str(path)
    requests: list[TraceRequest] = []
    try:
        for number, line in enumerate(_lines(path), 1):
            if len(line) >= MOST_CHARACTERS:
                raise InputError(f"{name}, line {number}: longer than {MOST_CHARACTERS:,} characters")
            if line.strip():
                requests.append(_parse(line, f"{name}, line {number}"))
    except OSError as error:
        raise InputError(f"cannot read {name}: {error.strerror or error}") from None
    except (EOFError, zlib.error):
        raise InputError(f"cannot read {name}: the gzip file is cut off or damaged") from None
    except UnicodeDecodeError:
        raise InputError(f"cannot read {name}: it is neither text nor gzipped text") from None
    if not requests:
        raise InputError(f"{name} has no requests")
    return requests


def _lines(path: Path | None) -> Iterator[str]:
    source: Any = path
    if path is None:
        source = importlib.resources.files(__package__) / "data" / "conversation_300.jsonl.gz"
    with contextlib.nullcontext(sys.stdin.buffer) if path == STDIN else source.open("rb") as raw:
        zipped = cast(io.BufferedReader, raw).peek(2)[:2] == GZIP_MAGIC
        with io.TextIOWrapper(gzip.GzipFile(fileobj=raw) if zipped else raw, encoding="utf-8-sig") as text:
            while line := text.readline(MOST_CHARACTERS):
                yield line


def _parse(line: str, where: str) -> TraceRequest:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:  # integers of thousands of digits raise ValueError, too
        raise InputError(f"{where}: not JSON ({str(error).splitlines()[0]})") from None
    if not isinstance(record, dict):
        raise InputError(f"{where}: got {type(record).__name__}, expected an object")
    timestamp = _number(record, "timestamp", where)
    input_length = _integer(record, "input_length", 1, where)
    output_length = _integer(record, "output_length", 0, where)
    hash_ids = _field(record, "hash_ids", where)
    if not isinstance(hash_ids, list) or not all(_is_integer(x) and 0 <= x < 2**53 for x in hash_ids):
        raise InputError(f"{where}: hash_ids: expected a list of integers from 0 up")
    needed = -(-input_length // HASH_TOKENS)
    if len(hash_ids) != needed:
        raise InputError(
            f"{where}: hash_ids: got {len(hash_ids)}, expected {needed} for {input_length} tokens, "
            f"one for each {HASH_TOKENS}"
        )
    return TraceRequest(timestamp, input_length, output_length, tuple(hash_ids))


def _field(record: dict[str, Any], key: str, where: str) -> Any:
    if key not in record:
        raise InputError(f"{where}: {key} is missing")
    return record[key]


def _number(record: dict[str, Any], key: str, where: str) -> float:
    value = _field(record, key, where)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1e15:
        raise InputError(f"{where}: {key}: got {shown(value)}, expected milliseconds from 0 up")
    return float(value)


def _integer(record: dict[str, Any], key: str, minimum: int, where: str) -> int:
    value = _field(record, key, where)
    if not _is_integer(value) or not minimum <= value <= INT32_MAX:
        raise InputError(f"{where}: {key}: got {shown(value)}, expected an integer from {minimum} up")
    return int(value)


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
