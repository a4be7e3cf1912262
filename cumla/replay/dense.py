"""The dense layers of a replay: 16-bit latent rows, from which K and V are projected for each head.

Rows come from the same activations as a sparse layer's: kv_c is a row of K, k_pe the rotated part of a second kind of
row, q the last values of each head. The seed determines the projection. Checks compare with attention in float64 over
every row of a request, with K and V projected for each head.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np

from ..arrays.memory import to_host
from ..dispatch.backends import array_module
from ..dispatch.call import BFLOAT16
from ..layers.dense import MLACommonImpl
from ..layers.sparse import Observer
from ..layout import MLA_BF16
from ..metadata import MLACommonMetadata, MLACommonMetadataBuilder, MLACommonState, MLAConfig
from ..timing import Stopwatch
from .activations import K_STD, NOPE_DIM, Q_STD, ROPE_DIM, Activations, apply_rope
from .options import MAX_RUNNING, ReplayOptions
from .scheduler import Sequence
from .step_batch import SWA_BLOCK, SWA_PAGES, StepBatch
from .verify import Sample, measured

DENSE = "mla"  # the layer type
NOPE, V = 128, 128  # values of a head: K without its RoPE part, and V
HEAD_DIM = NOPE + ROPE_DIM
KV_C = MLA_BF16.head_dim - ROPE_DIM
WEIGHT_STD = 0.006  # as DeepSeek V3 initialises its weights
SCALE = HEAD_DIM**-0.5
VALUE, ROW = 2, MLA_BF16.row_bytes  # bytes
FP8_SCALE = 2.0**-6  # of FP8 caches: puts values with a standard deviation of K_STD in the middle of e4m3's range
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
SLOT = 8


@dataclass(frozen=True)
class DenseInputs:
    """A step's projected tokens: q [n, h, 192], kv_c [n, 512], k_pe [n, 64], all bfloat16."""

    q: Any
    kv_c: Any
    k_pe: Any


class DenseLayer:
    """One dense layer.

    Attributes:
        cache: [num_blocks * 4, 64, 576] bfloat16, or uint8: e4m3 of value / FP8_SCALE
        reads_back: whether prefills read their new rows back from the cache
        attends_alike: whether prefill tokens use the decode kernel
    """

    reads_back = attends_alike = is_queued = False
    is_checked = True

    def __init__(self, index: int, name: str, options: ReplayOptions) -> None:
        self.name, self.index, self.heads = name, index, options.heads
        self.xp = xp = array_module(options.backend)
        self.activations = Activations(options.seed, index, options.heads, xp)
        self.fp8 = options.mla_cache == "fp8"
        self.attends_alike = self.attends_alike or options.batch_invariant
        shape = (options.num_blocks * SWA_PAGES, SWA_BLOCK, MLA_BF16.head_dim)
        self.cache = xp.zeros(shape, np.uint8 if self.fp8 else BFLOAT16)
        rng = np.random.default_rng([options.seed, index, 4])
        weight = rng.standard_normal((options.heads * (NOPE + V), KV_C), np.float32) * np.float32(WEIGHT_STD)
        self.weight = weight.astype(BFLOAT16)
        self.attention = MLACommonImpl(
            options.heads, MLA_BF16.head_dim, SCALE, kv_cache_dtype="fp8" if self.fp8 else "auto",
            kv_b_proj=xp.asarray(self.weight), qk_nope_head_dim=NOPE,
            v_head_dim=V, batch_invariant=options.batch_invariant, backend=options.backend,
        )  # fmt: skip
        self.attention.process_weights_after_loading()

    @property
    def row_bytes(self) -> int:
        return MLA_BF16.head_dim if self.fp8 else ROW

    @property
    def cache_bytes(self) -> int:
        return int(self.cache.nbytes)

    def inputs(self, batch: StepBatch, shared: MLACommonMetadata, stopwatch: Stopwatch) -> DenseInputs:
        with stopwatch.measure((self.name, "activations")):
            q_rows = self.activations.q_rows(batch.token_keys)
            q = self.xp.empty((batch.num_tokens, self.heads, NOPE_DIM + ROPE_DIM), BFLOAT16)
            self.activations.queries(apply_rope(q_rows, batch.positions, self.xp), q)
            kv_c, k_pe = self.rows(batch.token_keys, batch.positions)
            return DenseInputs(self.xp.ascontiguousarray(q[..., -HEAD_DIM:]), kv_c, k_pe)

    def rows(self, token_keys: np.ndarray, positions: np.ndarray) -> tuple[Any, Any]:
        """kv_c [n, 512] and k_pe [n, 64] bfloat16 of tokens with these keys at these positions."""
        second = self.activations.q_rows(token_keys) * np.float32(K_STD / Q_STD)
        k_pe = apply_rope(second, positions, self.xp)[:, -ROPE_DIM:]
        return self.activations.k_rows(token_keys).astype(BFLOAT16), k_pe.astype(BFLOAT16)

    def step(
        self, batch: StepBatch, inputs: DenseInputs, shared: MLACommonMetadata, observe: Observer,
        picked: SequenceOf[int] = (),
    ) -> Any:  # fmt: skip
        """Out [n, h, 128] bfloat16."""
        out = self.attention.forward(
            inputs.q, inputs.kv_c, inputs.k_pe, self.cache, shared, k_scale=FP8_SCALE, observe=observe
        )
        return out.reshape(len(out), self.heads, V)

    def moved(self, batch: StepBatch, inputs: DenseInputs, shared: MLACommonMetadata) -> dict[str, int]:
        return dense_bytes_moved(batch, self.heads, self.row_bytes)

    def check(self, step: int, batch: StepBatch, inputs: DenseInputs, out: Any, kind: str, token: int) -> Sample:
        """Check one token of a finished step, over the rows in the cache and over the rows before quantisation."""
        scheduled, position = batch.at(token)
        sequence, seen = scheduled.sequence, np.arange(position + 1)
        original, cached = self.original(sequence, seen), self.cached(sequence, seen)
        if kind == "prefill" and not self.reads_back:
            cached.view(np.uint16)[scheduled.start :] = original.view(np.uint16)[scheduled.start :]
        exact = self.attend(inputs.q[token], cached)
        before = self.attend(inputs.q[token], original) if self.fp8 else None
        got = to_host(out[token]).astype(np.float64)
        allowed = self.allowed(inputs.q[token], cached)
        return measured(step, self.name, sequence.index, position, kind, got, exact, before, parted=allowed)

    def allowed(self, query: Any, rows: Any) -> float | np.ndarray:
        """The error that an out may have in addition to its bound."""
        return 0.0

    def original(self, sequence: Sequence, positions: np.ndarray) -> Any:
        """Rows at these positions before quantisation, bfloat16 [n, 576]."""
        parts = [part.view(np.uint16) for part in self.rows(sequence.token_keys[positions], positions)]
        return self.xp.concatenate(parts, axis=1).view(BFLOAT16)

    def cached(self, sequence: Sequence, positions: np.ndarray) -> Any:
        """The cache's rows at these positions, bfloat16 [n, 576], exact."""
        slots = sequence.slots(positions)
        pages, rows = (self.xp.asarray(x) for x in (slots // SWA_BLOCK, slots % SWA_BLOCK))
        if self.fp8:
            values = to_host(self.cache[pages, rows]).view(E4M3).astype(np.float32) * np.float32(FP8_SCALE)
            return self.xp.asarray(values.astype(BFLOAT16))
        return self.cache.view(np.uint16)[pages, rows].view(BFLOAT16)

    @functools.cached_property
    def exact_weight(self) -> Any:
        """The projection, float64 [h, 128 + 128, 512]."""
        return self.xp.asarray(self.weight.astype(np.float64).reshape(self.heads, NOPE + V, KV_C))

    def attend(self, query: Any, rows: Any) -> np.ndarray:
        """query [h, 192], rows [n, 576], both bfloat16 -> out [h, 128] float64."""
        weights, latents = self.weights_of(query, rows)
        mixed = weights @ latents
        return to_host(self.xp.matmul(self.exact_weight[:, NOPE:], mixed[:, :, None])[..., 0])

    def weights_of(self, query: Any, rows: Any) -> tuple[Any, Any]:
        """Softmax weights [h, n] of the rows, and the rows' latents [n, 512]: float64, on the layer's device."""
        xp = self.xp
        query, rows = (x.astype(np.float32).astype(np.float64) for x in (query, rows))
        latent = xp.matmul(query[:, None, :NOPE], self.exact_weight[:, :NOPE])[:, 0]
        scores = SCALE * (latent @ rows[:, :KV_C].T + query[:, NOPE:] @ rows[:, KV_C:].T)
        weights = xp.exp(scores - scores.max(axis=1, keepdims=True))
        return weights / weights.sum(axis=1, keepdims=True), rows[:, :KV_C]


class DenseMetadata:
    """Builds the metadata of dense layers, with a step's context workspace."""

    is_queued = False

    def __init__(self, options: ReplayOptions, names: SequenceOf[str], longest: int) -> None:
        config = MLAConfig(
            block_size=SWA_BLOCK, num_heads=options.heads, max_num_batched_tokens=options.batch_tokens,
            max_num_seqs=MAX_RUNNING, max_model_len=longest, batch_invariant=options.batch_invariant,
        )  # fmt: skip
        self._builder = MLACommonMetadataBuilder(config, backend=options.backend)
        self._state = MLACommonState(config)

    def build(self, batch: StepBatch) -> MLACommonMetadata:
        metadata = self._builder.build(0, batch.common)
        self._state.begin_forward(SimpleNamespace(input_tokens=batch.common.seq_lens, attn_metadata=metadata))
        return metadata


def dense_bytes_moved(batch: StepBatch, heads: int, row_bytes: int = ROW) -> dict[str, int]:
    """Bytes by op of a dense layer in a step, each row counted once for all queries that attend to it.

    Args:
        row_bytes: of the cache. For absorb and project, activations count and weights do not
    """
    n = batch.num_decodes
    prefills = batch.scheduled[n:]
    new, context = batch.num_tokens - n, sum(s.start for s in prefills)
    keys_and_values = heads * (NOPE + V) * VALUE + ROPE_DIM * VALUE
    queries = heads * HEAD_DIM * VALUE
    moved = {
        "insert": batch.num_tokens * (ROW + row_bytes + SLOT),
        "absorb": n * heads * (HEAD_DIM + MLA_BF16.head_dim + KV_C + V) * VALUE,
        "decode": int((batch.positions[:n] + 1).sum()) * row_bytes + n * heads * (MLA_BF16.head_dim + KV_C) * VALUE,
        "gather": context * (row_bytes + ROW),
        "project": (new + context) * (KV_C * VALUE + heads * (NOPE + V) * VALUE),
        "prefill": new * (queries + keys_and_values + heads * V * VALUE),
        "context": context * keys_and_values + (new * (queries + heads * V * 2 * VALUE) if context else 0),
    }
    return {op: count for op, count in moved.items() if count}
