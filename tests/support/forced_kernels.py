"""Every kernel of sparse attention of the cuda backend, and every way to divide its work, by name.

A forced kernel computes all results itself: no exact kernel recomputes tiles, which would hide wrong results.
"""

import contextlib

import pytest

from support.attention import nothing_attended_again

TILES, PARTS = (16, 32, 64), (2, 3, 4, 5, 6)
FEW_RANGES, SPLIT_RANGES = 3, 7  # CTAs: each has several tiles; splits begin anywhere in a tile

CAPABILITIES = {"8.0": 80, "8.6": 86, "8.9": 89}  # capabilities whose limits portable kernels get
PREFILL_KERNELS = ("chosen", *(f"hopper {tile}" for tile in TILES), "portable", "portable 8.0", "portable 8.6", "exact")
DIVISIONS = ("whole", "cut", *(f"parts {n}" for n in PARTS), *(f"cluster {n}" for n in PARTS))
DECODE_KERNELS = (
    "chosen", *(f"hopper {tile} {division}" for tile in TILES for division in DIVISIONS), "portable whole",
    "portable cut", *(f"portable cut {x}" for x in CAPABILITIES), "exact",
)  # fmt: skip


def parts_of(name):
    """Number of thread blocks per tile, if it is the same for all tiles; else 0."""
    return int(name.split()[-1]) if "parts" in name or "cluster" in name else 0


@contextlib.contextmanager
def prefill_by(name):
    """Prefill with one of PREFILL_KERNELS, in few thread blocks with several tiles each."""
    from cumla.kernels.cuda.sparse import kernels as sparse_kernels

    def choose(work):
        device, layout, heads = work.q.device.id, work.segments[0].pages.layout, int(work.q.shape[2])
        if kernel == "hopper":
            return sparse_kernels._hopper_prefill(device, layout, int(tile[0]))._replace(max_ranges=FEW_RANGES)
        return sparse_kernels._portable(device, (layout, layout), heads)._replace(max_ranges=FEW_RANGES)

    kernel, *tile = name.split()
    with forced(kernel, name) as patch:
        if kernel in ("hopper", "portable"):
            patch.setattr(sparse_kernels, "choose_for_prefill", choose)
        yield


@contextlib.contextmanager
def decode_by(name):
    """Decode by one of DECODE_KERNELS. Yields the recorded divisions."""
    from cumla.kernels.cuda.sparse import kernels as sparse_kernels
    from cumla.kernels.cuda.sparse import work as sparse_work
    from cumla.kernels.cuda.sparse.division import Division

    def divide(work, *_):
        tiles, parts, blocks = work.tiles, parts_of(name), work.tiles * work.most_blocks
        if parts:
            assert parts <= work.most_blocks
            cluster = "cluster" in name
            made.append(Division(tiles * parts, False, not cluster, parts, cluster))
        elif "cut" in name:
            made.append(Division(min(SPLIT_RANGES, blocks), work.ragged, True))
        else:
            made.append(Division(min(FEW_RANGES, tiles), work.ragged, False))
        return made[-1]

    made = []
    kernel, *how = name.split()
    with forced(kernel, name) as patch:
        if kernel in ("hopper", "portable"):
            patch.setattr(sparse_work, "divide", divide)
        if kernel == "hopper":
            patch.setattr(sparse_kernels, "tile_heads", lambda *_: int(how[0]))
        yield made


@contextlib.contextmanager
def forced(kernel, name):
    """The kernel, with the limits of the device of a capability if the name ends in one."""
    from cumla.kernels.cuda.device import assumed, is_hopper
    from cumla.kernels.cuda.sparse import kernels as sparse_kernels

    if kernel == "hopper" and not is_hopper(0):
        pytest.skip("other devices' kernels are portable")
    with contextlib.ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        if name.split()[-1] in CAPABILITIES:
            stack.enter_context(assumed(CAPABILITIES[name.split()[-1]]))
        if kernel != "chosen":
            stack.enter_context(sparse_kernels.forced(kernel))
        if kernel in ("hopper", "portable"):
            stack.enter_context(nothing_attended_again())
        yield patch
