"""Copies of all groups at once: swapped, shared and packed requests go on with the bits of the undisturbed run."""

import dataclasses
import functools
import json

import numpy as np
import pytest

from cumla import pages
from support.page_groups import MovingFamily, MovingLayer, MovingStack

C128, C4, V32, V41 = 3, 6, 12, "v41"  # cases of golden layers, and a stack
FAMILY = {"glm": 0, "flash": 3, "mistral": 6, "hy": 8}
CASES = [C128, C4, V32, V41, *FAMILY]
TOKENS = {C128: 201, C4: 131, V32: 100, V41: 127, "glm": 100, "flash": 102, "mistral": 133, "hy": 100}
REST = 9


@functools.cache
def moving(case, seed=0, cache_format="float32", **sizes):
    if case == V41:
        return MovingStack(0, cache_format, seed, **sizes)
    if case in FAMILY:
        return MovingFamily(FAMILY[case], cache_format, seed)
    return MovingLayer(case, cache_format, seed)


def started(case, **options):
    """A request of TOKENS computed tokens, request 0, in caches without anything else."""
    model = moving(case, **options)
    model.poison(-1)
    model.step(0, 0, TOKENS[case])
    return model


def goes_on(model, request, tokens):
    return np.concatenate([model.step(request, tokens, 1), model.step(request, tokens + 1, REST)], axis=-2).tobytes()


def host_of(model, count=40):
    """Host pages, `count` of each group."""
    num_pages = {group.name: count for group in model.description}
    memory = pages.host_pool(pages.Pools.bytes_of(model.description, num_pages), pinned=False)
    return pages.Pools.allocate(model.description, num_pages, memory)


def needed(model, request, tokens):
    """By group, the request's pages that n tokens need, and their columns."""
    needs = model.description.needs(tokens)
    return {part.group: (list(part.pages), model.table(part.group, request)[list(part.pages)]) for part in needs.parts}


@pytest.mark.parametrize("case", CASES)
def test_a_preempted_request_goes_on_bit_for_bit(case):
    """Its pages are swapped out, used by another request, and swapped in as other pages, of another request."""
    tokens, model = TOKENS[case], started(case)
    out = needed(model, 0, tokens)
    device, host = model.pools(), host_of(model)
    pages.swap_out(device, host, {name: [[p, i] for i, p in enumerate(its)] for name, (_, its) in out.items()})
    want = goes_on(model, 0, tokens)
    model.poison(tokens)
    back = needed(model, 1, tokens)
    pages.swap_in(host, device, {name: [[i, p] for i, p in enumerate(its)] for name, (_, its) in back.items()})
    assert goes_on(model, 1, tokens) == want


@pytest.mark.parametrize("case", CASES)
def test_a_packed_request_goes_on_bit_for_bit(case):
    """It moves to a model whose caches have other pages, for V4.1 of other sizes, too."""
    tokens, source = TOKENS[case], started(case)
    header, array = pages.pack(source.pools(), source.of_request(0), tokens)
    want = goes_on(source, 0, tokens)
    target = moving(case, 1, **({"sizes": (48, 96)} if case == V41 else {}))
    target.poison(tokens)
    sealed = json.dumps(pages.verify(header, array))
    assert pages.unpack(sealed, array.copy(), target.pools(), target.of_request(1)) == tokens
    pages.verify(sealed, array)
    assert goes_on(target, 1, tokens) == want
    assert header["bytes"] == len(array) >= source.description.packed_bytes(tokens)
    assert len(array) - source.description.packed_bytes(tokens) < 32 * len(source.pools().pools)


@pytest.mark.slow
@pytest.mark.parametrize("cache_format", ["fp8", "bfloat16"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("tokens", [1, 2, 3, 64, 125, 126, 128])
def test_any_length_and_format_goes_on(case, cache_format, tokens):
    """V4.1's drafts in flight are rejected: their rows, keys and ring rows are of positions that are not moved."""
    source, target = moving(case, 0, cache_format), moving(case, 1, cache_format)
    source.poison(-1)
    source.step(0, 0, tokens)
    hidden = source.hidden(0)
    kept = hidden.copy()
    hidden[..., tokens:, :] += 1
    source.step(0, tokens, 5)  # rejected
    hidden[...] = kept
    target.poison(tokens)
    header, array = pages.pack(source.pools(), source.of_request(0), tokens)
    pages.unpack(header, array, target.pools(), target.of_request(1))
    assert goes_on(target, 1, tokens) == goes_on(source, 0, tokens)


def test_requests_that_share_pages():
    """The second copies what it writes into; after the first is freed, the second's pages are still its own."""
    tokens, model = TOKENS[C4], moving.__wrapped__(C4)
    free = pages.FreePages(model.pools().num_pages)
    first = free.take({group.name: len(model.table(group.name, 0)) for group in model.description})
    second, copied = {}, {}
    for part in model.description.needs(tokens).parts:
        columns = len(first[part.group])
        shared = [c for c in part.pages if c != part.written]
        own = iter(free.take({part.group: columns - len(shared)})[part.group])
        second[part.group] = [first[part.group][c] if c in shared else next(own) for c in range(columns)]
        for column in shared:
            free.share(part.group, first[part.group][column])
        if part.written >= 0:
            copied[part.group] = [[first[part.group][part.written], second[part.group][part.written]]]
    for name, its in first.items():
        model.table(name, 0)[:] = its
    model.poison(-1)
    model.step(0, 0, tokens)
    pools = model.pools()
    pages.copy_pages(pools, pools, copied)
    for name, its in second.items():
        model.table(name, 1)[:] = its
    before = {name: free.left(name) for name in first}
    for name, its in first.items():
        for page in its:
            free.give_back(name, page)
    for name, its in first.items():
        shared = set(its) & set(second[name])
        assert free.left(name) == before[name] + len(its) - len(shared)
        taken = set(free.take({name: free.left(name)})[name])
        assert not taken & set(second[name])
    want = goes_on(model, 0, tokens)
    assert goes_on(model, 1, tokens) == want


def test_free_pages_are_taken_from_all_groups_or_none():
    free = pages.FreePages({"window": 3, "compressed": 1})
    assert free.take({"window": 2, "compressed": 2}) is None
    assert (free.left("window"), free.left("compressed")) == (3, 1)
    taken = free.take({"window": 2, "compressed": 1})
    assert free.take({"window": 1, "compressed": 1}) is None
    free.share("window", taken["window"][0])
    free.give_back("window", taken["window"][0])
    assert free.left("window") == 1
    free.give_back("window", taken["window"][0])
    assert free.left("window") == 2
    with pytest.raises(ValueError, match="page: got 0 of window, which is free"):
        free.give_back("window", 0)


# ---- faults


def held(pools):
    return [pool.array.tobytes() for pool in pools.pools]


@functools.cache
def packed():
    """A packed request of V4.1, its header and the pools that it may be unpacked into."""
    source = started(V41, cache_format="fp8")
    header, array = pages.pack(source.pools(), source.of_request(0), TOKENS[V41])
    return source, pages.verify(header, array), array


def test_a_transfer_may_be_cut_off_at_any_byte():
    """Of the header or of the array: nothing is written."""
    _, header, array = packed()
    target = moving(V41, 1, "fp8")
    target.poison(0)
    pools, before = target.pools(), held(target.pools())
    text = json.dumps(header)
    unpack = functools.partial(pages.unpack, pools=pools, tables=target.of_request(1))
    rng = np.random.default_rng(0)
    for end in {0, 1, len(text) - 1, *rng.integers(0, len(text), 40).tolist()}:
        with pytest.raises(ValueError, match="header: got text that is no JSON"):
            unpack(text[:end], array)
    for end in {0, 1, len(array) - 1, *rng.integers(0, len(array), 40).tolist()}:
        with pytest.raises(ValueError, match=f"array: got {end} bytes, expected {len(array)}"):
            unpack(text, array[:end])
        late = array.copy()
        late[end:] = 0
        if late.tobytes() != array.tobytes():
            with pytest.raises(ValueError, match="array: got checksum"):
                pages.verify(text, late)
    assert held(pools) == before


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"format": "torch"}, "header: got format 'torch' version 1, expected 'cumla.pages' version 1"),
        ({"version": 2}, "header: got format 'cumla.pages' version 2, expected 'cumla.pages' version 1"),
        ({"model": "DeepseekV4Config"}, "header: got model 'DeepseekV4Config', expected 'DeepseekV41Config'"),
        ({"digest": "0"}, "header: got digest '0', expected"),
        ({"rank": 1}, "header: got rank 1, expected 0"),
        ({"ranks": 2}, "header: got ranks 2, expected 1"),
        ({"tokens": 0}, "header.tokens: got 0, expected at least 1"),
        ({"tokens": 125}, "header: got bytes"),
        ({"tokens": 1 << 20}, "header: got bytes"),
        ({"bytes": "9"}, "header.bytes: got '9' of type str"),
        ({"caches": []}, "header: got 0 caches, expected"),
        ({"byte_order": "big"}, "header: got byte_order 'big', expected 'little'"),
    ],
)
def test_wrong_headers_are_errors_before_anything_is_written(changes, match):
    _, header, array = packed()
    target = moving(V41, 1, "fp8")
    pools, before = target.pools(), held(target.pools())
    with pytest.raises((TypeError, ValueError), match=match):
        pages.unpack(header | changes, array, pools, target.of_request(1))
    for name in changes:
        with pytest.raises(ValueError, match=f"header: got none of {name}|byte_order"):
            pages.unpack({k: v for k, v in header.items() if k != name}, array, pools, target.of_request(1))
    assert held(pools) == before


def test_formats_are_not_converted():
    _, header, array = packed()
    target = moving(V41, 1, "bfloat16")
    with pytest.raises(ValueError, match=r"header: got cache \['window', 'window', 'DSV41_FP8', 1, .* 'DSV4_BF16'"):
        pages.unpack(header, array, target.pools(), target.of_request(1))


def test_absent_pages_are_errors_before_anything_is_written():
    source, header, array = packed()
    target = moving(V41, 1, "fp8")
    pools, before = target.pools(), held(target.pools())
    for name in ("window", "compressed", "rings"):
        tables = {group: table.copy() for group, table in target.of_request(1).items()}
        tables[name][target.description.needs(TOKENS[V41]).part(name).pages[-1]] = -1
        with pytest.raises(ValueError, match=f"tables: request 0 needs a page of {name} for position .* absent"):
            pages.unpack(header, array, pools, tables)
        with pytest.raises(ValueError, match=f"tables: request 0 needs a page of {name}"):
            pages.pack(source.pools(), tables, TOKENS[V41])
    assert held(pools) == before


def test_a_host_pool_may_be_full():
    model = moving(C4)
    count = {group.name: 2 for group in model.description}
    size = pages.Pools.bytes_of(model.description, count)
    memory = pages.host_pool(2 * size - 1, pinned=False)
    assert pages.Pools.allocate(model.description, count, memory).num_pages == count
    with pytest.raises(ValueError, match=f"host_pool: got {size} bytes to take, expected at most {size - 1}, which"):
        pages.Pools.allocate(model.description, count, memory)
    assert memory.used == size


@pytest.mark.parametrize(
    ("pairs", "match"),
    [
        ({"window": [[0, 40]]}, r"pages\['window'\]: pair 0 has page 40 of dst, expected 0 to 39"),
        ({"compressed": [[-1, 0]]}, r"pages\['compressed'\]: pair 0 has page -1 of src"),
        ({"window": [[0, 1], [1, 1]]}, r"pages\['window'\]: got page 1 of dst twice"),
        ({"rings": [[0, 1]]}, "pages: got 'rings', expected groups of window, compressed, states4"),
        ({"window": [0, 1]}, r"pages\['window'\]: got shape \(2,\), expected \[n, 2\]"),
        ({"window": [[0.0, 1.0]]}, r"pages\['window'\]: got dtype float64, expected integers"),
        (3, "pages: got 3 of type int, expected a Mapping"),
    ],
)
def test_wrong_pairs_are_errors_before_anything_is_written(pairs, match):
    model = moving(C4)
    device, host = model.pools(), host_of(model)
    before = held(host)
    right = {"states4": [[0, 0]]}
    with pytest.raises((TypeError, ValueError), match=match):
        pages.swap_out(device, host, {**right, **pairs} if isinstance(pairs, dict) else pairs)
    assert held(host) == before


def test_pools_of_other_pages_are_refused():
    one, other = moving(V41), moving(V41, 1, sizes=(48, 96))
    with pytest.raises(ValueError, match="dst: got 98304 bytes of DSV4_F32 for window of layer 0, expected 65536"):
        pages.copy_pages(one.pools(), other.pools(), {})
    caches = [one.caches_of(layer) for layer in range(6)]
    with pytest.raises(ValueError, match="caches: got 5, expected a list of the caches of 6 layers"):
        pages.pools_of(one.description, caches[:5])
    with pytest.raises(ValueError, match=r"caches\[0\].window: got pages of 65536 bytes, expected 98304: 48 rows of"):
        pages.pools_of(other.description, caches)
    with pytest.raises(ValueError, match=r"caches\[1\].ring: got None, expected pages of 32768 bytes for group rings"):
        pages.pools_of(one.description, [*caches[:1], dataclasses.replace(caches[1], ring=None), *caches[2:]])


def test_spans_are_the_needed_pages():
    tokens, source, target = TOKENS[V41], started(V41), moving(V41, 1)
    target.poison(tokens)
    ours = pages.spans(source.pools(), source.of_request(0), tokens, target.description)
    theirs = pages.spans(target.pools(), target.of_request(1), tokens, source.description)
    assert [size for _, size in ours] == [size for _, size in theirs]
    for (origin, size), (to, _) in zip(ours, theirs, strict=True):
        np.ctypeslib.as_array((np.ctypeslib.ctypes.c_uint8 * size).from_address(to))[:] = np.ctypeslib.as_array(
            (np.ctypeslib.ctypes.c_uint8 * size).from_address(origin)
        )
    assert goes_on(target, 1, tokens) == goes_on(source, 0, tokens)
    with pytest.raises(ValueError, match="peer: got pages of other sizes or formats, expected equal pages"):
        pages.spans(source.pools(), source.of_request(0), tokens, moving(V41, 1, sizes=(48, 96)).description)
    with pytest.raises(ValueError, match="peer: got digest"):
        pages.spans(source.pools(), source.of_request(0), tokens, moving(C4).description)


# ---- on every backend


@pytest.mark.parametrize("model", [V41, C4])
def test_swaps_and_transfers_on_a_device(lab, model, rng):
    """Bytes of every group move to the host and back, and to pools with pages of other sizes."""
    config = moving(model).description
    small = {"block_size": 4, "compressed_block_size": 8 if model == V41 else 128, "cache_format": "fp8"}
    large = small | {"block_size": 6, "compressed_block_size": 16 if model == V41 else 256}
    one, other = (pages.describe(moving(model).config, **sizes, num_speculative_tokens=0) for sizes in (small, large))
    assert config.digest == one.digest
    tokens, counts = 131 if model == C4 else 23, {group.name: 40 for group in one}
    device, back, moved = (pages.Pools.allocate(x, counts, lab.xp) for x in (one, one, other))
    for pool in device.pools:
        pool.array[:] = lab.put(rng.integers(0, 256, pool.array.shape, np.uint8))
    for pools in (back, moved):
        for pool in pools.pools:
            pool.array[:] = lab.put(np.zeros(pool.array.shape, np.uint8))
    memory = pages.host_pool(pages.Pools.bytes_of(one, counts), pinned=lab.on_device)
    host = pages.Pools.allocate(one, counts, memory)
    on = {"backend": lab.backend}
    pages.swap_out(device, host, {group.name: [[7, 3], [2, 30]] for group in one}, **on)
    pages.swap_in(host, back, {group.name: [[3, 9]] for group in one}, **on)
    pages.copy_pages(back, back, {"window": [[9, 11]]}, **on)
    for ours, theirs in zip(device.pools, back.pools, strict=True):
        np.testing.assert_array_equal(lab.get(theirs.array)[9], lab.get(ours.array)[7])
        assert lab.get(theirs.array)[11].any() == (ours.group.name == "window")

    tables = {group.name: rng.permutation(40) if group.tokens else 5 for group in one}
    theirs = {group.name: rng.permutation(40) if group.tokens else 6 for group in one}
    header, array = pages.pack(device, tables, tokens, **on)
    pages.unpack(header, array, moved, theirs, **on)
    again, array_again = pages.pack(moved, theirs, tokens, **on)
    assert again["bytes"] == header["bytes"]
    sections, _ = pages.packing._sections(one, tokens)
    ours, theirs = lab.get(array), lab.get(array_again)
    for section in sections:
        rows = slice(section.rows, section.rows + (section.end - section.first) * section.cache.row_bytes)
        tails = slice(section.tails, section.tails + (section.end - section.first) * section.cache.tail_bytes)
        for part in (rows, tails):
            np.testing.assert_array_equal(ours[part], theirs[part])
    assert pages.verify(header, array)["checksum"] is not None
