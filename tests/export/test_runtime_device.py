"""The C runtime gives the bits that Python gives, on a device; and what its calls read and write is in their arrays."""

import ctypes
import functools
import tempfile
import threading
from pathlib import Path

import numpy as np
import pytest

from cumla.dispatch.dry_run import dry_running
from cumla.errors import InputError, RunError
from cumla.export import cubins, file_of, recorded
from cumla.export.calls import calls_of, fields_of
from cumla.export.compiled import nvrtc
from cumla.export.fields import PLANNED
from cumla.export.file import HEADER, TABLE, TABLES, checksum, read
from cumla.export.library import self_test
from cumla.export.record import Sampler
from cumla.kernels.cuda.device import described
from cumla.layout import DSV4_FP8
from cumla.specs import SPECS
from cumla.specs.inputs import Inputs, Size
from support import runtime
from support.exported_calls import Library, Placed, drawn, gaps_of, opened, python_call
from support.guarded import Guarded
from support.lab import BF16, Lab

pytestmark = pytest.mark.timeout(900)  # a file is exported once in a run
DRAWS = 12  # calls of a kind
ON_HOST, ON_DEVICE = Lab("reference", False), Lab("cuda", True)


def random_call(call, device, seed, lab=ON_DEVICE, copies=2):
    """Equal arguments of a random call, in memory of their own."""
    rng = np.random.default_rng(seed)
    sampler = Sampler(call, device, rng)
    arguments = drawn(sampler, rng)
    gaps = gaps_of(sampler, arguments, rng)
    return [Placed(lab, arguments, gaps) for _ in range(copies)]


@pytest.mark.parametrize("kind", [x if x == "v4" else pytest.param(x, marks=pytest.mark.slow) for x in runtime.MODELS])
def test_calls_with_values_are_served(kind):
    """The arguments of the tests below: without a device, on libcuda's stand-in."""
    place = runtime.folder()
    with opened(place / "libcumla.so", runtime.file(kind)) as library:
        for number, call in enumerate(runtime.calls(kind)):
            (placed,) = random_call(call, runtime.H200, number, ON_HOST, 1)
            library.call(call, placed.arguments, runtime.STREAM)
            placed.check()
    ctypes.CDLL(str(place / "libstandin.so")).stand_in_launches((runtime.Launched * 64)())


# ---- on a device


@functools.cache
def this_device():
    """The description of the device, as `cumla export` has it."""
    import cupy

    from cumla.cli.export import device_of

    attributes = cupy.cuda.Device(0).attributes
    capability = cupy.cuda.Device(0).compute_capability
    return device_of(f"{capability[:-1]}.{capability[-1]}", attributes["MultiProcessorCount"], None)


@functools.cache
def calls(kind):
    return tuple(calls_of(runtime.MODELS[kind], runtime.CLAIMS, this_device()))


@functools.cache
def file(kind):
    """The bytes of a file with code for the device."""
    try:
        nvrtc()
    except InputError as error:  # without the bindings, or a version that is refused
        pytest.skip(str(error))
    return runtime.once(f"device-{kind}", lambda: file_of(recorded(calls(kind), this_device()), this_device(), cubins))


@functools.cache
def built_runtime():
    """The runtime that finds the driver itself."""
    from cumla.export.header import write_runtime

    place = Path(tempfile.mkdtemp(prefix="cumla-runtime-device-"))
    write_runtime(place)
    runtime.built("-shared", "-fPIC", "-o", place / "libcumla.so", place / "cumla.c", "-ldl")
    return place / "libcumla.so"


@functools.cache
def library(kind, device=0):
    """The runtime with a model's file; CuPy's current device stays current."""
    import cupy

    with cupy.cuda.Device(device):
        return Library(built_runtime(), file(kind), device)


def operations(kind):
    """Names of the operations that a file of a model has, without a device."""
    return sorted({call.fields.spec.name for call in calls_of(runtime.MODELS[kind], runtime.CLAIMS, runtime.H200)})


def each_operation():
    return [(kind, name) for kind in runtime.MODELS for name in operations(kind)]


@pytest.mark.gpu
@pytest.mark.parametrize(("kind", "operation"), each_operation())
def test_bits_are_those_of_python(kind, operation):
    """Over random sizes and strides; nothing outside of the arrays is written."""
    import cupy

    stream = cupy.cuda.get_current_stream()
    for number, call in enumerate(x for x in calls(kind) if x.fields.spec.name == operation):
        for draw in range(DRAWS):
            of_c, of_python = random_call(call, this_device(), 1000 * number + draw)
            library(kind).call(call, of_c.arguments, stream.ptr)
            python_call(call, of_python.arguments)
            stream.synchronize()
            of_c.assert_same(of_python)
            of_c.check()


@pytest.mark.gpu
@pytest.mark.parametrize(("kind", "operation"), each_operation())
def test_a_captured_call(kind, operation):
    """A call in a graph, replayed twice with the arrays' first contents."""
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)
    for number, call in enumerate(x for x in calls(kind) if x.fields.spec.name == operation):
        of_c, of_python = random_call(call, this_device(), number)
        found = library(kind)
        before = {name: guarded._raw.copy() for name, guarded in of_c.guarded.items()}
        cupy.cuda.Device().synchronize()
        with stream:
            stream.begin_capture()
            found.call(call, of_c.arguments, stream.ptr)
            graph = stream.end_capture()
            for _ in range(2):
                for name, guarded in of_c.guarded.items():
                    if name != "workspace":
                        guarded._raw[...] = before[name]
                graph.launch(stream)
            stream.synchronize()
        python_call(call, of_python.arguments)
        cupy.cuda.Device().synchronize()
        of_c.assert_same(of_python)
        of_c.check()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", runtime.MODELS)
def test_the_self_test(kind, tmp_path):
    """Each kernel's results are the reference's, within bounds; a changed result in the file is found."""
    path, data = tmp_path / "file", file(kind)
    path.write_bytes(data)
    tables = read(path)
    assert self_test(path) == len(tables["cases"])
    damaged = bytearray(data)
    last = tables["checks"][-1]
    place = HEADER.size + TABLE.size * list(TABLES).index("bytes")
    (start, _) = TABLE.unpack_from(data, place)
    damaged[start + last[1] + 1] ^= 0x40  # bits of an element
    damaged[24:32] = checksum(bytes(damaged[HEADER.size :])).to_bytes(8, "little")
    path.write_bytes(damaged)
    with pytest.raises(RunError, match=r"\[\d+\]: got .*, expected"):
        self_test(path)


@pytest.mark.gpu
def test_two_threads():
    """Each with a stream and a workspace of its own, and one library."""
    import cupy

    found, failures = library("v4"), []
    of_kind = [x for x in calls("v4") if x.fields.spec.name in ("sparse_mla_decode", "apply_rope")]
    made = [[(call, *random_call(call, this_device(), seed)) for call in of_kind] for seed in range(2)]
    for of_thread in made:
        for call, _, of_python in of_thread:
            python_call(call, of_python.arguments)
    cupy.cuda.Device().synchronize()

    def work(number):
        try:
            with cupy.cuda.Device(0):
                stream = cupy.cuda.Stream(non_blocking=True)
                for _ in range(50):
                    for call, of_c, _ in made[number]:
                        found.call(call, of_c.arguments, stream.ptr)
                stream.synchronize()
        except Exception as error:  # a thread's error is none of the test's
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    for of_thread in made:
        for _, of_c, of_python in of_thread:
            of_c.assert_same(of_python)
            of_c.check()


@pytest.mark.gpu
def test_two_devices(two_gpus):
    """A library for each of two devices, and calls on both in turn."""
    import cupy

    results = []
    call = next(x for x in calls("v4") if x.fields.spec.name == "sparse_mla_decode")
    libraries = [library("v4", device) for device in range(2)]
    for device in (0, 1, 0, 1):
        with cupy.cuda.Device(device):
            of_c, of_python = random_call(call, this_device(), 5)
            libraries[device].call(call, of_c.arguments, cupy.cuda.get_current_stream().ptr)
            python_call(call, of_python.arguments)
            cupy.cuda.Device().synchronize()
            of_c.assert_same(of_python)
            of_c.check()
            results.append(of_c.guarded["out"].everything())
    for result in results[1:]:
        np.testing.assert_array_equal(result, results[0])


# ---- a C4A step

BLOCK, COLUMNS, WINDOW, TOPK, HEADS, LAYERS = 64, 16, 128, 512, 64, 2


class Step:
    """The arrays of a decode step of two layers, and its calls in order, of the runtime or of Python."""

    def __init__(self, lab, device, requests, seed):
        rng = np.random.default_rng(seed)
        inputs = Inputs("reference", Size(pages=requests * COLUMNS, block_size=BLOCK), seed)

        def put(array):
            self.guarded.append(Guarded(lab, array, ()))
            return self.guarded[-1].array

        def rows(*shape):
            return rng.standard_normal(shape).astype(BF16)

        self.guarded, self.n, n = [], requests, requests
        angles = np.arange(COLUMNS * BLOCK)[:, None] * 10_000.0 ** (-np.arange(32) / 32)
        table = rng.permutation(n * COLUMNS).reshape(n, COLUMNS).astype(np.int32)
        self.table = table
        self.lengths, self.positions, self.slots, self.selected = (
            put(x) for x in (np.zeros(n, np.int32), np.zeros(n, np.int64), np.zeros(n, np.int64),
                             np.zeros((n, TOPK), np.int32))
        )  # fmt: skip
        per_token = {
            "token_to_req_indices": put(np.arange(n, dtype=np.int32)), "is_valid_token": put(np.ones(n, np.bool_)),
        }  # fmt: skip
        rope = {
            "positions": self.positions, "cos_sin_cache":
            put(np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)),
        }  # fmt: skip
        swa, swa_lens = put(np.zeros((n, WINDOW), np.int32)), put(np.zeros(n, np.int32))
        slots, slot_lens = put(np.zeros((n, TOPK), np.int32)), put(np.zeros(n, np.int32))
        table = put(table)
        self.calls = [
            ("compute_swa_indices_and_lens", {
                "query_start_loc": put(np.arange(n + 1, dtype=np.int32)), "seq_lens": self.lengths, **per_token,
                "block_table": table, "block_size": BLOCK, "window_size": WINDOW, "num_tokens": n, "swa_indices": swa,
                "swa_lens": swa_lens,
            }),
            ("compute_global_topk_indices_and_lens", {
                "topk_indices": self.selected, **per_token, "block_table": table, "block_size": BLOCK, "compact": True,
                "global_topk_indices": slots, "topk_lens": slot_lens,
            }),
        ]  # fmt: skip
        memory = {"workspace": None}
        sink = put(rng.standard_normal(HEADS).astype(np.float32))
        for layer in range(LAYERS):
            rotated = put(np.zeros((n, HEADS, 512), BF16))
            out, lse = put(np.zeros((n, HEADS, 512), BF16)), put(np.zeros((n, HEADS, 1), np.float32))
            k_cache, extra_k_cache = (put(inputs.cache(DSV4_FP8)) for _ in range(2))
            decode = {
                "q": rotated[:, None], "k_cache": k_cache, "indices": swa[:, None], "topk_length": swa_lens,
                "extra_k_cache": extra_k_cache, "extra_indices": slots[:, None],
                "extra_topk_length": slot_lens.reshape(n, 1),
                "attn_sink": sink, "layout": DSV4_FP8, "extra_layout": DSV4_FP8, "batch_invariant": False,
                "out": out[:, None], "lse": lse,
                "softmax_scale": 512**-0.5, **memory,
            }  # fmt: skip
            if memory["workspace"] is None:
                with described(device):
                    needed = SPECS["sparse_mla_decode"].scratch(decode)
                memory["workspace"] = decode["workspace"] = put(np.zeros(needed, np.uint8))
            self.calls += [
                ("qnorm_rope_and_insert", {
                    "q": put(rows(n, HEADS, 512)), "kv": put(rows(n, 512)), "k_cache": k_cache,
                    "slot_mapping": self.slots, **rope, "block_size": BLOCK, "layout": DSV4_FP8, "eps": 1e-6,
                    "out": rotated,
                }),
                ("sparse_mla_decode", decode | {PLANNED: int(layer > 0)}),
                ("apply_rope", {
                    "x": out, **rope, "inverse": True, "rope_first": False, "is_neox": False, "out": out,
                }),
            ]  # fmt: skip
        self.outputs = [arguments[name] for _, arguments in self.calls for name in ("out", "lse", "k_cache", "swa_lens")
                        if name in arguments]  # fmt: skip

    def set(self, xp, lengths, rng):
        """Lengths of the requests, the new tokens included."""
        positions = lengths - 1
        self.lengths[...], self.positions[...] = xp.asarray(lengths), xp.asarray(positions)
        pages = self.table[np.arange(self.n), positions // BLOCK]
        self.slots[...] = xp.asarray(pages.astype(np.int64) * BLOCK + positions % BLOCK)
        order = np.argsort(rng.random((self.n, COLUMNS * BLOCK // 4)), axis=1)[:, :TOPK]
        selected = np.full((self.n, TOPK), -1)
        selected[:, : order.shape[1]] = np.where(order < lengths[:, None] // 4, order, -1)
        self.selected[...] = xp.asarray(selected.astype(np.int32))

    def run_python(self):
        plan = None
        for name, arguments in self.calls:
            fields = fields_of(SPECS[name])
            plan = fields.plan_in(arguments) if fields.has_plan and plan is None else plan
            fields.call(arguments, plan if fields.has_plan else None)

    def run_c(self, library, stream):
        for name, arguments in self.calls:
            library.function(fields_of(SPECS[name]), arguments, stream)()


def test_a_step_is_served():
    """Without a device, on libcuda's stand-in; and Python takes its arguments."""
    place, step = runtime.folder(), Step(ON_HOST, runtime.H200, 3, 1)
    step.set(np, np.array([1, 130, 600]), np.random.default_rng(0))
    with opened(place / "libcumla.so", runtime.file("v4")) as library:
        step.run_c(library, runtime.STREAM)
    assert ctypes.CDLL(str(place / "libstandin.so")).stand_in_launches((runtime.Launched * 64)()) == 10
    with dry_running(0, anywhere=True, described=runtime.H200) as dry_run:
        step.run_python()
    assert len(dry_run.launches) == 10


@pytest.mark.gpu
@pytest.mark.parametrize("requests", [1, 3, 20])
def test_a_step_in_a_graph(requests):
    """The runtime's graph, replayed for requests of other lengths, has the bits of Python's calls."""
    import cupy

    of_c, of_python = (Step(ON_DEVICE, this_device(), requests, 1) for _ in range(2))
    rng, found = np.random.default_rng(2), library("v4")
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        of_c.run_c(found, stream.ptr)
        graph = stream.end_capture()
    lengths = rng.integers(1, COLUMNS * BLOCK - 8, requests).astype(np.int32)
    for number in range(6):
        if number == 3:
            lengths = lengths[::-1].copy()
        for step in (of_c, of_python):
            step.set(cupy, lengths, np.random.default_rng(number))
        cupy.cuda.Device().synchronize()
        graph.launch(stream)
        of_python.run_python()
        cupy.cuda.Device().synchronize()
        for found_array, wanted in zip(of_c.outputs, of_python.outputs, strict=True):
            assert found_array.get().tobytes() == wanted.get().tobytes()
        for guarded in of_c.guarded:
            guarded.assert_margins()
        lengths = np.minimum(lengths + 1, COLUMNS * BLOCK)
