"""Replays in which one operation gets something that is not what the layer gives it."""

import importlib

import numpy as np

from cumla.replay.engine import Engine
from cumla.replay.trace import TraceRequest


def changed(at, change):
    """A change of positional argument `at`."""
    return lambda args, keywords: ((*args[:at], change(args[at]), *args[at + 1 :]), keywords)


WRONG = {
    "apply_rope": changed(1, lambda positions: positions + 1),
    "fused_indexer_q_rope_quant": changed(0, lambda positions: positions + 1),
    # Rows of other tokens.
    "compress_latents": changed(0, lambda rows: np.roll(rows, 1, axis=0)),
    "concat_and_cache_mla": changed(0, lambda rows: np.roll(rows, 1, axis=1)),
    "indexer_k_quant_and_cache": changed(0, lambda keys: np.roll(keys, 1, axis=0)),
    "qnorm_rope_and_insert": changed(1, lambda rows: np.roll(rows, 1, axis=1)),
    # Scores of other columns; rows that were not selected.
    "candidate_topk": changed(0, lambda scores: np.roll(scores, 1, axis=-1)),
    "compute_global_topk_indices_and_lens": changed(0, lambda chosen: np.where(chosen > 0, chosen - 1, chosen)),
    "sparse_mla_decode": lambda args, keywords: (args, {**keywords, "attn_sink": keywords["attn_sink"] + 4}),
}


def make(monkeypatch, what):
    """Patch an operation, named with the module that calls it, to get wrong arguments."""
    module, name = what.rsplit(".", 1)
    right = getattr(importlib.import_module(module), name)

    def wrong(*args, **keywords):
        args, keywords = WRONG[name](args, keywords)
        return right(*args, **keywords)

    monkeypatch.setattr(what, wrong)


def failures(options):
    """What a replay of one request reports."""
    engine = Engine(options, [TraceRequest(0.0, 150, 6, (0,))])
    return [sample.failure for record in engine.steps() for sample in record.samples if sample.failure]
