"""Tile sizes of the portable attention kernel fit its devices."""

import pytest

import cumla
from cumla.kernels.cuda.device import assumed, has_clusters, limits
from cumla.kernels.cuda.sparse import portable as sparse_portable

LAYOUTS = (cumla.DSV4_FP8, cumla.V32_FP8, cumla.V32_NOPE_FP8, cumla.MLA_BF16, cumla.DSV4_BF16)
KIB = 1024
# Shared memory of a thread block and of a multiprocessor (CUDA programming guide, compute capabilities).
DEVICES = {
    "8.0": (163, 164), "8.6": (99, 100), "8.9": (99, 100), "9.0": (227, 228), "10.0": (227, 228), "12.0": (99, 100),
}  # fmt: skip


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda x: x.name)
@pytest.mark.parametrize("heads", [1, 16, 17, 32, 33, 128])
def test_every_device_has_room(device, layout, heads):
    block_limit, multiprocessor_limit = (limit * KIB for limit in DEVICES[device])
    size = sparse_portable.choose((layout, layout), heads, block_limit, multiprocessor_limit)
    assert sparse_portable.shared_bytes((layout, layout), size) <= block_limit
    assert size.heads in (16, 32, 64)
    assert 64 % size.keys == 0
    assert size.heads < max(2 * heads, 17)  # tiles are not mostly empty


@pytest.mark.parametrize("device", DEVICES)
def test_assumed_limits_are_the_devices(device):
    number = int(device.replace(".", ""))
    with assumed(number) as found:
        assert (found.capability, limits(0)) == (number, found)
        assert (found.shared_bytes, found.sm_shared_bytes) == tuple(KIB * x for x in DEVICES[device])
        assert has_clusters(0) == (number >= 90)
    with pytest.raises(ValueError, match=r"capability: got 7\.5, expected one of 8\.0, 8\.6"), assumed(75):
        pass


def test_large_devices_take_64_heads():
    for layout in LAYOUTS:
        assert sparse_portable.choose((layout, layout), 128, 227 * KIB, 228 * KIB).heads == 64


def test_too_little_shared_memory_is_an_error():
    with pytest.raises(ValueError, match="shared memory"):
        sparse_portable.choose((cumla.MLA_BF16, cumla.MLA_BF16), 128, 48 * KIB, 64 * KIB)


@pytest.mark.parametrize(
    ("tokens", "heads", "taken"), [(1, 64, 16), (6, 64, 16), (8, 64, 64), (128, 64, 64), (1, 16, 16), (1, 128, 16)]
)
def test_few_blocks_take_low_tiles(tokens, heads, taken, monkeypatch):
    """Tiles have 10 blocks; 132 SMs run 264 CTAs with 16 heads each."""
    from cumla.kernels.cuda.sparse import kernels

    class Array:
        device = type("Device", (), {"id": 0})

        def __init__(self, *shape):
            self.shape = shape

    pages = type("Pages", (), {"layout": cumla.DSV4_FP8})
    segments = [type("Segment", (), {"pages": pages, "indices": Array(tokens, 1, n)}) for n in (128, 512)]
    work = kernels.AttentionCall(Array(tokens, 1, heads, 512), segments, *(None,) * 8)
    monkeypatch.setattr(kernels, "device_sms", lambda device: 132)
    for capability in (80, 86):
        with assumed(capability):
            assert kernels._portable_heads(work, True) == taken
            assert kernels._portable_heads(work, False) == heads  # results must not depend on the batch
