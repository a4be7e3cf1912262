"""`cumla warmup`: what serving will call is compiled, tested and kept on disk before it is called."""

from __future__ import annotations

import functools
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from ..dispatch import backends
from ..dispatch.call import BFLOAT16
from ..errors import InputError, RunError
from ..kernels.self_tests import KEPT, NOT_REACHED, RESULTS, RIGHT, VARIABLE, MiscompiledError
from ..kernels.types.plan import DecodePlan
from ..layers.prefill_path import PATHS
from ..layout import DSV4_FP8, INDEXER_FP8, INDEXER_MXFP4, V32_FP8, CacheLayout
from ..models.step import STATE_BLOCK_SIZES
from ..ops.compressor import compress_and_insert
from ..ops.sparse_attention import V_DIM, sparse_mla_decode, sparse_mla_prefill
from ..ops.sparse_cache import dequantize_and_gather_k_cache, quantize_and_insert_k_cache
from ..replay.engine import warm_up
from ..replay.options import FORMATS, V41_LAYOUT, V41_RATIOS, ReplayOptions
from ..self_test import CASES, Bench, Case, cache_cases

# Cases that are for other kinds of models, by what their variant begins with.
FOREIGN = {
    "v4": ("V32", "MLA_BF16", "576"), "v41": ("V32", "MLA_BF16", "576"),
    "v32": ("DSV4", "MLA_BF16", "512", INDEXER_MXFP4.name),
    "mla": ("DSV4", "V32", INDEXER_MXFP4.name),
}  # fmt: skip
V4_OPS = ("compress_and_insert", "qnorm_rope_and_insert")  # not of V4.1
DENSE_OPS = ("concat_and_cache_mla", "gather_cache", "mha_varlen", "dense_mla_decode")
MAX_REPLAYED_TOKENS = 512


@dataclass(frozen=True)
class Model:
    """What decides which kernels a model's attention calls.

    kind    one of WARM_KINDS; "mla" is dense
    heads   query heads of one rank
    topk    compressed rows (v4, v41) or tokens (v32) that a token selects
    window  of V4's and V4.1's window caches
    layout  of these models' caches, one of FORMATS; of V4.1 one of V41_CACHE_FORMATS
    """

    kind: str
    heads: int
    topk: int
    window: int = 128
    layout: str = DSV4_FP8.name

    @property
    def formats(self) -> tuple[CacheLayout, CacheLayout]:
        """Formats of the first list's cache and of the second's."""
        return FORMATS[self.layout] if self.has_window else (V32_FP8, V32_FP8)

    @property
    def has_window(self) -> bool:
        return self.kind in ("v4", "v41")

    def needs(self, case: Case) -> bool:
        """Whether a case of `cumla check` is of operations and formats that the model calls."""
        if case.op in {"mla": (), "v41": (*DENSE_OPS, *V4_OPS)}.get(self.kind, DENSE_OPS):
            return False
        formats = {layout.name for pair in FORMATS.values() for layout in pair} - {x.name for x in self.formats}
        if self.layout == DSV4_FP8.name:
            formats.add(INDEXER_MXFP4.name)
        of_others = self.has_window and formats & set(case.variant.split(", "))
        return not (of_others or case.variant.startswith(FOREIGN[self.kind]))

    @classmethod
    def from_config(cls, path: Path, ranks: int) -> Model:
        """The calls of a checkpoint's config.json, its heads split over `ranks`. Raises InputError."""
        try:
            text = sys.stdin.read() if str(path) == "-" else path.read_text(encoding="utf-8-sig")
            config = json.loads(text.removeprefix("\ufeff"))
        except OSError as error:
            raise InputError(f"--config: cannot read {path}: {error.strerror or error}") from None
        except (ValueError, RecursionError) as error:
            raise InputError(f"--config: {path} is no JSON: {error}") from None
        if not isinstance(config, dict):
            raise InputError(f"--config: {path} holds no object")
        if config.get("model_type") == "deepseek_v41" and isinstance(config.get("text_config"), dict):
            config = config["text_config"]
        if "kv_source_layer_ids" in config:
            kind = "v41"
        elif "compress_ratios" in config or "compressed" in str(config.get("layer_types")):
            kind = "v4"
        elif "index_topk" in config:
            kind = "v32"
        elif "kv_lora_rank" in config:
            kind = "mla"
        else:
            raise InputError(f"--config: {path} is no model of DeepSeek's V2, V3, V3.2, V4 or V4.1 attention")

        def count(name: str, default: int | None, most: int = 2**20) -> int:
            value = config.get(name) or default
            if type(value) is not int or not 1 <= value <= most:
                raise InputError(f"--config: {name}: got {value!r}, expected an integer from 1 to {most}")
            return value

        rank = count("kv_lora_rank", V_DIM)
        if rank != V_DIM:
            raise InputError(f"--config: kv_lora_rank: got {rank}, expected {V_DIM}")
        heads = count("num_attention_heads", None)
        if heads % ranks:
            raise InputError(f"--ranks: got {ranks}, expected a divisor of num_attention_heads, {heads}")
        if not 1 <= heads // ranks <= 128:
            raise InputError(f"--ranks: got {ranks}, expected at most 128 of {heads} heads a rank")
        model = cls(kind, heads // ranks, count("index_topk", 512), count("sliding_window", 128))
        return replace(model, layout=V41_LAYOUT) if kind == "v41" else model


def tasks(
    model: Model, batches: Sequence[int], block_size: int, backend: str
) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Calls by name."""
    for case in CASES:
        if model.needs(case):
            yield f"{case.op} {case.variant}".strip(), functools.partial(run_case, case, backend, model.heads)
    if model.has_window:
        bench, (first, second) = Bench(backend, 0, model.heads), model.formats
        if first is DSV4_FP8:
            yield from compressor_calls(backend)
        else:
            yield f"norm_rope_and_insert {second.name}", functools.partial(cache_cases.latent_rows(second), bench)
        if model.kind == "v4":
            yield f"qnorm_rope_and_insert {first.name}", functools.partial(cache_cases.window_rows(first), bench)
        elif second is not first:
            yield f"norm_rope_and_insert {first.name}", functools.partial(cache_cases.latent_rows(first), bench)
    if model.kind != "mla":
        for batch in batches:
            for name, call in sparse_calls(model, batch, block_size, backend):
                yield f"{name}, {batch} requests", call
    if model.kind == "v41":
        yield f"a step of {', '.join(V41_RATIOS)} layers", functools.partial(warm_up, v41_options(model, backend))
    elif model.kind != "v32":
        layers = ("mla",) if model.kind == "mla" else ("swa", "c4a", "c128a")
        for prefill_path in PATHS if model.kind == "v4" else (None,):
            options = ReplayOptions(
                backend, layers, model.heads, model.window, model.topk, MAX_REPLAYED_TOKENS, 1 << 14, 1152, 0,
                layout=model.layout, prefill_path=prefill_path,
            )  # fmt: skip
            name = f"a step of {', '.join(layers)} layers, prefill over {prefill_path or 'keys'}"
            yield name, functools.partial(warm_up, options)


def v41_options(model: Model, backend: str) -> ReplayOptions:
    """A replay of small layers: kernels do not depend on the size of hidden states."""
    return ReplayOptions(
        backend, tuple(V41_RATIOS), model.heads, model.window, model.topk, MAX_REPLAYED_TOKENS, 1 << 14, 1152, 0,
        v41_layout=model.layout, tiny=True,
    )  # fmt: skip


def compressor_calls(backend: str) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Compressors of V4's layers, of a decode and of a prompt, whose kernels differ; nothing is written."""
    xp: Any = backends.array_module(backend)

    def call(ratio: int, coff: int, tokens: int) -> None:
        def rows(dim: int, layout: CacheLayout) -> tuple[Any, ...]:
            width = 2 * coff * dim
            shapes = (tokens, width), (ratio, width // 2), (dim,), (1, STATE_BLOCK_SIZES[ratio], width)
            return *(xp.zeros(shape, np.float32) for shape in shapes), layout.allocate(1, 64, xp)

        own, names = rows(512, DSV4_FP8), ("kv_score", "position_bias", "norm_weight", "state_cache", "k_cache")
        arrays = dict(zip(names, own, strict=True))
        if ratio == 4:
            arrays |= {f"index_{name}": x for name, x in zip(names, rows(128, INDEXER_FP8), strict=True)}
        none, zeros = xp.full(tokens, -1, np.int64), xp.zeros(tokens, np.int32)
        compress_and_insert(
            **arrays, state_slot_mapping=none, state_block_table=xp.zeros((1, 1), np.int32), slot_mapping=none,
            positions=zeros, token_to_req_indices=zeros, query_start_loc=xp.zeros(2, np.int32),
            cos_sin_cache=xp.zeros((1, 64), np.float32), compress_ratio=ratio, backend=backend,
        )  # fmt: skip

    for ratio, coff in ((4, 2), (128, 1)):
        for tokens in (1, 300):
            yield f"compress_and_insert ratio {ratio}, {tokens} tokens", functools.partial(call, ratio, coff, tokens)


def sparse_calls(model: Model, batch: int, block_size: int, backend: str) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Calls of a step of `batch` requests with the widths of the model, as engines make them."""
    xp: Any = backends.array_module(backend)
    layout, second = model.formats
    tokens = 4 * block_size
    caches = {x: x.allocate(4, block_size, xp) for x in (layout, second)}

    def rows(*shape: int) -> Any:
        return xp.asarray(np.random.default_rng(0).standard_normal(shape).astype(BFLOAT16))

    def slots(*shape: int) -> Any:
        return xp.asarray(np.random.default_rng(0).integers(0, tokens, shape).astype(np.int32))

    for dtype in (np.int64, np.int32):
        k, mapping = rows(min(batch, tokens), layout.head_dim), xp.arange(min(batch, tokens), dtype=dtype)
        for x, cache in caches.items():
            insert = functools.partial(quantize_and_insert_k_cache, k, cache, mapping, layout=x, backend=backend)
            yield "insert", insert
    q, sink = rows(batch, 1, model.heads, layout.head_dim), xp.zeros(model.heads, np.float32)
    window: dict[str, Any] = {}
    widths: list[tuple[int, int | None]] = [(model.topk, None)]
    if model.has_window:
        window = {"topk_length": xp.full(batch, model.window, np.int32), "attn_sink": sink}
        widths = [(model.window, None), (model.window, model.topk)]
    for topk, extra in widths:
        asked = dict(window)
        if extra is not None:
            asked |= {
                "extra_k_cache": caches[second], "extra_indices": slots(batch, 1, extra),
                "extra_topk_length": xp.full(batch, extra, np.int32), "extra_layout": second,
            }  # fmt: skip
        given: dict[str, Any] = {
            "out": xp.empty((batch, 1, model.heads, 512), BFLOAT16), "plan": DecodePlan(),
            "lse": xp.empty((batch, model.heads, 1), np.float32),
        }  # fmt: skip
        for results in ({}, given):
            options = {**asked, **results, "layout": layout, "backend": backend}
            yield "decode", functools.partial(sparse_mla_decode, q, caches[layout], slots(batch, 1, topk), **options)
    workspace = xp.zeros((batch, tokens, layout.head_dim), BFLOAT16)
    lens, table = xp.full(batch, tokens, np.int32), xp.asarray(np.tile(np.arange(4, dtype=np.int32), (batch, 1)))
    for x, cache in caches.items():
        gather = functools.partial(dequantize_and_gather_k_cache, workspace, cache, lens, None, table, layout=x)
        yield "gather", functools.partial(gather, backend=backend)
    width = model.topk + (model.window if model.has_window else 0)
    options = {"attn_sink": sink if model.has_window else None, "backend": backend}
    kv = workspace.reshape(-1, layout.head_dim)
    yield "prefill", functools.partial(sparse_mla_prefill, q[:, 0], kv, slots(batch, width), **options)


def run_case(case: Case, backend: str, heads: int) -> None:
    """A case of `cumla check` where the backend has the operation."""
    try:
        backends.kernels(backend, case.kernels)
    except ValueError:
        return
    case.run(Bench(backend, 0, heads))


def run(console: Console, model: Model, batches: Sequence[int], block_size: int, backend: str) -> int:
    """Call everything once. Returns 0; raises RunError where a kernel gives wrong results."""
    formats = "" if model.layout == DSV4_FP8.name else f", {model.layout.replace(',', ' and ')}"
    console.print(f"{model.kind}{formats}, {model.heads} heads, backend {backend}", highlight=False)
    start, slowest, count = time.perf_counter(), 0.0, 0
    for name, call in tasks(model, batches, block_size, backend):
        before = time.perf_counter()
        try:
            call()
        except MiscompiledError as error:
            raise RunError(str(error)) from None
        seconds, count = time.perf_counter() - before, count + 1
        slowest = max(slowest, seconds)
        if seconds > 0.1:  # what was there already is not worth a line
            console.print(f"{seconds:6.2f} s  {name}", highlight=False, soft_wrap=True)
    seconds = time.perf_counter() - start
    console.print(
        f"{count} calls in {seconds:.1f} s, the slowest {slowest:.2f} s. {found()}", highlight=False, soft_wrap=True
    )
    return 0


def found() -> str:
    """What became of the kernels, in a sentence."""
    if os.environ.get(VARIABLE) == "0":
        return f"Kernels were not tested ({VARIABLE}=0)"
    kept, right, missed = (RESULTS[key] for key in (KEPT, RIGHT, NOT_REACHED))
    if not right + missed:
        return f"All {kept} kernels were in the cache"
    return (
        f"{right + missed} kernels were compiled: {right} tested and right, {missed} not reached by a small case; "
        f"{kept} were in the cache"
    )
