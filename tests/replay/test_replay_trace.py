"""Traces: reading, truncation of requests, and errors for files that are not traces."""

import gzip
import json

import pytest

from cumla.errors import InputError
from cumla.replay.blocks import BLOCK_TOKENS
from cumla.replay.options import cache_size
from cumla.replay.trace import MOST_CHARACTERS, TraceRequest, in_order, requests_of

GOOD = {"timestamp": 5, "input_length": 600, "output_length": 3, "hash_ids": [0, 7]}


def read_trace(path, limit=None):
    return in_order(requests_of(path)[:limit])


def write(tmp_path, text):
    path = tmp_path / "trace.jsonl"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_shipped_trace():
    requests = read_trace(None)
    assert len(requests) == 300
    assert requests[0] == TraceRequest(0.0, 6758, 500, tuple(range(14)))
    assert read_trace(None, 5) == requests[:5]


def test_plain_and_gzipped_in_order_of_arrival(tmp_path):
    lines = [json.dumps(GOOD), "", json.dumps({**GOOD, "timestamp": 1.5})]
    plain = read_trace(write(tmp_path, "\n".join(lines)))
    assert [request.timestamp for request in plain] == [1.5, 5]
    assert read_trace(write(tmp_path, gzip.compress("\n".join(lines).encode()))) == plain


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param("", "no requests", id="empty"),
        pytest.param("{", "line 1: not JSON", id="bad-json"),
        pytest.param(json.dumps(GOOD) + "\nnonsense", "line 2: not JSON", id="second-line"),
        pytest.param("[1]", "expected an object", id="no-object"),
        pytest.param(json.dumps({k: v for k, v in GOOD.items() if k != "hash_ids"}), "hash_ids is missing", id="key"),
        pytest.param(json.dumps({**GOOD, "input_length": "9"}), "input_length: got '9'", id="text-length"),
        pytest.param(json.dumps({**GOOD, "input_length": 0}), "input_length: got 0", id="no-input"),
        pytest.param(json.dumps({**GOOD, "output_length": -1}), "output_length: got -1", id="negative-output"),
        pytest.param(json.dumps({**GOOD, "input_length": True}), "input_length: got True", id="bool-length"),
        pytest.param(json.dumps({**GOOD, "timestamp": None}), "timestamp: got None", id="no-time"),
        pytest.param('{"timestamp": NaN, "input_length": 1}', "timestamp: got nan", id="nan-time"),
        pytest.param(json.dumps({**GOOD, "timestamp": 1e15}), "timestamp: got 1000000000000000.0", id="late"),
        pytest.param("[" * 100_000, "line 1: not JSON", id="nested"),
        pytest.param(json.dumps({**GOOD, "hash_ids": 3}), "hash_ids: expected a list", id="no-list"),
        pytest.param(json.dumps({**GOOD, "hash_ids": [0, 1, 2]}), "hash_ids: got 3, expected 2 for", id="many-ids"),
        pytest.param(json.dumps({**GOOD, "hash_ids": [0, -1]}), "hash_ids: expected a list", id="negative-id"),
        pytest.param(json.dumps({**GOOD, "hash_ids": [0]}), "hash_ids: got 1, expected 2 for 600", id="too-few-ids"),
        pytest.param(b"\xff\xfe\x00", "neither text nor gzipped", id="binary"),
        pytest.param(gzip.compress(json.dumps(GOOD).encode() * 99)[:-20], "cut off or damaged", id="cut-gzip"),
    ],
)
def test_malformed(tmp_path, text, message):
    with pytest.raises(InputError, match=r"trace\.jsonl") as caught:
        read_trace(write(tmp_path, text))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("value", ["9" * 5_000, '"' + "x" * 5_000_000 + '"', "1e400", "[" * 100_000])
@pytest.mark.parametrize("key", ["timestamp", "input_length", "output_length", "hash_ids"])
def test_what_is_wrong_is_not_echoed_whole(tmp_path, key, value):
    record = {"timestamp": "0", "input_length": "1", "output_length": "1", "hash_ids": "[0]", key: value}
    line = "{" + ", ".join(f'"{k}": {v}' for k, v in record.items()) + "}"
    with pytest.raises(InputError, match=r"trace\.jsonl, line 1") as caught:
        read_trace(write(tmp_path, line + "\n"))
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("pack", [gzip.compress, bytes])
def test_a_line_without_end(tmp_path, pack):
    """A gigabyte in a megabyte of gzip is read only up to the maximum length of a line."""
    path = tmp_path / "trace.jsonl"
    path.write_bytes(pack(b'{"timestamp": 0, "x": "' + b" " * (MOST_CHARACTERS + 100)))
    with pytest.raises(InputError, match="line 1: longer than 33,554,432 characters"):
        read_trace(path)


def test_missing(tmp_path):
    with pytest.raises(InputError, match="No such file"):
        read_trace(tmp_path / "nothing")


def test_clipped():
    request = TraceRequest(0.0, 5000, 700, tuple(range(10)))
    assert request.clipped(None) is request
    cut = request.clipped(1600)
    assert (cut.input_length, cut.output_length, cut.hash_ids) == (1500, 100, (0, 1, 2))
    assert cut.total_length == 1599
    brief = request.clipped(None, 40)
    assert (brief.input_length, brief.output_length, brief.hash_ids) == (5000, 40, request.hash_ids)
    assert request.clipped(1600, 40).total_length == 1599
    assert request.clipped(None, 700) is request
    short = TraceRequest(0.0, 10, 0, (3,))
    assert short.clipped(1600) == short
    assert short.total_length == 10


def test_the_cache_has_room_for_the_largest_request_at_least():
    """Half of all requests' blocks, rounded to whole blocks, unless one request needs more."""
    sizes = [TraceRequest(0.0, tokens, 0, tuple(range(-(-tokens // 512)))) for tokens in (5000, 100, 300)]
    blocks = [-(-request.total_length // BLOCK_TOKENS) for request in sizes]
    assert cache_size(None, sizes) == max(blocks) * BLOCK_TOKENS > sum(blocks) * BLOCK_TOKENS // 2
    assert cache_size(None, sizes[:1]) == blocks[0] * BLOCK_TOKENS
    assert cache_size(None, 4 * sizes[:1]) == 2 * blocks[0] * BLOCK_TOKENS
    with pytest.raises(InputError, match="--cache-tokens: got 4096, but one request alone needs 5120"):
        cache_size(4096, sizes)
