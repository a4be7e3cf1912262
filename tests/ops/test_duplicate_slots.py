"""Several tokens for one slot: guarantees of every backend, and rows that are never torn by rewriting."""

import threading

import numpy as np
import pytest

import cumla
from support.lab import BF16

BLOCK = 4


def insert(layout):
    def run(rows, cache, slots, backend):
        cumla.quantize_and_insert_k_cache(rows, cache, slots, BLOCK, layout=layout, backend=backend)

    return layout.head_dim, layout.allocate, run


def concat(kv_cache_dtype, dtype, width):
    def run(rows, cache, slots, backend):
        cumla.concat_and_cache_mla(rows[:, :512], rows[:, 512:], cache, slots, kv_cache_dtype, backend=backend)

    return 576, lambda blocks, block_size: np.zeros((blocks, block_size, width), dtype), run


FORMATS = {
    **{layout.name: insert(layout) for layout in (cumla.DSV4_FP8, cumla.V32_FP8, cumla.INDEXER_FP8)},
    "bfloat16": concat("auto", BF16, 576),
    "fp8": concat("fp8", np.uint8, 576),
}


@pytest.fixture(params=FORMATS)
def written(request, lab, rng):
    """Bytes of a cache in which slot 5 gets the first tokens, and slots 9, 2, ... get one other token each."""
    width, allocate, run = FORMATS[request.param]

    def write(tokens, slots):
        cache = lab.put(allocate(3, BLOCK))
        run(lab.put(tokens), cache, lab.put(np.array(slots)), lab.backend)
        return lab.get(cache).view(np.uint8).tobytes()

    def tokens(count):
        return (rng.standard_normal((count, width)) * np.exp(4 * rng.standard_normal((count, 1)))).astype(BF16)

    return write, tokens


OTHERS = [9, 2, 4]  # two are neighbours of slot 5, in the page where some formats store scales separately


def test_equal_tokens_give_their_row(lab, written):
    write, tokens = written
    count = 3 if lab.tiny else 40
    one, others = tokens(1), tokens(len(OTHERS))
    together = write(np.concatenate([one.repeat(count, axis=0), others]), [5] * count + OTHERS)
    assert together == write(np.concatenate([one, others]), [5, *OTHERS])


def test_other_slots_are_as_they_should_be(lab, written):
    """In host memory the last token is stored whole, too."""
    write, tokens = written
    count = 3 if lab.tiny else 40
    rows, others = tokens(count), tokens(len(OTHERS))
    together = write(np.concatenate([others, rows]), OTHERS + [5] * count)
    if lab.backend in ("reference", "cpu"):
        assert together == write(np.concatenate([others, rows[-1:]]), [*OTHERS, 5])
        return
    # Each byte is one of the tokens' bytes at this place; if they all agree, it is their byte.
    alone = [np.frombuffer(write(np.concatenate([others, row[None]]), [*OTHERS, 5]), np.uint8) for row in rows]
    assert (np.stack(alone) == np.frombuffer(together, np.uint8)).any(axis=0).all()


def test_the_last_of_many_stays_whole_on_all_cores(rng):
    """There are enough tokens for several threads."""
    layout, slots = cumla.DSV4_FP8, rng.integers(0, 300, 4000)
    rows = (rng.standard_normal((4000, 512)) * np.exp(rng.uniform(-10, 10, (4000, 1)))).astype(BF16)
    last = {slot: token for token, slot in enumerate(slots.tolist())}
    expected, cache = layout.allocate(5, 64), layout.allocate(5, 64)
    cumla.quantize_and_insert_k_cache(rows[list(last.values())], expected, np.array(list(last)))
    for _ in range(5):
        cache[:] = 0
        cumla.quantize_and_insert_k_cache(rows, cache, slots)
        np.testing.assert_array_equal(cache, expected)


@pytest.mark.parametrize("name", ["DSV4_FP8", "V32_FP8", "bfloat16"])
def test_a_row_written_anew_looks_the_same_meanwhile(rng, name):
    width, allocate, run = FORMATS[name]
    rows, slots, cache = rng.standard_normal((64, width)).astype(BF16), np.arange(64), allocate(16, BLOCK)
    run(rows, cache, slots, "cpu")
    expected, stop, torn = cache.copy(), threading.Event(), []

    def read():
        while not stop.is_set():
            if not np.array_equal(cache, expected):
                torn.append(True)

    reader = threading.Thread(target=read)
    reader.start()
    for _ in range(300):
        run(rows, cache, slots, "cpu")
    stop.set()
    reader.join()
    assert not torn
