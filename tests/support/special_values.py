"""The special values of sparse attention, in one list for every kernel: sinks, lists of keys, and lengths.

Each call combines every kind of list with every kind of length, one query each, in random order; the sink, and whether
lengths are given, are the same for all queries of a call. `FEW` is a shorter list for emulated kernels.
"""

import functools
import itertools
from dataclasses import dataclass, replace

import numpy as np

import cumla
from cumla.layout import CacheLayout
from cumla.ops.sparse_attention import PARTNERS
from support import properties
from support.attention import Problem, make_cache, make_q
from support.bounds import assert_prefill
from support.lab import BF16, Lab, to_float

INT32_MIN, INT32_MAX = -(2**31), 2**31 - 1
SINKS = ("none", "finite", "-inf", "+inf", "mixed")
LISTS = ("full", "some absent", "all absent", "all beyond", "duplicates")
LENGTHS = ("0", "1", "random", "full", "longer", "negative")
HEADS = (1, 8, 16, 32, 63, 64, 65, 128)
# Relative to the other scores: a single score, which may be near 0, is then within the bounds of max_logits and lse.
SIZE = 0.05
# For prefill's rows: bounds are for values up to 1; a value may be the only term of a result.
ROW_SIZE = 0.1
ROWS = 200  # rows of a cache or workspace, some of which lists name
PREFILL_LAYOUT = {512: cumla.DSV4_BF16, 576: cumla.MLA_BF16}

# Every list without a key with its length, and the others with lengths that leave them no key.
FEW = (
    ("full", "longer"), ("some absent", "random"), ("all absent", "full"), ("duplicates", "negative"),
    ("all beyond", "longer"), ("full", "0"), ("duplicates", "full"), ("full", "1"),
)  # fmt: skip


def sink_of(kind, heads, rng):
    """float32 [heads], or None."""
    finite = np.linspace(-5, 5, heads).astype(np.float32)
    if kind == "mixed":
        return rng.permutation(np.where(np.arange(heads) % 3, (-1.0) ** np.arange(heads) * np.inf, finite)).astype(
            np.float32
        )
    return {
        "none": None,
        "finite": finite,
        "-inf": np.full_like(finite, -np.inf),
        "+inf": np.full_like(finite, np.inf),
    }[kind]


def list_of(kind, rng, topk, rows):
    """int32 [topk]; some or all entries are none of `rows` rows."""
    listed = rng.integers(0, rows, topk)
    if kind == "duplicates":
        return listed[rng.integers(0, min(2, topk), topk)]
    beyond = rng.choice([-2, INT32_MIN, rows, rows + 5, INT32_MAX], topk)
    if kind == "all beyond":
        return beyond
    if kind == "all absent":
        return np.full(topk, -1)
    if kind == "some absent":  # including whole blocks at the start
        absent = (rng.random(topk) < 0.3) | (np.arange(topk) < rng.integers(0, topk))
        return np.where(absent, np.where(rng.random(topk) < 0.5, -1, beyond), listed)
    return listed


def length_of(kind, rng, topk):
    choices = {
        "0": [0], "1": [1], "full": [topk], "longer": [topk + 1, 2 * topk + 64, INT32_MAX],
        "negative": [-1, -64, INT32_MIN], "random": range(topk + 1),
    }  # fmt: skip
    return rng.choice(choices[kind])


@dataclass(frozen=True)
class Case:
    """One call. Decode has a second cache where `extra_topk` is not 0, and two queries a request."""

    op: str
    layout: CacheLayout
    heads: int
    sink: str
    lengths: bool
    topk: int = 130
    extra_topk: int = 0
    few: bool = False

    def __str__(self):
        lengths = "with lengths" if self.lengths else "without lengths"
        extra = f" and {self.extra_topk}" if self.extra_topk else ""
        return f"{self.op} {self.layout.name}: {self.heads} heads, sink {self.sink}, {lengths}, {self.topk}{extra} keys"

    def queries(self, rng, topk):
        """Lists int32 [queries, topk] and their lengths, or None."""
        if not self.lengths:
            kinds = [(kind, None) for kind in (*LISTS, "full")]
        else:
            kinds = FEW if self.few else list(itertools.product(LISTS, LENGTHS))
        kinds = [kinds[i] for i in rng.permutation(len(kinds))]
        indices = np.stack([list_of(kind, rng, topk, ROWS) for kind, _ in kinds]).astype(np.int32)
        if not self.lengths:
            return indices, None
        return indices, np.array([length_of(kind, rng, topk) for _, kind in kinds], np.int64).astype(np.int32)


def cases(op, layout, heads, sinks=SINKS, **sizes):
    return [Case(op, layout, heads, sink, lengths, **sizes) for sink in sinks for lengths in (False, True)]


def check(case, lab, **options):
    """Compare a kernel's results with the reference's, and exactly with 0 where the reference has only 0 for a head."""
    try:
        problem = problem_of(case)
        out, want = problem.check(lab, **options)[0], problem.want[0]
    except AssertionError as error:
        raise AssertionError(f"{case}: {error}") from error
    nothing = ~to_float(want).any(axis=-1)
    assert not to_float(out)[nothing].any(), f"{case}: out of heads without a key, or beside a sink of +inf, is not 0"


def problem_of(case):
    """With `want`, the reference's results."""
    return {"decode": decode, "prefill": prefill}[case.op](case)


@functools.lru_cache(maxsize=16)
def memory(layout, number=0):
    """The memory of one of two caches of ROWS rows."""
    return make_cache(np.random.default_rng([properties.SEED, number]), layout, ROWS // 8, 8, spread=0)


def generator(case):
    """A generator with the same seed for every sink."""
    return np.random.default_rng([properties.SEED, *f"{replace(case, sink='')}".encode()])


@functools.lru_cache(maxsize=256)
def decode(case):
    rng = generator(case)
    indices, lengths = case.queries(rng, case.topk)
    options = {}
    if lengths is not None:
        options["topk_length"] = lengths.reshape(-1, 2)
    if case.extra_topk:
        extra, extra_lengths = case.queries(rng, case.extra_topk)
        second = PARTNERS.get(case.layout.name, case.layout)  # V4.1's compressed rows for the second list
        options |= {"extra_k_cache": memory(second, 1), "extra_indices": extra.reshape(-1, 2, case.extra_topk)}
        if extra_lengths is not None:
            options["extra_topk_length"] = extra_lengths.reshape(-1, 2)
    indices = indices.reshape(-1, 2, case.topk)
    q = make_q(rng, *indices.shape[:2], case.heads, case.layout, SIZE)
    sink = sink_of(case.sink, case.heads, rng)
    return Problem(q, memory(case.layout), indices, layout=case.layout, attn_sink=sink, **options)


@functools.lru_cache(maxsize=256)
def prefill(case):
    rng = generator(case)
    indices, lengths = case.queries(rng, case.topk)
    shape = len(indices), case.heads, case.layout.head_dim
    q = (rng.standard_normal(shape) * SIZE / ROW_SIZE).astype(BF16)
    kv = (rng.standard_normal((ROWS, case.layout.head_dim)) * ROW_SIZE).astype(BF16)
    return PrefillProblem(q, kv, indices, sink_of(case.sink, case.heads, rng), lengths)


class PrefillProblem:
    """Arguments of sparse_mla_prefill as NumPy arrays, and the reference's result."""

    def __init__(self, q, kv, indices, sink, lengths):
        self.q, self.kv, self.indices = q, kv, indices
        self.options = {"attn_sink": sink, "topk_length": lengths}

    def on(self, lab):
        arguments = [lab.put(x) for x in (self.q, self.kv, self.indices)]
        options = {name: lab.put(x) for name, x in self.options.items()}
        return cumla.sparse_mla_prefill(*arguments, **options, backend=lab.backend)

    @functools.cached_property
    def want(self):
        return self.on(Lab("reference", False))

    def check(self, lab):
        (out, max_logits, lse), (want, want_max, want_lse) = map(lab.get, self.on(lab)), self.want
        assert_prefill(to_float(out), max_logits, lse, to_float(want), want_max, want_lse)
        return out, max_logits, lse
