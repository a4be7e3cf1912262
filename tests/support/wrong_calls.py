"""Replays in which one operation gets wrong arguments."""

import importlib

import numpy as np

from cumla.replay.trace import TraceRequest

from . import replay_oracle


def changed(at, change):
    """A change of positional argument `at`."""
    return lambda args, keywords: ((*args[:at], change(args[at]), *args[at + 1 :]), keywords)


WRONG = {
    "apply_rope": changed(1, lambda positions: positions + 1),
    "fused_indexer_q_rope_quant": changed(0, lambda positions: positions + 1),
    # Rows of other tokens.
    "compress_and_insert": lambda args, keywords: (
        (np.roll(args[0], 1, axis=0), *args[1:]),
        {name: np.roll(x, 1, axis=0) if name == "index_kv_score" else x for name, x in keywords.items()},
    ),
    "compress_latents": changed(0, lambda rows: np.roll(rows, 1, axis=0)),
    "norm_rope_and_insert": changed(0, lambda rows: np.roll(rows, 1, axis=1)),
    "quantize_and_insert_k_cache": changed(0, lambda rows: np.roll(rows, 1, axis=1)),
    "concat_and_cache_mla": changed(0, lambda rows: np.roll(rows, 1, axis=1)),
    "indexer_knorm_rope_and_insert": changed(0, lambda keys: np.roll(keys, 1, axis=1)),
    "indexer_kpool_and_insert": changed(0, lambda keys: np.roll(keys, 1, axis=1)),
    "indexer_k_quant_and_cache": changed(0, lambda keys: np.roll(keys, 1, axis=0)),
    "qnorm_rope_and_insert": changed(1, lambda rows: np.roll(rows, 1, axis=1)),
    # Scores of other columns, or with the weights of other heads; rows that were not selected.
    "indexer_topk": changed(2, lambda weights: np.roll(weights, 1, axis=-1)),
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
    """Failures that a replay of one request reports, and failures of its comparison with float64."""
    _, records, found = replay_oracle.run(options, [TraceRequest(0.0, 150, 6, (0,))])
    return replay_oracle.failures(records, found)
