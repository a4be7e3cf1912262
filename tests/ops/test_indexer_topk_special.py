"""Top-k of rows of NaN, infinities, both zeros and few distinct values, on every backend and by every CUDA kernel."""

import numpy as np
import pytest

import cumla
from cumla.kernels.types.indexer import Rows

WIDTH, TOPK = 1500, 200


def special_rows(width, topk):
    """Rows in which columns compete for the k-th place because they are equal, nearly equal, or not numbers."""
    rng, column = np.random.default_rng(0), np.arange(width)
    normal, few = rng.normal(size=width), rng.uniform(size=width) < 0.6 * topk / width
    positive = np.abs(normal) + 0.1
    rows = {
        "NaN": np.full(width, np.nan),
        "-inf": np.full(width, -np.inf),
        "inf": np.full(width, np.inf),
        "equal": np.full(width, 3.0),
        "both zeros": np.where(column % 2, 0.0, -0.0),
        "zeros": np.where(few, positive, 0),
        "zeros at the end": np.where(column < width - topk, np.where(few, positive, -1), 0),
        "zeros and subnormal numbers": np.where(few, positive, np.where(column % 9, -0.0, 1e-40 * normal)),
        "more positive ones than zeros": np.where(column % 3, positive, 0),
        "too few equal ones": np.where(few, positive, np.where(column % (width // 5), normal - 5, 0)),
        "-inf and few others": np.where(few, normal, -np.inf),
        "NaN and few others": np.where(few, normal, np.nan),
        "inf and others": np.where(few, np.inf, normal),
        "inf, zeros, -inf and NaN": rng.choice([np.inf, 0.0, -0.0, -np.inf, np.nan], width),
        "nearly equal": 1000 + normal / 100,
        "some nearly equal": np.where(column % 2, 1000 + normal / 100, normal),
        "some equal, some nearly": np.where(column % 2, 1000 + np.maximum(normal - 1, 0) / 100, normal),
    }
    return np.stack(list(rows.values())).astype(np.float32)


def of_lengths(rows, width, topk):
    """A length for each row in turn: all columns, none, fewer than k, k, one more."""
    return np.resize(np.array([width, 0, topk - 1, width, topk, topk + 1, width - 3, 1, width], np.int32), rows)


@pytest.mark.nowhere(when=lambda x: x.backend == "reference")
def test_special_rows(lab):
    width, topk = (96, 24) if lab.tiny else (WIDTH, TOPK)
    x = special_rows(width, topk)
    lens = of_lengths(len(x), width, topk)
    for options in ({}, {"seq_lens": lens}):
        expected = cumla.top_k_per_row(x, topk, **options, backend="reference")
        given = {name: lab.put(array) for name, array in options.items()}
        found = lab.get(cumla.top_k_per_row(lab.put(x), topk, **given, backend=lab.backend))
        np.testing.assert_array_equal(found, expected)


@pytest.mark.nowhere(when=lambda x: x.backend != "cuda")
@pytest.mark.parametrize(
    ("kernel", "size"),
    [
        ("many", 256), ("many", 512), ("wide", 256), ("few", (128, 1, 4)), ("few", (128, 4, 2)),
        ("few", (128, 2, 8, 2)), ("few", (256, 1, 8, 1, 1)), ("few", (512, 1, 4, 1, 2)), ("held", (128, 4)),
        ("held", (512, 4)), ("held", (512, 2, 2)),
    ],
)  # fmt: skip
@pytest.mark.parametrize("aligned", [True, False])
def test_special_rows_by_each_kernel(lab, monkeypatch, kernel, size, aligned):
    from cumla.kernels.cuda import indexer_topk as launcher

    few = launcher.BoundSize(*size) if kernel == "few" else None
    monkeypatch.setattr(launcher, "bound_size", lambda *unused: few)
    held = launcher.RegistersSize(*size) if kernel == "held" else None
    monkeypatch.setattr(launcher, "registers_size", lambda *unused: held)
    monkeypatch.setattr(launcher, "stream_threads", lambda *unused: size if kernel == "many" else 1)
    width, topk = WIDTH, TOPK if kernel != "few" else min(TOPK, few.threads)
    x = special_rows(width, topk)
    x = np.concatenate([x, x[:, ::-1]])
    everywhere, lens = np.full(len(x), width, np.int32), of_lengths(len(x), width, topk)
    logits = lab.put(np.pad(x, ((0, 0), (0, 4 if aligned else 3))))[:, :width]
    for ends in (everywhere, lens):
        starts = np.minimum(np.arange(len(x), dtype=np.int32) % 6, ends)
        indices = lab.put(np.zeros((len(x), topk), np.int32))
        launcher.top_k_per_row(logits, Rows(lab.put(starts), lab.put(ends)), indices)
        expected = cumla.top_k_per_row(x, topk, starts, ends, backend="reference")
        np.testing.assert_array_equal(lab.get(indices), expected)
