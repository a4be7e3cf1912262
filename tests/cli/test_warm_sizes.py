"""`cumla warmup` compiles every kernel that a selection may launch, whatever its rows and columns."""

import numpy as np
import pytest

import cumla
from cumla.cli.selection_calls import selection_calls
from cumla.cli.served_model import Model
from cumla.kernels.cuda import candidates, index_scores, indexer
from cumla.kernels.cuda.launch import recorded_launches

DECODES = 33


@pytest.fixture
def programs(monkeypatch, request):
    """Programs that calls would compile, instead of compiling and launching them, on a device of 132 SMs."""
    request.getfixturevalue("emulated")
    found = set()

    def note(file, name, arch=None, **macros):
        found.add((file, name, arch, *sorted(macros.items())))
        return lambda *launch, **options: None

    def note_large(device, shared_bytes, *names, **macros):
        return note(*names, **macros)

    fakes = {"kernel": note, "large_kernel": note_large, "device_sms": lambda device: 132}
    for module in (candidates, index_scores, indexer):
        for name in fakes.keys() & vars(module).keys():
            monkeypatch.setattr(module, name, fakes[name])
    with recorded_launches():  # no call is kept, as none of them launches anything
        yield found


@pytest.mark.parametrize(("kind", "context"), [("v4", 1 << 16), ("v32", 1 << 15), ("v41", 1 << 12)])
def test_no_selection_compiles_anything_after_the_warm_up(programs, kind, context):
    import cupy

    model = Model(kind, 64, 2048 if kind == "v32" else 512, context=context)
    for _, call in selection_calls(model, DECODES, "cuda"):
        call()
    warm = set(programs)
    assert len({program for program in warm if "topk" in program[0]}) > 4
    rng, pages = np.random.default_rng(0), cumla.INDEXER_FP8.allocate(1, 64, cupy)
    workspace = cupy.zeros(256 << 20, np.uint8)
    for _ in range(40):
        columns, rows = (
            max(64, int(rng.integers(65, model.context)) >> int(rng.integers(0, 10))),
            int(rng.integers(1, DECODES + 1)),
        )
        q, weights = (
            cupy.zeros((rows, model.index_heads, 128), np.uint8),
            cupy.zeros((rows, model.index_heads), np.float32),
        )
        lens, table = cupy.zeros(rows, np.int32), cupy.zeros((rows, columns // 64), np.int32)
        cumla.indexer_topk(
            q[:, None], pages, weights, model.topk, context_lens=lens, block_table=table, backend="cuda",
            slots=(cupy.empty((rows, model.topk), np.int32), cupy.empty(rows, np.int32)), workspace=workspace,
        )  # fmt: skip
        rows = int(rng.integers(1, 600))
        q, weights = (
            cupy.zeros((rows, model.index_heads, 128), np.uint8),
            cupy.zeros((rows, model.index_heads), np.float32),
        )
        keys, none = (cupy.zeros((columns, 128), np.uint8), cupy.zeros(columns, np.float32)), cupy.zeros(rows, np.int32)
        cumla.indexer_topk(
            q, keys, weights, model.topk, cu_seqlen_ks=none, cu_seqlen_ke=none, workspace=workspace[: 64 << 20],
            backend="cuda",
        )  # fmt: skip
        assert programs - warm == set(), (columns, rows)
