"""The CUDA sources compile for every target, without a GPU, and keep their values in registers.

One program per file for Hopper and, in sm80/, one for the oldest target; slow tests cover all others.
"""

import re

import pytest

import support.nvrtc
from cumla.kernels.cuda import compile as compiler
from support.programs import COMPILATIONS, TARGETS

nvrtc = support.nvrtc.nvrtc()

V41 = ("DSV41_FP8-DSV41_FP4", "DSV41_FP8_SPLIT-DSV41_FP4_SPLIT")
PORTABLE_SPILLS = {
    "DSV4_FP8-32-4-96-sm_80": 4, "DSV41_FP8-32-4-96-sm_80": 12, "V32_NOPE_FP8-32-4-96-sm_80": 12,
    "V32_FP8-32-3-96-sm_80": 12, "V32_FP8-32-4-96-sm_90a": 12,
    **{f"{x}-32-4-96-sm_80": 16 for x in V41},
    **{f"{x}-32-4-96-sm_90a": 20 for x in V41},
    **{f"V32_FP8-16-4-112-sm_{y}": 8 for y in (86, 89)},
    **{f"{x}-16-4-96-sm_{y}": 8 for x in ("DSV41_FP8", "V32_NOPE_FP8", *V41) for y in (86, 89)},
}  # fmt: skip
# Bytes: what is allowed to spill.
SPILLS_ALLOWED = {
    # Once a tile: every register is given to a role.
    "sm90/decode/decode.cu-V32_FP8-sm_90a": 12,
    "sm90/decode/decode.cu-V32_NOPE_FP8-64-1-sm_90a": 12,
    "sm90/decode/decode.cu-DSV41_FP8-64-1-sm_90a": 8,
    "sm90/decode/decode.cu-DSV41_FP8-DSV41_FP4-64-1-sm_90a": 8,
    # Causal, and added to the output: no layer combines both. The branch for logits beyond 2^24 keeps a scale of
    # its own alive in addition to the highest logits and the sums.
    "sm90/dense/mha_varlen.cu-f16-float-1-1-sm_90a": 44,
    # A register beside the calls of functions that are not inlined.
    "common/indexer_topk_registers.cu-1024-2-4-1-ToSlots-sm_90a": 8,
    "common/indexer_topk_registers.cu-512-8-2-1-ToColumns-sm_100": 4,
    # Once a tile, beside 128 registers of queries.
    "sm80/index_scores.cu-uint8-INDEXER_MXFP4-64-1-1-1-sm_100": 8,
    # A size that takes 163 KB: devices of 8.9 have 99, and get another one (dense_attention.PORTABLE_SIZES).
    "sm80/dense/decode.cu-bf16-bf16-32-3-96-1-1-sm_89": 92,
    # Once a tile, where queries are loaded.
    **{f"sm80/sparse/heads64.cu-{x}": bytes_ for x, bytes_ in PORTABLE_SPILLS.items()},
}
if nvrtc.nvrtcVersion()[1] < 13:  # CUDA 12 needs more than the same 128 registers
    # Once per tile, in a kernel that runs on Hopper only on request.
    SPILLS_ALLOWED["sm80/sparse/attention.cu-DSV4_FP8-16-32-3-2-sm_90a"] = 16
    for target in ("sm_100", "sm_120"):  # with the 80 registers of three thread blocks per multiprocessor
        SPILLS_ALLOWED[f"common/indexer_topk_stream.cu-256-1-ToColumns-{target}"] = 4
    rows = "common/compressor.cu-INDEXER_FP8-bf16-bf16-int64-int64-int-INDEXER_FP8-4-2-1-1-8-0-0"  # unaligned ones
    SPILLS_ALLOWED |= {f"{rows}-sm_100": 4, f"{rows}-sm_120": 56}
    SPILLS_ALLOWED["common/indexer_topk_bound.cu-1024-1-8-1-1-ToColumns-sm_80"] = 16
    SPILLS_ALLOWED["common/indexer_topk_bound.cu-1024-1-8-1-1-ToSlots-sm_120"] = 4  # with a row's columns in registers
    # Beside 128 registers of queries, on Hopper only on request; and beside the queries of decodes.
    SPILLS_ALLOWED["sm80/index_scores.cu-uint8-INDEXER_FP8-64-1-0-1-sm_90a"] = 4
    SPILLS_ALLOWED["sm80/sparse/heads64.cu-DSV4_FP8-32-4-96-sm_80"] = 32
    SPILLS_ALLOWED["sm90/prefill/prefill.cu-DSV4_BF16-1-sm_90a"] = 4  # for sanitizers
    SPILLS_ALLOWED["sm90/prefill/prefill.cu-MLA_BF16-sm_90a"] = 12  # once in two blocks of keys

SPILLS_ALLOWED_IN = {"common/sparse/exact.cu": 256}  # which runs rarely, with two thread blocks per multiprocessor


def name_of(number):
    file, macros, target = COMPILATIONS[number]
    return "-".join(map(str, (file, *macros.values(), target)))


def is_quick(number):
    """Whether it is the first of its file for Hopper or, of a file for older devices, for the oldest of them."""
    file, _, target = COMPILATIONS[number]
    before = [(other, of) for other, _, of in COMPILATIONS[:number]]
    return (file, target) not in before and target in ("sm_90a", TARGETS[0] if file.startswith("sm80/") else None)


NUMBERS = [n if is_quick(n) else pytest.param(n, marks=pytest.mark.slow) for n in range(len(COMPILATIONS))]


@pytest.mark.sampled
@pytest.mark.parametrize("number", NUMBERS, ids=name_of)
def test_source(number):
    log, _ = support.nvrtc.compiled(*COMPILATIONS[number])
    kernels = re.findall(r"Compiling entry function '(\w+)'", log)
    spills = [int(count) for count in re.findall(r"(\d+) bytes spill (?:stores|loads)", log)]
    assert kernels
    assert len(spills) >= 2 * len(kernels), log  # and those of functions that are not inlined
    allowed = SPILLS_ALLOWED_IN.get(COMPILATIONS[number][0], 0)
    assert max(spills) <= SPILLS_ALLOWED.get(name_of(number), allowed), log
    assert "warning" not in log, log
    if "EVERY_LANE_ARRIVES" not in COMPILATIONS[number][1]:  # it need not be fast
        assert "serialized" not in log, log  # warpgroup products, reported only here


def test_every_source_is_compiled():
    assert {file for file, _, _ in COMPILATIONS} == {
        str(path.relative_to(compiler.CSRC)) for path in compiler.CSRC.rglob("*.cu")
    }


def test_every_layout_is_in_the_header():
    header = compiler.layouts_header()
    for layout in compiler.BUILT_IN:
        assert re.search(rf"struct {layout.name} {{[^}}]*head_dim = {layout.head_dim},", header)
