"""Sinks, lists and lengths of every kind, with every sparse attention kernel and every division of its work.

On a device all kernels; emulated kernels only a few.
"""

import contextlib
import itertools
from dataclasses import replace

import numpy as np
import pytest

import cumla
from support import special_values
from support.forced_kernels import DECODE_KERNELS, PREFILL_KERNELS, decode_by, parts_of, prefill_by
from support.lab import to_float
from support.special_values import HEADS, PREFILL_LAYOUT, SINKS, Case, cases, problem_of

HOPPER_LAYOUTS = (cumla.DSV4_FP8, cumla.V32_FP8)
BF16_LAYOUTS = (cumla.MLA_BF16, cumla.DSV4_BF16)
DECODE_LAYOUTS = (*HOPPER_LAYOUTS, *BF16_LAYOUTS, cumla.DSV41_FP8, cumla.DSV41_FP8_SPLIT, cumla.V32_NOPE_FP8)
EMULATED_SINKS = ("-inf", "mixed")  # the last alone with EMULATED_HEADS
# Emulated kernels: with tiles of all heads, of some heads, and several tiles. Slow tests run all of EMULATED_HEADS.
EMULATED_HEADS = 65
EMULATED_PREFILL = {
    ("hopper 16", 8, 512), ("hopper 16", 8, 576), ("hopper 32", 32, 512), ("hopper 64", 65, 512),
    ("hopper 64", 63, 576), ("portable", 8, 512), ("portable 8.6", 65, 512), ("exact", 1, 512),
}  # fmt: skip
EMULATED_DECODE = {
    ("hopper 16 whole", 8), ("hopper 32 cut", 32), ("hopper 64 parts 3", 65), ("hopper 16 cluster 6", 1),
    ("hopper 32 cluster 2", 16), ("hopper 64 whole", 63), ("portable whole", 16), ("portable cut", 1),
    ("portable cut 8.0", 65), ("exact", 1),
}  # fmt: skip
EMULATED_V41 = {("hopper 16 whole", 8), ("hopper 32 cluster 2", 16), ("hopper 64 whole", 63)}
pytestmark = pytest.mark.attention


def has_kernel(x):
    """Excludes the reference, with which others are compared; backends other than cuda have one kernel."""
    name, layout = x.get("name"), x.get("layout")
    if x.backend == "reference" or (x.backend != "cuda" and name != "chosen"):
        return False
    if "hopper" in name and layout in BF16_LAYOUTS:
        return name.startswith("hopper 64") and "cluster" not in name
    # Every tile height and every cluster size is a separate program; a few suffice for other layouts.
    if "hopper" in name and x.get("width") is None and layout not in HOPPER_LAYOUTS:
        return " cut" in name or (layout is cumla.DSV41_FP8 and parts_of(name) <= 2)
    return not ("cluster" in name and layout is cumla.V32_FP8 and parts_of(name) > 2)


def other_heads(layout):
    """A number of heads for the CPU's kernel, which reads rows before it knows of heads, in addition to one and 65."""
    return [n for n in HEADS if n not in (1, 65)][DECODE_LAYOUTS.index(layout) % (len(HEADS) - 2)]


def cpu_heads(layout):
    """What the CPU's kernel is run with in quick tests: several pieces of heads with one layout, which all share."""
    return (1, 65) if layout is cumla.DSV4_FP8 else (1,)


def is_emulated_prefill(x):
    return (x.get("name"), x.get("heads"), x.get("width")) in EMULATED_PREFILL


def is_for_devices(x):
    """Kernels that are emulated with one layout, or with two of five numbers of parts: a device runs all."""
    if x.get("layout") is cumla.DSV4_FP8:
        return x.emulated and x.get("name").endswith(("parts 4", "parts 5"))
    names = {name for name, _ in EMULATED_DECODE if name != "portable cut 8.0"} | {"chosen"}
    return x.emulated and x.get("name") not in names


def is_emulated_decode(x):
    if x.get("layout") is cumla.MLA_BF16 and x.get("name") == "hopper 64 parts 3":
        return x.get("heads") == 63
    if x.get("layout") is cumla.DSV41_FP8 and "hopper" in x.get("name"):
        return (x.get("name"), x.get("heads")) in EMULATED_V41
    if x.get("layout") is not cumla.DSV4_FP8 and x.get("heads") != 1:
        return False
    return (x.get("name"), x.get("heads")) in EMULATED_DECODE


@pytest.mark.nowhere(when=lambda x: not has_kernel(x))
@pytest.mark.nowhere(when=lambda x: x.emulated and not is_emulated_prefill(x) and x.get("heads") != EMULATED_HEADS)
@pytest.mark.thorough(when=lambda x: x.emulated and not is_emulated_prefill(x))
@pytest.mark.thorough(when=lambda x: x.backend == "cpu" and x.get("heads") not in (1, 8, 65))
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("width", [512, 576])
@pytest.mark.parametrize("name", PREFILL_KERNELS)
def test_prefill(lab, name, width, heads):
    sinks = EMULATED_SINKS[heads == EMULATED_HEADS :] if lab.emulated else SINKS
    with prefill_by(name) if lab.backend == "cuda" else contextlib.nullcontext():
        for case in cases("prefill", PREFILL_LAYOUT[width], heads, sinks, few=lab.emulated):
            special_values.check(case, lab)


@pytest.mark.nowhere(when=lambda x: not has_kernel(x))
@pytest.mark.nowhere(when=lambda x: x.emulated and not is_emulated_decode(x) and x.get("heads") != EMULATED_HEADS)
@pytest.mark.nowhere(when=is_for_devices)
@pytest.mark.thorough(when=lambda x: x.emulated and (not is_emulated_decode(x) or " cut " in x.get("name")))
@pytest.mark.thorough(when=lambda x: x.emulated and x.get("layout") is cumla.DSV41_FP8 and x.get("name") != "chosen")
@pytest.mark.thorough(when=lambda x: x.get("layout") in (cumla.DSV4_BF16, cumla.DSV41_FP8_SPLIT, cumla.V32_NOPE_FP8))
@pytest.mark.nowhere(when=lambda x: x.backend == "cpu" and x.get("heads") not in (1, 65, other_heads(x.get("layout"))))
@pytest.mark.thorough(when=lambda x: x.backend == "cpu" and x.get("heads") not in cpu_heads(x.get("layout")))
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("layout", DECODE_LAYOUTS, ids=lambda x: x.name)
@pytest.mark.parametrize("name", DECODE_KERNELS)
def test_decode(lab, name, layout, heads):
    """One cache or two; a token's keys are split by a plan, or not split."""
    sinks, parts = EMULATED_SINKS[heads == EMULATED_HEADS :] if lab.emulated else SINKS, parts_of(name)
    extra_topks = (0, 70) if parts < 4 else (200,)
    with decode_by(name) if lab.backend == "cuda" else contextlib.nullcontext():
        for extra_topk, batch_invariant in itertools.product(extra_topks, (False, True)):
            if batch_invariant and (name != "chosen" or lab.backend == "cpu"):
                continue
            for case in cases("decode", layout, heads, sinks, extra_topk=extra_topk, few=lab.emulated):
                special_values.check(case, lab, batch_invariant=batch_invariant)


@pytest.mark.parametrize("lengths", [False, True])
@pytest.mark.parametrize("sink", SINKS)
@pytest.mark.parametrize(("op", "layout"), [("decode", cumla.DSV4_FP8), ("prefill", cumla.MLA_BF16)])
def test_the_reference(op, layout, sink, lengths):
    """The expected values: no key gives 0 for any sink; a sink of -inf has no weight, a sink of +inf all of it."""
    case = Case(op, layout, 8, sink, lengths, extra_topk=70 if op == "decode" else 0)
    problem, plain = (problem_of(x) for x in (case, replace(case, sink="none")))
    options = problem.options
    has_key = np.zeros(problem.want[0].shape[:-2], bool)  # by query
    lists = [(problem.indices, options.get("topk_length"))]
    if op == "decode":
        lists.append((options["extra_indices"], options.get("extra_topk_length")))
    for indices, given in lists:
        entry = np.arange(indices.shape[-1])
        listed = True if given is None else entry < given[..., None].astype(np.int64)
        has_key |= (listed & (indices >= 0) & (indices < special_values.ROWS)).any(axis=-1)
    assert has_key.any()
    assert not has_key.all()

    out, *logarithms = problem.want
    assert not to_float(out[~has_key]).any()
    lse = logarithms[-1].swapaxes(1, 2) if op == "decode" else logarithms[-1]
    assert (np.isposinf(lse) == ~has_key[..., None]).all()
    if op == "prefill":
        assert (np.isneginf(logarithms[0]) == ~has_key[..., None]).all()
    for with_sink, without in zip(logarithms, plain.want[1:], strict=True):
        np.testing.assert_array_equal(with_sink, without)
    sinks = options["attn_sink"]
    if sinks is not None:
        np.testing.assert_array_equal(out[..., np.isneginf(sinks), :], plain.want[0][..., np.isneginf(sinks), :])
        assert not to_float(out[..., np.isposinf(sinks), :]).any()
        assert to_float(out[has_key][:, np.isfinite(sinks)]).any() == np.isfinite(sinks).any()
