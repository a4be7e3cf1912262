"""Arrays of every framework are imported and exported without a copy: same memory, same values, or a clear error."""

import ctypes
import gc
import pathlib
import sys
import types
import warnings
import weakref
from unittest import mock

import ml_dtypes
import numpy as np
import pytest

import cumla
from cumla.arrays import capsule, dlpack
from support import pairs
from support.capsules import Foreign, ForeignVersioned, InDeviceMemory, new_capsule
from support.lab import BF16

DOCS = pathlib.Path(__file__).parents[2] / "docs" / "interop.md"


def documented(title):
    """The table under a heading of the docs."""
    text = DOCS.read_text().split(f"### {title}\n")[1].split("\n#")[0]
    return [line for line in text.splitlines() if line.startswith("|")]


def compare_with_docs(title, lines):
    rows = documented(title)
    complete = pairs.installed("torch") and pairs.installed("jax")
    right = rows == lines if complete else set(lines) <= set(rows)
    assert right, f"docs/interop.md, {title}, should have:\n" + "\n".join(lines)


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
def test_docs_table_of_host_memory():
    compare_with_docs("Host memory", pairs.table(pairs.host_producers(), on_device=False))


@pytest.mark.gpu
def test_docs_table_of_device_memory():
    compare_with_docs("CUDA memory", pairs.table(pairs.cuda_producers(), on_device=True))


@pytest.mark.parametrize("dtype", pairs.DTYPES)
@pytest.mark.parametrize("producer", ["NumPy", "torch", "any, DLPack 1", "any, DLPack 0", "JAX"])
def test_host_arrays_are_borrowed_without_a_copy(producer, dtype):
    produce = pairs.host_producers().get(producer)
    if produce is None and producer in ("torch", "JAX"):
        pytest.skip(f"{producer} is not installed")
    array = produce(dtype)
    native = dlpack.borrow(array)
    raw = pairs.bytes_of_pattern(dtype)
    assert native.shape == pairs.SHAPE
    assert native.dtype == (np.uint8 if dtype.startswith("float8") else pairs.numpy_type(dtype))
    np.testing.assert_array_equal(native.view(np.uint8).reshape(-1), raw)
    assert pairs.address(native) == pairs.address(getattr(array, "array", array))


@pytest.mark.parametrize(
    "cut",
    [
        pytest.param(lambda x: x[1:, 2:], id="offset"),
        pytest.param(lambda x: x[::2, ::3], id="steps"),
        pytest.param(lambda x: x.T, id="transposed"),
        pytest.param(lambda x: x[:0], id="no-rows"),
        pytest.param(lambda x: x[:, :0], id="no-columns"),
        pytest.param(lambda x: x[1, 1], id="0-d"),
    ],
)
@pytest.mark.parametrize("dtype", ["uint8", "bfloat16", "float32", "float8_e4m3fn"])
@pytest.mark.parametrize("wrap", [lambda tensor: tensor, pairs.VersionedProducer, pairs.UnversionedProducer])
def test_strides_offsets_and_empty_arrays(cut, dtype, wrap):
    torch = pytest.importorskip("torch")
    tensor = cut(torch.arange(96).view(6, 16).to(getattr(torch, dtype)))
    native = dlpack.borrow(wrap(tensor))
    assert native.shape == tuple(tensor.shape)
    if native.size:
        assert native.strides == tuple(stride * native.itemsize for stride in tensor.stride())
        assert pairs.address(native) == tensor.data_ptr()
    want = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    np.testing.assert_array_equal(np.ascontiguousarray(native).reshape(-1).view(np.uint8), want)


def test_broadcast_arrays_are_read_but_not_written():
    torch = pytest.importorskip("torch")
    tensor = torch.zeros(1, 8).expand(5, 8)
    assert dlpack.borrow(tensor).strides == (0, 4)
    with pytest.raises(ValueError, match=r"out: got strides \(0, 4\) bytes, expected elements that do not overlap"):
        dlpack.borrow(tensor, "out", writable=True)
    one = torch.zeros(1, 8).expand(1, 8)
    assert dlpack.borrow(one, "out", writable=True).shape == (1, 8)


def read_only_arrays():
    frozen = np.zeros((2, 3), np.float32)
    frozen.flags.writeable = False
    yield pytest.param(lambda: frozen, id="numpy")
    yield pytest.param(lambda: pairs.VersionedProducer(frozen), id="dlpack-flag")
    yield pytest.param(lambda: pytest.importorskip("jax.numpy").zeros((2, 3)), id="jax")


@pytest.mark.parametrize("make", list(read_only_arrays()))
def test_read_only_arrays_are_no_outputs(make):
    array = make()
    assert not dlpack.borrow(array, "k_cache").flags.writeable
    with pytest.raises(ValueError, match=r"k_cache: got a read-only .* array, expected a writable array"):
        dlpack.borrow(array, "k_cache", writable=True)


def test_jax_caches_are_never_written_without_its_knowledge():
    jax = pytest.importorskip("jax")
    cache = jax.device_put(cumla.V32_FP8.allocate(2, 4))
    k = jax.numpy.ones((1, 576), jax.numpy.bfloat16)
    with pytest.raises(ValueError, match="k_cache: got a read-only jax array"):
        cumla.quantize_and_insert_k_cache(k, cache, jax.numpy.zeros(1, jax.numpy.int32), 4, layout=cumla.V32_FP8)
    assert not np.asarray(cache).any()


def test_versioned_memory_is_given_back_once():
    array = ForeignVersioned(np.arange(6, dtype=np.int32))
    view = dlpack.borrow(array)[2:]
    gc.collect()
    assert (view.tolist(), array.released) == ([2, 3, 4, 5], 0)
    del view
    gc.collect()
    assert array.released == 1


@pytest.mark.parametrize("wrap", [pairs.VersionedProducer, pairs.UnversionedProducer])
def test_memory_lives_as_long_as_the_view_of_it(wrap):
    torch = pytest.importorskip("torch")
    tensor = torch.full((1000,), 7.0)
    alive = weakref.ref(tensor.untyped_storage())
    native = dlpack.borrow(wrap(tensor))[10:20]
    del tensor
    gc.collect()
    assert (native == 7).all()
    del native
    gc.collect()
    assert alive() is None


def test_memory_that_a_capsule_alone_keeps():
    """The input array may hold no reference to the memory."""
    array = Foreign(np.arange(6, dtype=np.int32).reshape(2, 3))
    native = dlpack.borrow(array)
    gc.collect()
    assert native.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert not array.released
    part = native[1]
    del native
    assert part.tolist() == [3, 4, 5]
    del part
    gc.collect()
    assert array.released == 1


def test_an_offset_that_is_said_apart():
    whole = np.arange(8, dtype=np.int32)
    assert dlpack.borrow(Foreign(whole[3:], byte_offset=12)).tolist() == [3, 4, 5, 6, 7]


def test_elements_of_several_lanes_are_refused():
    with pytest.raises(TypeError, match="q: got DLPack type code 2, 32 bits, 4 lanes, which has no counterpart"):
        dlpack.borrow(Foreign(np.zeros(3, np.float32), lanes=4), "q")


def test_results_outlive_the_call():
    torch = pytest.importorskip("torch")
    results = []
    for i in range(20):
        out, _ = cumla.compute_global_topk_indices_and_lens(
            torch.full((50, 64), i, dtype=torch.int32), torch.zeros(50, dtype=torch.int32),
            torch.zeros(1, 100, dtype=torch.int32), 1, torch.ones(50, dtype=torch.bool),
        )  # fmt: skip
        results.append(out)
    gc.collect()
    assert all((out == 0).all() for out in results)


class Elsewhere:
    """An array in memory that cumla does not support."""

    def __init__(self, device):
        self.device = device

    def __dlpack_device__(self):
        return self.device

    def __dlpack__(self, **kwargs):
        raise AssertionError("its memory was asked for")


@pytest.mark.parametrize(
    ("device", "text"), [((3, 0), "pinned host"), ((13, 0), "managed"), ((10, 0), "type 10")], ids=str
)
def test_memory_that_is_neither_host_nor_device(device, text):
    with pytest.raises(ValueError, match=f"q: got an array in {text} memory, expected plain CPU or CUDA device memory"):
        dlpack.borrow(Elsewhere(device), "q")


def test_unusable_objects():
    with pytest.raises(TypeError, match="q: got list, expected an array"):
        dlpack.borrow([1, 2], "q")
    with pytest.raises(TypeError, match="q: got NoneType, expected an array"):
        dlpack.borrow(None, "q")


def test_unusable_torch_tensors():
    torch = pytest.importorskip("torch")
    for tensor, error, text in (
        (torch.zeros(3, device="meta"), ValueError, "q: got a torch tensor on meta, expected one on the CPU or a CUDA"),
        (torch.zeros(3, 3).to_sparse(), TypeError, "q: got a torch tensor of layout torch.sparse_coo"),
        (
            torch.complex(torch.ones(3), torch.ones(3)).conj().imag,
            ValueError,
            "q: got a view with its negative bit set",
        ),
        (torch.zeros(3, dtype=torch.complex64), TypeError, "x"),
    ):
        if text == "x":  # the public function refuses dtypes that NumPy has
            with pytest.raises(TypeError, match="q: got dtype complex64, expected bfloat16"):
                cumla.sparse_mla_decode(tensor, tensor, tensor)
            continue
        with pytest.raises(error, match=text):
            dlpack.borrow(tensor, "q")


def test_types_without_a_counterpart():
    torch = pytest.importorskip("torch")
    wrapped = pairs.VersionedProducer(torch.zeros(3, dtype=torch.complex64))
    with pytest.raises(TypeError, match="q: got DLPack type code 5, 64 bits, 1 lanes, which has no counterpart"):
        dlpack.borrow(wrapped, "q")


def test_a_capsule_of_a_later_dlpack():
    """Only the version of such a tensor may be read."""
    tensor = capsule.ManagedTensorVersioned(major=2, minor=1)

    class Later:
        def __dlpack_device__(self):
            return 1, 0

        def __dlpack__(self, *, max_version):
            return new_capsule(ctypes.addressof(tensor), b"dltensor_versioned", None)

    with pytest.raises(ValueError, match=r"q: got DLPack version 2.1, expected 1.x"):
        dlpack.borrow(Later(), "q")


@pytest.mark.parametrize("name", ["PyCapsule_GetPointer", "PyCapsule_GetName", "PyCapsule_SetName"])
def test_others_may_call_pythons_functions_with_other_types(name, monkeypatch):
    function = getattr(ctypes.pythonapi, name)
    monkeypatch.setattr(function, "argtypes", (ctypes.c_double,))
    array = np.arange(3.0)
    np.testing.assert_array_equal(dlpack.borrow(Foreign(array)), array)
    assert function.argtypes == (ctypes.c_double,)


class Once:
    """A library that returns the same capsule on every export."""

    def __init__(self, array, device=(1, 0)):
        self.capsule, self.device = array.__dlpack__(), device

    def __dlpack_device__(self):
        return self.device

    def __dlpack__(self, **keywords):
        return self.capsule


def test_a_capsule_is_taken_by_one_at_a_time():
    once = Once(np.full(100, 7.0))
    ours = dlpack.borrow(once, "k")
    with pytest.raises((ValueError, BufferError)):  # NumPy would free memory that cumla holds
        np.from_dlpack(once)
    with pytest.raises(ValueError, match="k: got a DLPack capsule named 'used_dltensor', expected an unused one"):
        dlpack.borrow(once, "k")
    assert (ours == 7).all()
    del ours
    gc.collect()
    theirs = np.from_dlpack(once)  # the capsule was returned unchanged
    with pytest.raises(ValueError, match="k: got a DLPack capsule named 'used_dltensor'"):
        dlpack.borrow(once, "k")
    assert (theirs == 7).all()


def test_what_is_no_capsule():
    once = Once(np.zeros(3))
    for wrong in (None, 5, np.zeros(3)):
        once.capsule = wrong
        with pytest.raises(TypeError, match=f"q: got {type(wrong).__name__} from __dlpack__, expected a capsule"):
            dlpack.borrow(once, "q")


def test_a_tensor_that_is_elsewhere_than_it_says():
    """Reading a device address as host memory would crash."""
    foreign = Foreign(np.zeros(3))
    foreign.__class__ = type("Elsewhere", (Foreign,), {"__dlpack_device__": lambda self: next(self.devices)})
    foreign.devices = iter([(1, 0), (2, 1)])  # the object's device, then its tensor's
    with pytest.raises(ValueError, match="q: got a tensor on CUDA 1 from an array that says it is on CPU 0"):
        dlpack.borrow(foreign, "q")


def test_masks_are_not_lost_in_silence():
    with pytest.raises(TypeError, match="q: got a masked array, whose mask would be lost, expected a plain one"):
        dlpack.borrow(np.ma.masked_equal([1, 2], 2), "q")


def test_masked_tensors_are_refused():
    torch = pytest.importorskip("torch")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that this is a prototype
        tensor = torch.masked.masked_tensor(torch.zeros(2), torch.tensor([True, False]))
    with pytest.raises(TypeError, match="q: got a torch MaskedTensor, whose mask would be lost, expected a plain one"):
        dlpack.borrow(tensor, "q")
    dlpack.borrow(torch.nn.Parameter(torch.zeros(2)), "q")
    records = np.zeros(2, np.float32).view(np.recarray)
    assert type(dlpack.borrow(records, "q")) is np.ndarray


def test_jax_tracers_raise_an_error_that_names_the_module():
    jax = pytest.importorskip("jax")
    with pytest.raises(TypeError, match=r"q: got a JAX tracer, .* inside jax.jit use cumla.interop.jax"):
        jax.jit(lambda x: cumla.sparse_mla_decode(x, x, x))(jax.numpy.zeros(3))


def test_tensors_that_need_gradients_are_taken():
    torch = pytest.importorskip("torch")
    assert dlpack.borrow(torch.ones(3, requires_grad=True)).sum() == 3


def test_frameworks_mix_on_one_device(rng):
    torch, jnp = pytest.importorskip("torch"), pytest.importorskip("jax.numpy")
    topk = rng.integers(0, 8, (6, 4)).astype(np.int32)
    table = rng.permutation(8).astype(np.int32)[None]
    want, _ = cumla.compute_global_topk_indices_and_lens(
        topk, np.zeros(6, np.int32), table, 1, np.ones(6, np.bool_)
    )  # fmt: skip
    out, lens = cumla.compute_global_topk_indices_and_lens(
        torch.from_numpy(topk), jnp.zeros(6, jnp.int32), pairs.VersionedProducer(table), 1, np.ones(6, np.bool_)
    )
    assert type(out) is type(lens) is torch.Tensor
    np.testing.assert_array_equal(out.numpy(), want)


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_results_come_back_in_the_callers_framework(framework):
    module = pytest.importorskip(framework)
    make = module.from_numpy if framework == "torch" else module.device_put
    q = dlpack.give(np.ones((2, 1, 3, 512), BF16), framework)
    cache = make(np.zeros((2, 4, 584), np.uint8))
    out, lse = cumla.sparse_mla_decode(q, cache, make(np.zeros((2, 1, 5), np.int32)))
    assert type(out) is type(lse) is type(q)
    assert str(out.dtype).endswith("bfloat16")
    assert tuple(out.shape) == (2, 1, 3, 512)


def test_float8_caches_of_any_framework_are_taken_as_their_bytes():
    torch = pytest.importorskip("torch")
    raw = np.random.default_rng(0).integers(0, 120, (2, 4, 656)).astype(np.uint8)
    q = torch.ones(1, 1, 2, 576, dtype=torch.bfloat16)
    indices = torch.arange(8, dtype=torch.int32).view(1, 1, 8)
    want, _ = cumla.sparse_mla_decode(q, torch.from_numpy(raw), indices)
    for cache in (torch.from_numpy(raw).view(torch.float8_e4m3fn), raw.view(ml_dtypes.float8_e4m3fn)):
        out, _ = cumla.sparse_mla_decode(q, cache, indices)
        assert torch.equal(out.view(torch.int16), want.view(torch.int16))


def test_cuda_memory_without_cupy_names_the_argument(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)  # makes its import fail
    array = InDeviceMemory(shape=(2, 4), typestr="<i4", data=(4096, False), version=3)
    with pytest.raises(ValueError, match=r"^indices: got an array in CUDA memory, which needs CuPy: pip install"):
        cumla.sparse_mla_prefill(np.ones((2, 1, 512), BF16), np.ones((3, 512), BF16), array)


class NoArrayType(types.ModuleType):
    """A module whose names exist but are not classes."""

    def __init__(self):
        super().__init__("stand-in")
        self.ndarray = self.Tensor = self.Array = 3


class LazyModule(types.ModuleType):
    """A module that is imported when an attribute is read; the import fails."""

    def __getattr__(self, name):
        raise ImportError(f"{name}: a library is missing")


STAND_INS = {
    "an empty module": lambda: types.ModuleType("stand-in"), "none": lambda: None, "no module": object,
    "a mock": mock.MagicMock, "no classes": NoArrayType, "lazy": lambda: LazyModule("lazy"),
}  # fmt: skip


@pytest.mark.parametrize("name", ["cupy", "torch", "jax"])
@pytest.mark.parametrize("stand_in", STAND_INS)
def test_modules_of_a_frameworks_name_that_are_not_the_framework(name, stand_in, monkeypatch):
    """Or not yet: another thread may be importing it."""

    class NewType(Foreign):  # a type new to cumla
        pass

    q, kv, indices = np.ones((1, 1, 512), BF16), np.ones((3, 512), BF16), np.array([[0, 2]], np.int32)
    want = cumla.sparse_mla_prefill(q, kv, indices)
    monkeypatch.setitem(sys.modules, name, STAND_INS[stand_in]())
    got = cumla.sparse_mla_prefill(q, kv, NewType(indices))
    monkeypatch.undo()
    for array, wanted in zip(got, want, strict=True):
        np.testing.assert_array_equal(array, wanted)


@pytest.mark.parametrize("stand_in", ["an empty module", "lazy"])
def test_cuda_memory_with_another_package_named_cupy(stand_in, monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", STAND_INS[stand_in]())
    array = InDeviceMemory(shape=(2, 4), typestr="<i4", data=(4096, False), version=3)
    with pytest.raises(ValueError, match=r"^indices: got an array in CUDA memory, which needs CuPy: pip install"):
        cumla.sparse_mla_prefill(np.ones((2, 1, 512), BF16), np.ones((3, 512), BF16), array)


@pytest.mark.gpu
class TestOnDevice:
    def test_mixed_devices(self):
        import cupy

        q = cupy.ones((1, 1, 1, 512), BF16)
        cache, indices = np.zeros((1, 4, 584), np.uint8), cupy.zeros((1, 1, 2), np.int32)
        with pytest.raises(ValueError, match="k_cache: got an array in host memory, expected it on CUDA device 0"):
            cumla.sparse_mla_decode(q, cache, indices)
        with pytest.raises(ValueError, match="kv: got an array on CUDA device 0, expected it in host memory"):
            cumla.sparse_mla_prefill(np.ones((1, 1, 512), BF16), q[0], indices[0])

    def test_managed_memory(self):
        import cupy

        with cupy.cuda.using_allocator(cupy.cuda.malloc_managed):
            managed = cupy.zeros(8)
        with pytest.raises(ValueError, match="q: got an array in managed memory"):
            dlpack.borrow(pairs.VersionedProducer(managed), "q")

    @pytest.mark.parametrize("framework", ["torch", "jax"])
    def test_results_share_memory(self, framework):
        import cupy

        pytest.importorskip(framework)
        native = cupy.arange(24, dtype=np.float32).reshape(4, 6)
        given = dlpack.give(native, framework)
        assert pairs.address(given) == native.data.ptr

    def test_strides_of_torch_tensors(self):
        torch = pytest.importorskip("torch")
        tensor = torch.arange(96, device="cuda").view(6, 16).to(torch.bfloat16)[1::2, 3:]
        native = dlpack.borrow(tensor)
        assert native.strides == (64, 2)
        np.testing.assert_array_equal(native.get().astype(np.float32), tensor.float().cpu().numpy())
