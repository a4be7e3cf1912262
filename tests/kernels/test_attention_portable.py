"""The sizes of the portable attention kernel fit the devices that it is for, and it is taken for few heads."""

import pytest

import cumla
import emulation
from cumla.kernels.cuda import attention_portable
from support.attention import Problem, make_cache, make_indices, make_q
from support.lab import Lab

LAYOUTS = (cumla.DSV4_FP8, cumla.V32_FP8, cumla.MLA_BF16, cumla.DSV4_BF16)
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
    size = attention_portable.choose(layout, heads, block_limit, multiprocessor_limit)
    assert attention_portable.shared_bytes(layout, size) <= block_limit
    assert size.heads in (16, 32, 64)
    assert 64 % size.keys == 0
    assert size.heads < max(2 * heads, 17)  # not mostly empty


def test_large_devices_take_64_heads():
    for layout in LAYOUTS:
        assert attention_portable.choose(layout, 128, 227 * KIB, 228 * KIB).heads == 64


def test_too_little_shared_memory_is_an_error():
    with pytest.raises(ValueError, match="shared memory"):
        attention_portable.choose(cumla.MLA_BF16, 128, 48 * KIB, 64 * KIB)


@pytest.mark.skipif(emulation.unavailable() is not None, reason=str(emulation.unavailable()))
@pytest.mark.parametrize(
    ("tokens", "heads", "invariant", "chosen"),
    [(20, 16, False, "portable"), (20, 17, False, "hopper"), (1, 16, False, "hopper"), (20, 16, True, "hopper")],
)
def test_few_heads_of_many_tokens_are_not_padded_to_64(rng, monkeypatch, tokens, heads, invariant, chosen):
    layout = cumla.DSV4_FP8
    problem = Problem(
        make_q(rng, tokens, 1, heads, layout), make_cache(rng, layout, 2, 64), make_indices(rng, tokens, 1, 9, 128)
    )
    with emulation.devices():
        from cumla.kernels.cuda import attention_kernels

        taken = []
        for name in ("hopper", "portable"):
            make = getattr(attention_kernels, f"_{name}")
            monkeypatch.setattr(
                attention_kernels, f"_{name}", lambda *x, name=name, make=make: taken.append(name) or make(*x)
            )
        problem.check(Lab("cuda", on_device=True, emulated=True), batch_invariant=invariant)
    assert taken == [chosen]
