"""`cumla warmup` compiles every kernel that a selection may launch, for any number of rows and columns."""

import numpy as np
import pytest

import cumla
from cumla.cli.selection_calls import find_needed, selection_calls
from cumla.cli.served_model import Model
from cumla.kernels.cuda import index_scores, indexer
from cumla.kernels.cuda.compile import programs_asked_for

DECODES = 33


@pytest.mark.parametrize(
    ("kind", "context"), [("v4", 1 << 16), ("v32", 1 << 15), ("v41", 1 << 12), ("glm5_next", 1 << 16)]
)
def test_no_selection_compiles_anything_after_the_warm_up(emulated, monkeypatch, kind, context):
    import cupy

    monkeypatch.setattr(cupy, "empty", cupy.zeros)  # cupy.zeros does not touch the memory: nothing is launched
    for module in (index_scores, indexer):
        monkeypatch.setattr(module, "device_sms", lambda device: 132)
    model, needed = (
        Model(kind, 64, 2048 if kind in ("v32", "glm5_next") else 512, context=context, candidate_blocks=128),
        [],
    )
    find_needed(selection_calls(model, DECODES, "cuda"), needed)
    with programs_asked_for() as asked:
        for call in needed:
            call()
        assert len(asked) >= len(needed) > 10
        check_random_selections(asked, model)


def check_random_selections(asked, model):
    import cupy

    warm = set(asked)
    assert len({program for program in warm if "topk" in program[0]}) >= 4
    rng, pages = np.random.default_rng(0), cumla.INDEXER_FP8.allocate(1, 64, cupy)
    workspace = cupy.zeros(256 << 20, np.uint8)
    for _ in range(15):
        columns, rows = (
            max(64, int(rng.integers(65, model.context // model.pool)) >> int(rng.integers(0, 10))),
            int(rng.integers(1, DECODES + 1)),
        )
        q, weights = (
            cupy.zeros((rows, model.index_heads, 128), np.uint8),
            cupy.zeros((rows, model.index_heads), np.float32),
        )
        lens, table = cupy.zeros(rows, np.int32), cupy.zeros((rows, columns // 64), np.int32)
        pool, topk = model.pool, model.topk // model.pool
        slots = cupy.empty((rows, topk * pool + pool - 1), np.int32), cupy.empty(rows, np.int32)
        pooled = {"pool": pool, "positions": cupy.full(rows, -1, np.int32)} if pool > 1 else {}
        cumla.indexer_topk(
            q[:, None], pages, weights, topk, context_lens=lens, block_table=table, backend="cuda", slots=slots,
            workspace=workspace, **pooled,
        )  # fmt: skip
        if model.kind == "v41":
            chosen = cupy.zeros((rows, model.candidate_blocks), np.int32)
            cumla.candidate_topk(q[:, None], pages, weights, chosen, model.topk, lens, table, backend="cuda")
        rows = int(rng.integers(1, 600))
        q, weights = (
            cupy.zeros((rows, model.index_heads, 128), np.uint8),
            cupy.zeros((rows, model.index_heads), np.float32),
        )
        keys, none = (cupy.zeros((columns, 128), np.uint8), cupy.zeros(columns, np.float32)), cupy.zeros(rows, np.int32)
        cumla.indexer_topk(
            q, keys, weights, topk, cu_seqlen_ks=none, cu_seqlen_ke=none, workspace=workspace[: 64 << 20],
            backend="cuda",
        )  # fmt: skip
        assert asked == warm, (columns, rows)
