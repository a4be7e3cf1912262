"""The emulator (tests/emulation): the behaviour of its devices, and the errors that they detect."""

import ctypes

import numpy as np
import pytest

import emulation
from cumla.kernels.cuda import compile as compiler
from emulation import launches

HEADER = compiler.source("sm90/hopper.cuh")
ENTRY = 'extern "C" __global__ void f(float* out, const float* in) {\n'


def launch(
    here, body, before="", schedule=emulation.SCHEDULES["in order"], shared_bytes=1024, capability=90, cluster=0
):
    """The `out` of a kernel of one warp, or of a cluster of `cluster` warps, for an `in` of 64 numbers."""
    out, given = here.put(np.zeros(64, np.float32)), here.put(np.arange(64, dtype=np.float32))
    packed = (ctypes.c_void_p * 2)(out.data.ptr, given.data.ptr)
    entry = ENTRY.replace("__global__", f"__cluster_dims__({cluster}, 1, 1) __global__") if cluster else ENTRY
    kernel = launches.Kernel(f"{HEADER}{before}\n{entry}{body}\n}}\n", "f", capability)
    with emulation.scheduled(schedule):
        kernel.launch((cluster or 1, 1, 1), (32, 1, 1), shared_bytes, ctypes.addressof(packed))
    return here.get(out)


COPY = """
    extern __shared__ float memory[];
    int lane = threadIdx.x;
    copy_async<4>(memory + lane, in + lane, true);
    copies_commit();
    {wait}
    out[lane] = memory[lane];
"""


def test_a_copy_is_there_when_it_is_waited_for(here):
    for schedule in emulation.SCHEDULES.values():
        out = launch(here, COPY.replace("{wait}", "copies_wait<0>();"), schedule=schedule)
        np.testing.assert_array_equal(out[:32], np.arange(32))


def test_a_late_copy_is_not_there_before(here):
    body = COPY.replace("{wait}", "")
    assert not np.isnan(launch(here, body)).any()
    assert np.isnan(launch(here, body, schedule=emulation.SCHEDULES["late"])[:32]).all()


BULK = """
    Barrier barrier{1024 + 512};
    if (threadIdx.x == 0) barrier.init(1);
    __syncwarp();
    barrier.arrive_warp_expecting(128);
    warp_copy_bulk(1024, in, 128, barrier);
    {wait}
    out[threadIdx.x] = lds_float(1024 + 4 * threadIdx.x);
"""


def test_a_bulk_copy_is_there_when_its_bytes_are_counted(here):
    for schedule in emulation.SCHEDULES.values():
        out = launch(here, BULK.replace("{wait}", "barrier.wait(0);"), schedule=schedule)
        np.testing.assert_array_equal(out[:32], np.arange(32))
    out = launch(here, BULK.replace("{wait}", ""), schedule=emulation.SCHEDULES["late"])
    assert np.isnan(out[:32]).all()


WRONG = {
    "barrier_init(1024, 1); __syncwarp(); Barrier{1024}.wait(0);": "deadlock in block .*mbarrier 400",
    "if (threadIdx.x) __syncthreads();": "deadlock in block .*__syncthreads",
    "out[threadIdx.x] = in[100000 + threadIdx.x];": "where no array is",
    "out[int(threadIdx.x) - 100000] = 1.0f;": "where no array is",
    "sts32(1024 + 1024, 1);": "of shared memory, which ends at 2048",
    "sts128(1032, {});": "misaligned",
    "extern __shared__ float memory[];\n memory[260] = 1.0f;": "past the end of shared memory",
    "copy_async<16>(1024u, in + 1, true);": "cp.async of 16 bytes .* misaligned",
    "warp_copy_bulk(1024, in + 1, 128, {1536});": "cp.async.bulk of 128 bytes .* multiples of 16",
    "warp_copy_bulk(2048 - 64, in, 128, {1536});": "of shared memory, which ends at 2048",
    "if (threadIdx.x % 2) __syncwarp(); else __any_sync(~0u, 1);": "meet at",
    "__shfl_sync(1u, 1, 0);": "a warp's part",
    "barrier_init(1024, 1); Barrier{1024}.arrive(); Barrier{1024}.arrive(2);": "more arrivals than",
    "Barrier{1024}.arrive();": "no mbarrier",
    "__trap();": "__trap",
}


@pytest.mark.parametrize("body", WRONG)
def test_what_no_device_forgives(here, body):
    with pytest.raises(emulation.EmulationError, match=f"(?s){WRONG[body]}"):
        launch(here, body)
    assert launch(here, "out[threadIdx.x] = in[threadIdx.x];")[31] == 31  # and the next launch works


ARRIVE, WAIT = (
    f'asm volatile("barrier.cluster.{what}.aligned;" ::: "memory");' for what in ("arrive.release", "wait.acquire")
)
SEND = """
    extern __shared__ float memory[];
    uint32 rank, there, own = uint32(__cvta_generic_to_shared(memory + threadIdx.x));
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    {begin}
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(own), "r"({to}));
    asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(there), "f"(in[32 * blockIdx.x + threadIdx.x]) : "memory");
    {end}
    out[32 * rank + threadIdx.x] = memory[threadIdx.x];
"""


def sending(to="1 - rank", begin=ARRIVE + WAIT, end=ARRIVE + WAIT):
    return SEND.replace("{to}", to).replace("{begin}", begin).replace("{end}", end)


def test_blocks_of_a_cluster_write_to_each_other(here):
    for schedule in emulation.SCHEDULES.values():
        out = launch(here, sending(), schedule=schedule, cluster=2)
        np.testing.assert_array_equal(out, [*range(32, 64), *range(32)])


def test_what_no_cluster_forgives(here):
    with pytest.raises(emulation.EmulationError, match="may not have begun"):
        launch(here, sending(begin=""), cluster=2)
    with pytest.raises(emulation.EmulationError, match="has ended"):
        launch(here, sending(end="if (rank) return;" + ARRIVE), cluster=2, schedule=emulation.SCHEDULES["random 2"])
    with pytest.raises(emulation.EmulationError, match=r"(?s)deadlock in block .*barrier\.cluster"):
        launch(here, sending(end="if (rank == 0) {" + ARRIVE + WAIT + "}"), cluster=2)
    with pytest.raises(emulation.EmulationError, match="block 2 of a cluster of 2"):
        launch(here, sending(to="2"), cluster=2)


SEND_ASYNC = """
    uint32 rank, own_memory = 1024;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    const float* mine = in + 32 * rank + threadIdx.x;
    own_memory += rank << 24;
    Barrier barrier{own_memory + 128};
    uint32 place = own_memory + 4 * threadIdx.x, there, barrier_there;
    if (threadIdx.x == 0) barrier.init(1), barrier.arrive_expecting(128);
    {begin}
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(place), "r"(1 - rank));
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(barrier_there) : "r"(barrier.address), "r"(1 - rank));
    if (threadIdx.x % 2 == 0)
        asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.u32 [%0], {%1, %2}, [%3];"
                     ::"r"(there), "r"(__float_as_uint(mine[0])), "r"(__float_as_uint(mine[1])), "r"(barrier_there)
                     : "memory");
    {end}
    out[32 * rank + threadIdx.x] = lds_float({read});
"""


def sending_async(begin=ARRIVE + WAIT, end="barrier.wait(0);", read="place"):
    return SEND_ASYNC.replace("{begin}", begin).replace("{end}", end).replace("{read}", read)


def test_stores_that_count_at_the_barrier_of_whom_they_go_to(here):
    for schedule in emulation.SCHEDULES.values():
        out = launch(here, sending_async(), schedule=schedule, cluster=2)
        np.testing.assert_array_equal(out, [*range(32, 64), *range(32)])
    with pytest.raises(emulation.EmulationError, match="has ended"):
        launch(here, sending_async(end=""), cluster=2)
    with pytest.raises(emulation.EmulationError, match="may not have begun"):
        launch(here, sending_async(begin=""), cluster=2)
    with pytest.raises(emulation.EmulationError, match="takes 0x400 for its own"):
        launch(here, sending_async(read="1024 + 4 * threadIdx.x"), cluster=2)


def test_unknown_ptx_is_an_error(here):
    with pytest.raises(LookupError, match="vote pred"):
        launch(here, 'asm volatile("vote pred;");')


def test_subnormal_numbers_are_flushed_except_in_ptx(here):
    out = launch(here, "float x = __uint_as_float(1 << 20); out[0] = x * in[2], out[1] = mul(x, in[2]);")
    assert out[0] == 0
    assert out[1] > 0
