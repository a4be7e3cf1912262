"""An output shares no element with another array of the operation: overlap is an error that names both.

Each operation is tried with each of its outputs over every other one of its arrays, on the host and on a device.
"""

import re

import numpy as np
import pytest

import cumla
from cumla.dispatch.debug import unchecked
from support.calls import NAMES, call
from support.lab import BF16, Lab, lab_of
from support.operations import rebuilt

IN_PLACE = {
    ("fused_q_kv_rmsnorm", "out[0]", "qr"), ("fused_q_kv_rmsnorm", "out[1]", "kv"),
    ("qnorm_rope_and_insert", "out", "q"), ("apply_rope", "out", "x"),
}  # fmt: skip
SAME_PAGES = {"swap_blocks", "copy_blocks", "copy_spans"}  # these hold either content afterwards
# Views of the same pages, in which slots and tables give each array its own.
CACHES = {"compress_and_insert": {"state_cache", "k_cache", "index_state_cache", "index_k_cache"}}


@pytest.fixture(params=["reference", pytest.param("cuda", id="emulated"), pytest.param("cuda", marks=pytest.mark.gpu)])
def place(request):
    yield from lab_of(request)


class Arguments:
    """The arguments of a call, and its arrays by name, elements of tuples numbered."""

    def __init__(self, name):
        right = call(name)
        self.function, self.given = right.function, right.arguments
        self.arrays = {part: x for part, x in self._parts() if isinstance(x, np.ndarray) and x.ndim and x.size}

    def _parts(self):
        for name, x in self.given.items():
            if isinstance(x, (tuple, list)):
                yield from ((f"{name}[{i}]", part) for i, part in enumerate(x))
            else:
                yield name, x

    def with_arrays(self, place, arrays):
        """Arguments on a device, some of the arrays replaced."""
        put = {part: arrays.get(part, place.put(x) if isinstance(x, np.ndarray) else x) for part, x in self._parts()}
        return {
            name: rebuilt(x, [put[f"{name}[{i}]"] for i in range(len(x))]) if isinstance(x, tuple | list) else put[name]
            for name, x in self.given.items()
        }

    def written(self):
        """The arrays that may not be read-only."""
        host, found = Lab("reference", False), []
        for part, x in self.arrays.items():
            fixed = x.copy()
            fixed.flags.writeable = False
            try:
                self.function(**self.with_arrays(host, {part: fixed}), backend="reference")
            except ValueError:
                found.append(part)
        return found


def on_one_memory(place, x, y, distance):
    """Two arrays of these shapes, the second one `distance` bytes after the first one's start, and their memory."""
    memory = place.put(np.ones(x.nbytes + distance + y.nbytes + 64, np.uint8))

    def array(like, at):
        if place.on_device:
            return place.xp.ndarray(like.shape, like.dtype, memory.data + at)
        start = -memory.ctypes.data % 16
        return np.ndarray(like.shape, like.dtype, memory.data, start + at)

    return array(x, 0), array(y, distance), memory


@pytest.mark.parametrize("name", NAMES)
def test_what_is_written_shares_no_element(place, name):
    arguments = Arguments(name)
    operation, written = name.partition("-")[0], arguments.written()
    for part in written:
        for other, its in arguments.arrays.items():
            if other == part or (operation in SAME_PAGES and not other.startswith(("src_to_dst", "spans"))):
                continue
            if {part, other} <= CACHES.get(operation, set()):
                continue
            x = arguments.arrays[part]
            last = x.nbytes // len(x) * (len(x) - 1) // 16 * 16  # its last page, aligned as kernels want it
            for distance in {0, last}:
                if distance == 0 and (operation, part, other) in IN_PLACE:
                    continue
                first, second, memory = on_one_memory(place, x, its, distance)
                before = place.get(memory).tobytes()
                given = arguments.with_arrays(place, {part: first, other: second})
                with pytest.raises(ValueError, match="has too, expected memory of its own") as caught:
                    arguments.function(**given, backend=place.backend)
                for named in (part, other):
                    base = named.partition("[")[0]
                    assert re.search(rf"\b{base}\b", str(caught.value)), caught.value
                assert place.get(memory).tobytes() == before


@pytest.mark.parametrize("name", NAMES)
def test_neighbours_in_one_memory_are_apart(name):
    """An array that begins where one ends that is written."""
    place, arguments = Lab("reference", False), Arguments(name)
    for part in arguments.written():
        for other, its in arguments.arrays.items():
            if other != part:
                x = arguments.arrays[part]
                first, second, _ = on_one_memory(place, x, its, -(-x.nbytes // 16) * 16)
                first[...], second[...] = x, its
                given = arguments.with_arrays(place, {part: first, other: second})
                arguments.function(**given, backend="reference")


@pytest.mark.parametrize(("name", "pairs"), [
    ("fused_q_kv_rmsnorm", {"out[0]": "qr", "out[1]": "kv"}), ("qnorm_rope_and_insert-DSV4_BF16", {"out": "q"}),
    ("apply_rope", {"out": "x"}),
])  # fmt: skip
def test_in_place(place, name, pairs):
    """Outputs that may be inputs, as they say, hold what others would."""
    arguments = Arguments(name)
    results = []
    for in_place in (False, True):
        arrays = {part: place.put(x.copy()) for part, x in arguments.arrays.items()}
        if in_place:
            arrays |= {output: arrays[given] for output, given in pairs.items()}
        arguments.function(**arguments.with_arrays(place, arrays), backend=place.backend)
        results.append([np.asarray(place.get(arrays[output])).tobytes() for output in pairs])
    assert results[0] == results[1]


def caches_in_one_allocation(place, layers, layout=cumla.DSV4_FP8, num_blocks=4, block_size=8):
    """Caches whose pages alternate."""
    page = layout.page_bytes(block_size)
    memory = place.put(np.zeros((num_blocks, layers, page), np.uint8))
    return memory, [memory[:, i, : block_size * layout.token_bytes] for i in range(layers)]


def test_caches_in_one_allocation(place, rng):
    """Insert into one layer's pages what is gathered from another one's."""
    memory, caches = caches_in_one_allocation(place, 3)
    k = rng.standard_normal((32, 512)).astype(BF16)
    for cache in caches:
        cumla.quantize_and_insert_k_cache(
            place.put(k), cache, place.put(np.arange(32)), 8, layout=cumla.DSV4_FP8, backend=place.backend
        )
    used = 8 * cumla.DSV4_FP8.token_bytes
    host = np.asarray(place.get(memory))[:, :, :used]
    assert host.any(axis=(0, 2)).all()
    for layer in range(1, 3):
        np.testing.assert_array_equal(host[:, layer], host[:, 0])
    place_pairs = place.put(np.array([[0, 3]]))
    cumla.copy_blocks([cache[:, None] for cache in caches], place_pairs, backend=place.backend)
    cumla.swap_blocks(caches[0], caches[1], place_pairs, backend=place.backend)


def test_views_of_one_projection(place, rng):
    """Columns of one array, some of which are written, next to others that are read."""
    rows = place.put(rng.standard_normal((5, 576)).astype(BF16))
    weights = [place.put(np.ones(n, np.float32)) for n in (512, 64)]
    cumla.fused_q_kv_rmsnorm(
        rows[:, :512], rows[:, 512:], *weights, out=(rows[:, :512], rows[:, 512:]), backend=place.backend
    )
    with pytest.raises(ValueError, match=r"out\[0\] \(qr\): got elements that qr has too"):
        cumla.fused_q_kv_rmsnorm(
            rows[:, :512], rows[:, 512:], *weights, out=(rows[:, 64:], rows[:, :64]), backend=place.backend
        )


@pytest.mark.parametrize("views", ["itself", "fewer of its pages", "others of its pages"])
def test_pages_of_one_cache(place, views):
    cache = place.put(np.arange(6 * 16, dtype=np.uint8).reshape(6, 16))
    to = {"itself": cache, "fewer of its pages": cache[:5], "others of its pages": cache[2:]}[views]
    cumla.swap_blocks(cache, to, place.put(np.array([[0, 1]])), backend=place.backend)
    page = 3 if views == "others of its pages" else 1
    np.testing.assert_array_equal(place.get(cache)[page], np.arange(16))


def test_pages_of_one_cache_that_do_not_coincide(place):
    memory = place.put(np.zeros((7, 16), np.uint8))
    shifted = memory.reshape(-1)[8:-8].reshape(6, 16)
    with pytest.raises(ValueError, match="dst: got elements that src has too"):
        cumla.swap_blocks(memory[:6], shifted, place.put(np.array([[0, 1]])), backend=place.backend)


@pytest.mark.parametrize("strides", [(0, 128, 2), (64, 128, 2), (128, 64, 2)])
def test_an_output_that_overlaps_itself(place, strides):
    memory = place.put(np.zeros(1 << 14, np.uint8))
    like = place.put(np.zeros((5, 3, 64), BF16))
    data = memory.data if place.on_device else memory
    out = place.xp.ndarray((5, 3, 64), BF16, data, strides=strides)
    positions, table = place.put(np.arange(5)), place.put(np.ones((8, 64), np.float32))
    with pytest.raises(ValueError, match=r"out: got strides .* expected elements that do not overlap, to write"):
        cumla.apply_rope(like, positions, table, out=out, backend=place.backend)


def test_a_compiler_decides_which_arrays_share_memory(place):
    x, positions = place.put(np.ones((6, 3, 64), BF16)), place.put(np.arange(5))
    table = place.put(np.ones((8, 64), np.float32))
    with unchecked():
        cumla.apply_rope(x[1:], positions, table, out=x[:-1], backend=place.backend)
    with pytest.raises(ValueError, match="out: got elements that x has too"):
        cumla.apply_rope(x[1:], positions, table, out=x[:-1], backend=place.backend)
