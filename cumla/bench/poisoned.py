"""Sparse attention over values that float16 lacks, beside the same work over ordinary ones."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

import cumla

from ..arrays.memory import to_host
from ..dispatch.call import BFLOAT16
from ..layout import DSV4_FP8
from .problem import Arrays, Problem, RepeatingCache, Sizes
from .sparse import Decode, DecodeInputs, Prefill

SLOTS = 1 << 18  # well beyond the L2 cache
SLOT, ENTRY, VALUE = 5, 9, 470  # the poisoned row, where it is listed, and which value of it: one of RoPE
TINY_BYTE, TINY, TINY_NAME = 127 - 95, 2.0**-95, "2^-95"


@dataclass(frozen=True)
class PoisonedDecode(Decode):
    """The first `requests` list a row with `value`; or values of another kind, by name."""

    values: str = "ordinary"
    requests: int = 0
    value: float = 0.0

    def __str__(self) -> str:
        return super().__str__().removeprefix(f"{self.layout.name} ").partition(",")[0] + f" {self.values}"

    def inputs(self, sizes: Sizes, seed: int) -> DecodeInputs:
        x = super().inputs(sizes, seed)
        x.caches = [poisoned_cache(self, sizes, number) for number in range(len(x.caches))]
        for listed in x.lists:
            listed[listed <= SLOT] = SLOT + 1
        x.lists[0][: self.requests, :, ENTRY] = SLOT
        return x

    def problem(self, sizes: Sizes) -> Problem:
        return replace(super().problem(sizes), unchecked=("flash_mla",))


def poisoned_cache(case: PoisonedDecode, sizes: Sizes, seed: int) -> RepeatingCache:
    """A cache that repeats nothing. Bounds are those of values up to 1: results are of ordinary rows, or NaN."""
    block, xp = case.block_size, sizes.xp
    slots = case.slots or SLOTS
    cache = DSV4_FP8.allocate(slots // block, block, xp)
    if case.values != "zeros":
        k = Arrays(sizes, seed).rows(slots, DSV4_FP8.head_dim)
        if case.requests:
            k[SLOT, VALUE] = case.value
        cumla.quantize_and_insert_k_cache(k, cache, xp.arange(slots), block, layout=DSV4_FP8, backend=sizes.backend)
    if case.values == TINY_NAME:
        scales = cache.reshape(len(cache), -1)[:, DSV4_FP8.scale_start(block) :][:, : block * DSV4_FP8.scale_stride]
        scales.reshape(len(cache), block, -1)[..., : DSV4_FP8.num_scales] = TINY_BYTE
    on_host = DSV4_FP8.allocate(len(cache), block)
    on_host[...] = to_host(cache)
    return RepeatingCache(cache, on_host, 1.0)


@dataclass(frozen=True)
class PoisonedPrefill(Prefill):
    """All rows have `value` somewhere, or all values are multiplied by 2^-95."""

    values: str = "ordinary"
    value: float = 0.0

    def __str__(self) -> str:
        return super().__str__().partition(" of ")[0] + f" {self.values}"

    def problem(self, sizes: Sizes) -> Problem:
        """FlashMLA sums scores in float32, which rounds those of 1e6 too much for the bounds."""
        return replace(super().problem(sizes), unchecked=("flash_mla",))

    def gathered(self, arrays: Arrays) -> Any:
        kv = super().gathered(arrays)
        if self.value:
            kv[:, VALUE] = self.value
        return kv if self.values != TINY_NAME else (kv.astype(np.float32) * np.float32(TINY)).astype(BFLOAT16)

    def largest(self, rows: np.ndarray) -> float:
        return 1.0


def recorded() -> list[Any]:
    values = (
        ("ordinary", 0, 0.0), ("zeros", 0, 0.0), ("1 x 1e6", 1, 1e6), ("128 x 1e6", 128, 1e6), ("1 x NaN", 1, np.nan),
        ("128 x NaN", 128, np.nan), (TINY_NAME, 0, 0.0),
    )  # fmt: skip
    return [
        *(
            PoisonedDecode(DSV4_FP8, 64, 128, *keys, slots=SLOTS, values=name, requests=requests, value=value)
            for keys in ((1, 512, 0), (2, 128, 512))
            for name, requests, value in values
        ),
        *(
            PoisonedPrefill(width, heads, 640, 1 << 15, values=name, value=value)
            for width, heads in ((512, 64), (576, 128))
            for name, value in (("ordinary", 0.0), ("1e6", 1e6), ("NaN", np.nan), (TINY_NAME, 0.0))
        ),
    ]
