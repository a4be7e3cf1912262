"""Launches for a device that is described, and need not be here, are those on the device, word for word."""

import contextlib
import sys
import types
from dataclasses import replace

import numpy as np
import pytest

import cumla
from cumla.dispatch.dry_run import dry_running, fake_array
from cumla.kernels.cuda import launch, projection, tma
from cumla.kernels.cuda.device import LIMITS, Device, assumed, described, device_of
from cumla.kernels.types.plan import DecodePlan
from cumla.specs import SPECS
from cumla.specs.inputs import TINY, Inputs
from cumla.specs.spec import flat

HOPPER = Device(LIMITS[90], 132, True, ((2, 66), (3, 40), (4, 30), (5, 24), (6, 20)))
EVERY = [(spec, variant) for spec in SPECS.values() for variant in spec.variants]
MORE = replace(TINY, requests=3, context=90, block_size=16, pages=24)
LEAST_ADDRESS = 1 << 40  # no size or stride is as large


def words(launches, places):
    """Everything that the driver reads. Addresses outside the arrays at `places` are numbered by occurrence."""
    numbers, found = {}, []
    for each in launches:
        arguments = [
            numbers.setdefault(x, ("memory", len(numbers)))
            if isinstance(x, int) and x >= LEAST_ADDRESS and not any(first <= x < end for first, end in places)
            else float(x) if isinstance(x, float | np.floating) else int(x)
            for x in each.packed_arguments
        ]  # fmt: skip
        kernel = each.kernel
        sizes = each.grid, each.block, each.shared_bytes, each.overlap, kernel._most_shared
        found.append((kernel.raw.name, *sizes, kernel._packing.format, arguments))
    return found


def with_views(value):
    """Arrays of an emulated device as NumPy's arrays at the same addresses."""
    if hasattr(value, "_view"):
        return value._view
    if isinstance(value, list | tuple):
        items = [with_views(item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


@pytest.mark.parametrize("size", [TINY, MORE], ids=["tiny", "more"])
@pytest.mark.parametrize("capability", [90, 80])
@pytest.mark.parametrize(("spec", "variant"), EVERY, ids=lambda x: x.name)
def test_launches_are_those_on_the_device(emulated, spec, variant, capability, size, monkeypatch):
    monkeypatch.setattr(launch.Kernel, "_launch", lambda *launch: None)  # recorded only
    x = Inputs("cuda", size)
    arguments = variant.arguments(x)
    if spec.outputs:
        arguments = spec.new_results(x, arguments) | arguments
    given = [array for array in flat(arguments.values()) if hasattr(array, "_view")]
    places = [(array.data.mem.ptr, array.data.mem.ptr + array.data.mem.size) for array in given]
    limits = assumed(capability) if capability != 90 else contextlib.nullcontext(LIMITS[90])
    with limits as of, launch.recorded_launches() as launches:
        spec.function(**arguments, backend="cuda")
        device = Device(of, device_of(0).sms, False, None)
    with dry_running(0, anywhere=True, described=device) as dry_run:
        spec.function(**{name: with_views(value) for name, value in arguments.items()}, backend="cuda")
    assert words(dry_run.launches, places) == words(launches, places)
    assert launches


def decode(topk=512, **keywords):
    """A decode of two requests of 64 heads, with fake arrays."""
    bf16 = np.dtype(cumla.dispatch.call.BFLOAT16)
    return cumla.sparse_mla_decode(
        fake_array((2, 1, 64, 512), bf16), fake_array((16, 64, 584), np.uint8), fake_array((2, 1, topk), np.int32),
        backend="cuda", **keywords,
    )  # fmt: skip


@pytest.mark.parametrize(("spec", "variant"), EVERY, ids=lambda x: x.name)
def test_no_launcher_asks_for_a_device(spec, variant, monkeypatch):
    arguments = variant.arguments(Inputs("reference"))
    monkeypatch.setitem(sys.modules, "cupy", None)  # an import fails
    monkeypatch.setattr(tma, "ctypes", None)
    with dry_running(0, anywhere=True, described=HOPPER) as dry_run:
        spec.function(**arguments)
    assert dry_run.launches


@pytest.mark.parametrize(
    "keywords", [{}, {"plan": DecodePlan(fake_array((1 << 26,), np.uint8))}, {"plan": DecodePlan()}]
)
def test_plans_of_a_device_that_is_not_here(keywords, monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    launched = first_launch(HOPPER, batch_invariant=not keywords, **keywords)
    assert launched.kernel.raw.file == "sm90/decode/decode.cu"


def first_launch(device, **keywords):
    with dry_running(0, anywhere=True, described=device) as dry_run:
        decode(**keywords)
    return dry_run.launches[0]


def test_the_description_decides():
    """SMs and clusters that run at a time decide the division of a decode."""
    assert first_launch(HOPPER).kernel.raw.macros["PARTS"] == 4
    assert first_launch(HOPPER._replace(clusters=((4, 1),))).kernel.raw.macros["PARTS"] == 1
    assert first_launch(HOPPER, topk=2048).grid[0] > first_launch(HOPPER._replace(sms=78), topk=2048).grid[0]


def test_a_product_is_divided_for_each_device():
    """The division for one device was kept, by the device's number, for another."""
    sizes = 4096, 7168, 1, 1, False, False, 0
    found = []
    for device in (HOPPER, HOPPER._replace(sms=8, has_clusters=False, clusters=None)):
        with described(device):
            found.append(projection.division(*sizes))
    assert found[0] != found[1]


def test_a_described_kernel_is_never_launched():
    with dry_running(0, anywhere=True, described=HOPPER) as dry_run:
        decode()
    with pytest.raises(RuntimeError, match="got a launch of a described kernel"):
        dry_run.launches[0].kernel.handle(0)


def test_clusters_are_described_too():
    with (
        pytest.raises(ValueError, match="clusters: got None, expected the number"),
        described(HOPPER._replace(clusters=None)),
    ):
        pass


def test_maps_are_refused_as_by_the_driver():
    """Address, pages, bytes of a page, its rows, bytes of a row, rows of a box."""
    good = 1 << 41, 4, 64 * 1152, 64, 1152, 64
    wrong = {0: (1 << 41) + 8, 1: 0, 2: 64 * 1152 + 8, 3: 0, 5: 512}
    with described(HOPPER):
        assert tma.map_of_pages(*good)[:10] == (1 << 41, 2, 576, 64, 4, 1152, 64 * 1152, 64, 64, 1)
        for at, value in wrong.items():
            assert tma.map_of_pages(*good[:at], value, *good[at + 1 :]) == tma.NO_MAP


def test_a_driver_without_tensor_maps_is_an_error(monkeypatch):
    """Another, slower kernel was taken in silence."""
    monkeypatch.setattr(tma, "ctypes", types.SimpleNamespace(CDLL=lambda name: object()))
    with pytest.raises(RuntimeError, match="without cuTensorMapEncodeTiled, expected CUDA 12 or later"):
        tma.encoded(1 << 41, 4, 64 * 1152, 64, 1152, 64, 1152)
