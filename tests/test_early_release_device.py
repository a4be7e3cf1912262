"""A kernel that is launched to overlap and does not wait, after calls with early_release=False, on a device.

test_early_release.py has the same tests without a device, where every kernel starts as early as possible.
"""

import numpy as np
import pytest

import cumla
from cumla.interop.ops import OPS
from cumla.kernels.cuda.device import capability
from cumla.kernels.cuda.launch import Kernel, packing, parameters
from cumla.kernels.cuda.ordinary import ordinary_launch
from support import operations
from support.lab import BF16

pytestmark = pytest.mark.gpu

POISON, ROUNDS = 0xAA, 20
SOURCE = r"""
typedef long long int64;
typedef unsigned char uint8;

__device__ void spin(int64 nanoseconds) {
    int64 start, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
    do { asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)); } while (now - start < nanoseconds);
}

// Lets the next kernel start, and stores later.
extern "C" __global__ void late(uint8* out, int64 bytes, int64 nanoseconds) {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    spin(nanoseconds);
    for (int64 i = threadIdx.x; i < bytes; i += blockDim.x) out[i] = uint8(i);
}

extern "C" __global__ void follower(const uint8* from, uint8* to, int64 bytes) {
    for (int64 i = int64(blockIdx.x) * blockDim.x + threadIdx.x; i < bytes; i += int64(gridDim.x) * blockDim.x)
        to[i] = *(const volatile uint8*)(from + i);
}
"""


@pytest.fixture
def late():
    """A launch of `late` on its memory."""
    import cupy

    if capability(cupy.cuda.Device().id) < 90:
        pytest.skip("no kernel overlaps with another one here")
    kernel, memory = made("late"), cupy.zeros(1 << 12, np.uint8)

    def launch(out=memory, milliseconds=1):
        kernel((1,), (256,), (out, out.nbytes, int(milliseconds * 1e6)))

    return launch


def made(name):
    import cupy

    raw = cupy.RawModule(code=SOURCE).get_function(name)
    return Kernel(raw, packing(SOURCE, name, {}), parameters(SOURCE, name))


class Follower:
    """Copies arrays; launched to overlap with the kernel ahead of it."""

    def __init__(self, arrays):
        import cupy

        memories = {x.data.mem.ptr: x.data.mem for x in arrays if x.nbytes}.values()
        self.memories = [cupy.ndarray((m.size,), np.uint8, cupy.cuda.MemoryPointer(m, 0)) for m in memories]
        self.copies, self.kernel = [cupy.empty_like(memory) for memory in self.memories], made("follower")

    def launch(self):
        """The first copy follows the call. The others follow copies, which do not wait either."""
        for memory, copy in zip(self.memories, self.copies, strict=True):
            self.kernel((8,), (256,), (memory, copy, memory.nbytes), overlap=True)

    def saw_results(self):
        import cupy

        cupy.cuda.Device().synchronize()
        return all(bool((m == c).all()) for m, c in zip(self.memories, self.copies, strict=True))


def test_a_kernel_that_does_not_wait_is_early(late):
    """Unless an ordinary launch is ahead of it. Without this the other tests would show nothing."""
    import cupy

    out = cupy.zeros(1 << 12, np.uint8)
    follower, seen = Follower([out]), {}
    for ordinary in (False, True):
        out[...] = POISON
        cupy.cuda.Device().synchronize()
        late(out, 20)
        if ordinary:
            ordinary_launch()
        follower.launch()
        seen[ordinary] = follower.saw_results()
    assert seen == {False: False, True: True}


@pytest.mark.parametrize(
    "name", [n for n, x in operations.EXAMPLES.items() if hasattr(OPS.get(x.op), "signature")
             and "early_release" in OPS[x.op].signature.parameters]
)  # fmt: skip
@pytest.mark.nowhere(when=lambda x: not operations.is_on("cuda", x.get("name")))
def test_calls(late, name):
    """The kernels of a call start while `late` runs, and so would the follower."""
    import cupy

    example = operations.EXAMPLES[name]
    op = OPS[example.op]

    def put(value):
        if isinstance(value, list | tuple):
            return operations.rebuilt(value, [put(x) for x in value])
        return cupy.array(value) if isinstance(value, np.ndarray) else value

    arguments = {n: put(x) for n, x in operations.arguments_of(example, 0).items()}
    before = {n: arguments[n].copy() for n in op.writes if arguments.get(n) is not None}
    call = example.spec.function
    results = call(**arguments)
    results = () if results is None else results if isinstance(results, tuple) else (results,)
    given = dict(zip(op.outputs, (results,) if len(op.outputs) == 1 and len(results) > 1 else results, strict=False))
    follower = Follower([*results, *(arguments[n] for n in before)])
    for _ in range(ROUNDS):
        for result in results:
            result.view(np.uint8)[...] = POISON
        for n, array in before.items():
            arguments[n].view(np.uint8)[...] = array.view(np.uint8)
        cupy.cuda.Device().synchronize()
        late()
        call(**{**arguments, **given}, early_release=False)
        follower.launch()
        assert follower.saw_results()


def test_in_a_graph(late, rng):
    import cupy

    x, weight = rng.standard_normal((5, 1024)).astype(BF16), rng.integers(0, 120, (1024, 1024)).astype(np.uint8)
    x, weight, scale = cupy.array(x), cupy.array(weight), cupy.full((8, 8), 0.25, np.float32)
    out = cupy.zeros((5, 1024), BF16)
    follower, stream = Follower([out]), cupy.cuda.Stream(non_blocking=True)

    def calls():
        late()
        cumla.fp8_block_linear(x, weight, scale, early_release=False, out=out)
        follower.launch()

    calls()
    cupy.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        calls()
        graph = stream.end_capture()
    for _ in range(ROUNDS):
        out.view(np.uint8)[...] = POISON
        cupy.cuda.Device().synchronize()
        graph.launch(stream)
        assert follower.saw_results()
