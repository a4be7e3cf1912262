"""The device's compiler accepts the Numba CUDA kernels; the simulator cannot show this.

NVVM needs no GPU. The simulator has to be off for it, so this runs in a separate process.
"""

import os
import subprocess
import sys

import pytest

SETUP = """
import inspect, sys, types, warnings
import ml_dtypes, numpy as np
warnings.simplefilter("error")

from numba import cuda
from numba.cuda import dispatcher
from cuda import pathfinder
try:
    for library in ("nvvm", "nvrtc"):
        pathfinder.load_nvidia_dynamic_lib(library)
except Exception as error:
    print("no NVVM or NVRTC:", str(error).splitlines()[0])
    sys.exit(77)

# Device functions ask what to compile for; there is no device to ask.
dispatcher.get_current_device = lambda: types.SimpleNamespace(compute_capability=(9, 0))


BF16 = ml_dtypes.bfloat16
def i32(*shape):
    return np.zeros(shape, np.int32)

import cumla
from cumla.dispatch import call
from cumla.kernels.numba_cuda import launch

call.choose = lambda name, on_device: "numba_cuda"
compiled = {}

def compile_only(kernel, num_blocks, threads, *arguments, **options):
    key = tuple(map(launch.type_of, arguments))
    if (kernel, key) not in compiled:
        ptx, _ = cuda.compile_ptx(kernel, launch.signature(key), cc=(9, 0))
        compiled[kernel, key] = ptx
"""

COMPILE = """
from cumla.kernels.numba_cuda import advance, blocks, compressor, dense_cache, indices, norm_rope, sparse_cache
from cumla.kernels.numba_cuda import window_metadata
from cumla.kernels.types.metadata import BatchCounts, SwaBuffers, WindowStep

modules = (advance, blocks, compressor, dense_cache, indices, norm_rope, sparse_cache, window_metadata)
for module in modules:
    module.launch = compile_only

for dtype in (BF16, np.float32):
    for layout in (cumla.DSV4_FP8, cumla.V32_FP8):
        pages = layout.allocate(1, 4)
        cumla.quantize_and_insert_k_cache(np.zeros((3, layout.head_dim), dtype), pages, np.arange(3), 4, layout=layout)
        out = np.zeros((1, 3, layout.head_dim), dtype)
        cumla.dequantize_and_gather_k_cache(out, pages, i32(1), None, i32(1, 1), 4, 0, layout=layout)
scales, keys = np.zeros(3, np.float32), np.zeros((3, 128), np.uint8)
cumla.cp_gather_indexer_k_quant_cache(cumla.INDEXER_FP8.allocate(1, 4), keys, scales, i32(1, 1), i32(2))
kv_c, k_pe = np.zeros((3, 512), BF16), np.zeros((3, 64), BF16)
turns, row = np.zeros((8, 64), np.float32), cumla.DSV4_FP8.allocate(1, 4)
cumla.compress_and_insert(
    np.zeros((3, 2048), np.float32), np.zeros((4, 1024), np.float32), np.zeros(512, np.float32),
    np.zeros((1, 4, 2048), np.float32), np.arange(3), i32(1, 1), row, np.arange(3), np.arange(3), i32(3), i32(2), turns,
    compress_ratio=4,
)
q, weight = np.zeros((3, 2, 512), BF16), np.zeros(512, np.float32)
cumla.fused_q_kv_rmsnorm(kv_c, kv_c, weight, weight)
cumla.qnorm_rope_and_insert(q, kv_c, row, np.arange(3), np.arange(3), turns)
cumla.norm_rope_and_insert(kv_c, row, np.arange(3), np.arange(3), turns, weight=weight)
keys_cache, ones = cumla.INDEXER_FP8.allocate(1, 4), np.ones(128, np.float32)
cumla.indexer_knorm_rope_and_insert(kv_c[:, :128], ones, ones, keys_cache, np.arange(3), np.arange(3), turns)
cumla.apply_rope(q, np.arange(3), turns)
cumla.inverse_rope_and_quantize(q, np.arange(3), turns, 2)
dense, fp8 = np.zeros((1, 4, 576), BF16), np.zeros((1, 4, 576), np.uint8)
cumla.concat_and_cache_mla(kv_c, k_pe, dense, np.arange(3))
cumla.concat_and_cache_mla(kv_c, k_pe, fp8, np.arange(3), "fp8")
cumla.gather_cache(dense, np.zeros((3, 576), BF16), i32(1, 1), i32(2), 1)
cumla.gather_cache(fp8, np.zeros((3, 576), BF16), i32(1, 1), i32(2), 1, i32(1), scale=np.ones(1, np.float32))
cumla.copy_blocks([dense], np.zeros((3, 2), np.int64))
tokens = np.zeros(3, np.int64)
cumla.advance_step(3, 2, 4, tokens, tokens.copy(), tokens.copy(), i32(3), tokens.copy(), i32(3, 1))
valid = np.ones(2, np.bool_)
cumla.compute_swa_indices_and_lens(i32(2), i32(1), i32(2), valid, i32(1, 1), 4, 3, 2)
for compact in (False, True):
    cumla.compute_global_topk_indices_and_lens(i32(2, 3), i32(2), i32(1, 1), 4, valid, compact=compact)
cumla.combine_topk_swa_indices(i32(2, 3), i32(2), i32(1), i32(1), 3, 4, 3, 9, 4)
cumla.build_flashinfer_mixed_sparse_indices(
    i32(1, 3), None, None, i32(1, 3), i32(2), i32(1), i32(2), i32(1, 1), 4, None, 4, 3, 4, 3
)
buffers = SwaBuffers(i32(2), valid, i32(2), i32(2, 3), i32(2), i32(1), i32(2, 0), i32(2))
window_metadata.build_sparse_swa(
    WindowStep(i32(2), i32(1), tokens, i32(1, 1), None, BatchCounts(1, 0, 0, 2, 2, 0), 4, 3, 1, 0, buffers)
)

kernels = {
    function for module in modules for name, function in inspect.getmembers(module, inspect.isfunction)
    if name.endswith("_kernel")
}
missed = kernels - {kernel for kernel, _ in compiled}
assert not missed, missed
rounded = (compressor.__name__, norm_rope.__name__)  # exponentials and roots, held to bounds, not to the bit
for (kernel, _), ptx in compiled.items():
    name = kernel.__name__
    if kernel.__module__ in rounded:
        continue
    assert "fma." not in ptx, f"{name}: a fused multiply-add rounds once where other backends round twice"
    assert ".ftz" not in ptx and "div.full" not in ptx and "div.approx" not in ptx, f"{name}: approximate arithmetic"
    # Numba gives float64 for a mix of signed and unsigned: no arithmetic in it, only min_scale's rounding.
    for operation in ("add", "sub", "mul", "div", "max", "min"):
        assert f"{operation}.f64" not in ptx and f"{operation}.rn.f64" not in ptx, f"{name}: {operation} in float64"
print("compiled", len(compiled))
"""


ATTENTION = """
from cumla.kernels.numba_cuda import latent_attention, projection, sparse_attention

for module in (latent_attention, projection, sparse_attention):
    module.launch = compile_only
latent_attention.multiprocessors = lambda: 132

q, cache, lse = np.zeros((1, 1, 3, 512), BF16), cumla.DSV4_FP8.allocate(1, 4), np.zeros((3, 1), np.float32)
cumla.sparse_mla_decode(q, cache, i32(1, 1, 100))
window, compressed = cumla.DSV41_FP8.allocate(1, 4), cumla.DSV41_FP4.allocate(1, 4)
cumla.sparse_mla_decode(
    q, window, i32(1, 1, 100), layout="DSV41_FP8", extra_k_cache=compressed, extra_indices=i32(1, 1, 100)
)
cumla.merge_attn_states(q[0].copy(), q[0], lse, q[0], lse)
projection.batched_product(q[0], q[0].transpose(0, 2, 1), np.zeros((1, 3, 3), BF16))

assert len(compiled) == 5
for (kernel, _), ptx in compiled.items():
    name = kernel.__name__
    assert "local_depot" not in ptx, f"{name}: an array that should be registers is memory"
    assert ("mma.sync" in ptx) == (name in ("attend_kernel", "product_kernel")), f"{name}: tensor cores"
    assert "mul.f64" not in ptx and "fma.rn.f64" not in ptx, f"{name}: float64"
print("compiled", len(compiled))
"""


@pytest.mark.slow
@pytest.mark.parametrize("kernels", [COMPILE, ATTENTION], ids=["all but attention", "attention"])
def test_every_kernel_compiles_for_a_device(kernels):
    environment = {**os.environ, "NUMBA_ENABLE_CUDASIM": "0"}
    command = [sys.executable, "-c", SETUP + kernels]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode == 77:
        pytest.skip(done.stdout.strip() + " (pip install -e '.[dev]')")
    assert done.returncode == 0, done.stderr
    assert "compiled" in done.stdout


def test_the_simulator_works_on_the_callers_memory():
    """One array as source and destination, as within a cache: if it were copied, writes would be lost."""
    import numpy as np

    import cumla

    cache = np.arange(12, dtype=np.uint8).reshape(4, 3)
    cumla.copy_blocks([cache], np.array([[0, 3]]), backend="numba_cuda")
    assert cache[3].tolist() == [0, 1, 2]
