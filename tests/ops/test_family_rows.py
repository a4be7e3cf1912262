"""Attention over rows with and without RoPE values, of a rank's few heads, with a sink, in a list with gaps."""

import ml_dtypes
import numpy as np
import pytest

import cumla
from cumla.bounds import DECODE_OUT, PREFILL_OUT, compare
from cumla.kernels.cuda import launch
from cumla.kernels.cuda.device import assumed
from oracles.basics import attended
from support.lab import to_float

BF16, SLOTS = ml_dtypes.bfloat16, 192
LAYOUTS = ("V32_FP8", "MLA_BF16", "V32_NOPE_FP8", "DSV4_BF16")


def rows_of(rng, layout):
    """A cache, and its rows as bfloat16 values."""
    cache = layout.allocate(3, 64)
    values = rng.normal(size=(SLOTS, layout.head_dim)).astype(BF16)
    if not layout.num_scales:
        cache[...] = values.view(np.uint8).reshape(cache.shape)
        return cache, values
    cumla.quantize_and_insert_k_cache(values, cache, np.arange(SLOTS), 64, layout=layout, backend="reference")
    table = np.arange(3, dtype=np.int32)[None]
    gathered = np.zeros((1, SLOTS, layout.head_dim), BF16)
    lens = np.array([SLOTS], np.int32)
    cumla.dequantize_and_gather_k_cache(gathered, cache, lens, None, table, 64, 0, layout=layout, backend="reference")
    return cache, gathered[0]


@pytest.mark.parametrize("heads", [4, 8, 16, 32])
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.thorough(
    when=lambda x: x.emulated and (x.get("heads"), x.get("name")) in ((4, "MLA_BF16"), (32, "V32_FP8"))
)
def test_heads_and_sinks(lab, rng, name, heads):
    """Sinks above and far above all scores, and of no weight; entries of -1 between and behind the others."""
    check(lab, rng, name, 2 if lab.tiny else heads)


@pytest.mark.parametrize("capability", [80, 89])
def test_rows_without_rope_on_other_devices(device, rng, capability):
    """The portable kernel, for few and many heads."""
    with assumed(capability), launch.recorded_launches():
        for heads in (8, 64):
            check(device, rng, "V32_NOPE_FP8", heads)


def check(lab, rng, name, heads):
    layout = getattr(cumla, name)
    cache, rows = rows_of(rng, layout)
    q = rng.normal(size=(2, heads, layout.head_dim)).astype(BF16)
    indices = rng.permutation(SLOTS)[None, :67].repeat(2, 0).astype(np.int32)
    indices[:, 5::9], indices[1, 40:] = -1, -1
    sinks = np.resize([0.5, 3.0, -np.inf, 60.0], heads).astype(np.float32)
    scale = 0.07
    want = np.stack([
        attended(to_float(x), to_float(rows)[own[own >= 0]], scale, sinks.astype(np.float64))
        for x, own in zip(q, indices, strict=True)
    ])  # fmt: skip
    assert heads < 4 or abs(want[:, 3]).max() < 1e-12
    on = {"attn_sink": lab.put(sinks), "softmax_scale": scale, "backend": lab.backend}
    found, _ = cumla.sparse_mla_decode(
        lab.put(q[:, None]), lab.put(cache), lab.put(indices[:, None]), layout=layout, **on
    )
    assert compare(lab.get(found)[:, 0], want, DECODE_OUT)[0]
    found, _, _ = cumla.sparse_mla_prefill(lab.put(q), lab.put(rows), lab.put(indices), **on)
    assert compare(lab.get(found), want, PREFILL_OUT.of_values(abs(to_float(rows)).max()))[0]
