"""Arrays whose memory cannot be used: deleted, freed, not allocated yet, or hidden by a transformation.

Each is an error that names the argument, before anything is written.
"""

import re

import numpy as np
import pytest

import cumla
from cumla.arrays import dlpack
from support.lab import BF16


def torch_kinds(torch):
    """Tensors of shape [4, 3], named by what is missing."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    def resized(size, dtype=torch.float32, rows=slice(None)):
        tensor = torch.zeros((4, 3), dtype=dtype)[rows]
        tensor.untyped_storage().resize_(size)
        return tensor

    with FakeTensorMode():
        fake = torch.empty(4, 3)
    plain = torch.ones(4, 3)
    return {
        "freed": (resized(0), "storage was resized to 0 bytes, expected one with memory"),
        "freed bytes": (resized(0, torch.uint8), "storage was resized to 0 bytes"),
        "freed bfloat16": (resized(0, torch.bfloat16), "storage was resized to 0 bytes"),
        "one byte too few": (resized(47), "storage was resized to 47 bytes"),
        "a view of freed memory": (resized(40, rows=slice(1, None)), "storage was resized to 40 bytes"),
        "meta": (torch.empty(4, 3, device="meta"), "got a torch tensor on meta"),
        "fake": (fake, "got a FakeTensor whose memory cannot be used"),
        "sparse": (plain.to_sparse(), "got a torch tensor of layout torch.sparse_coo"),
        "nested": (torch.nested.nested_tensor([plain[:2], plain]), "got a Tensor whose memory cannot be used"),
        "quantised": (torch.quantize_per_tensor(plain, 0.1, 0, torch.qint8), "got torch.qint8"),
        "conjugate": (torch.ones(4, 3, dtype=torch.complex64).conj(), "got a Tensor whose memory .* conjugate bit"),
        "negated": (torch.ones(4, 3, dtype=torch.complex64).conj().imag, "got a view with its negative bit set"),
        "zeros without memory": (torch._efficientzerotensor((4, 3)), "got a Tensor whose memory cannot be used"),
        "half complex": (torch.zeros(4, 3, dtype=torch.complex32), "got a Tensor whose memory .* ComplexHalf"),
        "not initialised": (torch.nn.parameter.UninitializedParameter(), "got a UninitializedParameter whose memory"),
    }


def test_torch_tensors():
    torch = pytest.importorskip("torch")
    for kind, (tensor, message) in torch_kinds(torch).items():
        for writable in (False, True):
            with pytest.raises((TypeError, ValueError)) as raised:
                dlpack.borrow(tensor, "kv", writable)
            assert re.match(f"kv: .*{message}", str(raised.value)), kind


def test_tensors_of_the_least_storage():
    """Views, expanded, empty and offset: no storage is too small for these."""
    torch = pytest.importorskip("torch")
    base = torch.arange(12.0)
    base.untyped_storage().resize_(48)
    freed = torch.empty(3)
    freed.untyped_storage().resize_(0)
    for tensor in (base, base[3:], base[::5], base[4:5].expand(7), base.view(3, 4).t(), base[:0], freed[:0], base[11]):
        assert dlpack.borrow(tensor, "kv").tolist() == tensor.tolist()


@pytest.mark.parametrize("transform", ["vmap", "grad", "jvp", "jacfwd"])
def test_tensors_inside_a_transformation(transform):
    torch = pytest.importorskip("torch")
    transforms = {
        "vmap": torch.vmap, "grad": torch.func.grad, "jacfwd": torch.func.jacfwd,
        "jvp": lambda f: lambda x: torch.func.jvp(f, (x,), (x,)),
    }  # fmt: skip

    def attend(q):
        return cumla.sparse_mla_prefill(q, torch.ones(9, 512), torch.zeros(2, 4, dtype=torch.int32))[0].sum()

    q = torch.ones(2, 1, 512)
    with pytest.raises(ValueError, match=r"^q: got a Tensor whose memory cannot be used, expected a plain array"):
        transforms[transform](attend)(q[None] if transform == "vmap" else q)


def test_a_freed_cache_is_not_written():
    torch = pytest.importorskip("torch")
    k = torch.ones(2, 512, dtype=torch.bfloat16)
    cache = torch.zeros(2, 4, 584, dtype=torch.uint8)
    cache.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match=r"^k_cache: got a tensor of shape \(2, 4, 584\) whose storage was resized"):
        cumla.quantize_and_insert_k_cache(k, cache, torch.arange(2))


def test_jax_arrays():
    jax = pytest.importorskip("jax")
    array = jax.numpy.ones((4, 3))
    array.delete()
    with pytest.raises(ValueError, match=r"^kv: got a JAX array that was deleted"):
        dlpack.borrow(array, "kv")
    assert dlpack.framework_of(array) == "jax"
    with pytest.raises(TypeError, match=r"^kv: got dtype key<fry>, expected numbers"):
        dlpack.borrow(jax.random.key(0), "kv")


class Failing:
    """An array of another framework whose protocol raises."""

    def __init__(self, error):
        self.error = error

    def __dlpack_device__(self):
        return 1, 0

    def __dlpack__(self, **options):
        raise self.error


@pytest.mark.parametrize(
    "error", [BufferError("no export"), RuntimeError("moved"), ValueError("gone"), AttributeError("data"), KeyError(3)]
)
def test_errors_of_other_frameworks(error):
    with pytest.raises(ValueError, match=r"^kv: got a Failing whose memory cannot be used, expected a plain array: "):
        dlpack.borrow(Failing(error), "kv")


def test_errors_that_say_nothing_about_the_argument_stay():
    with pytest.raises(MemoryError):
        dlpack.borrow(Failing(MemoryError()), "kv")
    of_the_device = type("CUDARuntimeError", (RuntimeError,), {"__module__": "cupy_backends.cuda.api.runtime"})
    with pytest.raises(of_the_device):
        dlpack.borrow(Failing(of_the_device("an illegal memory access")), "kv")


@pytest.mark.parametrize("scalar", [np.float32(1), np.int64(1), np.bool_(True), BF16(1)])
def test_numpy_scalars(scalar):
    with pytest.raises(TypeError, match=f"^kv: got {type(scalar).__name__}, expected an array"):
        dlpack.borrow(scalar, "kv")
    assert dlpack.borrow(np.array(scalar), "kv").shape == ()
