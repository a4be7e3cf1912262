"""A model of attention over several GPUs: fitted to what parallel.py measured on two, drawn for eight and 1M tokens.

    parallel_model.py [--json benchmarks/results/h200x2/parallel.json] [--plot docs/parallel_model.svg]

A decode's time is that of its parts, one after another: a rank's attention, exchanging, merging. Attention has
the pace that a rank's part had alone. An exchange takes what NCCL took for as many bytes between two GPUs, and
HOP_US for each rank beyond two, which is an assumption; a merge has the pace of what it reads and writes. The table
says how far the model is from what was measured with everything together; the plot is the model alone.
"""

from __future__ import annotations

import argparse
import json
import pathlib
from dataclasses import dataclass
from typing import Any

import numpy as np

from cumla.parallel.context import is_merged_by_heads

ROOT = pathlib.Path(__file__).resolve().parent.parent
HOP_US = 2.0  # a further rank: not measured
HEADS, ROW, V = 128, 576, 512
MILLION = 1 << 20
C4A_ROW, C128A_ROW, INDEXER_ROW = 37440 / 64, 1728 / 2, 8640 / 64  # bytes, their share of a page's padding included
INDEXER_ROWS_PER_US = 128 * 32768 / 147  # scores of pages, benchmarks/results and docs/kernels/indexer-logits.md
COLOURS = ("#4477aa", "#ee6677", "#ccbb44")


@dataclass(frozen=True)
class Model:
    """What two GPUs were measured to do.

    flop_us  FLOP that dense decode does in a microsecond
    gather   [points, 2]: bytes that a rank sends in an all_gather, us
    swap     the same for an all_to_all, bytes to each other rank
    merge_us, merge_bytes_us  a merge: its start, and bytes that it reads and writes in a microsecond
    """

    flop_us: float
    gather: np.ndarray
    swap: np.ndarray
    merge_us: float
    merge_bytes_us: float

    @classmethod
    def of(cls, rows: list[dict[str, Any]]) -> Model:
        def points(op: str) -> np.ndarray:
            found = [row for row in rows if row["op"] == op and row["config"].endswith("KiB")]
            return np.array([(1024.0 * int(row["config"].split()[0]), row["us_graph"]) for row in found])

        parts = [row for row in rows if row["op"] == "dense_mla_decode" and row["impl"] == "its part alone"]
        merges = [row for row in rows if row["op"] == "merge_partials"]
        sizes = [row["gbps"] * 1e3 * row["us_graph"] for row in merges]  # bytes
        times = [row["us_graph"] for row in merges]
        pace = (sizes[1] - sizes[0]) / max(times[1] - times[0], 1e-3)
        return cls(
            float(np.mean([row["tflops"] * 1e6 for row in parts])), points("all_gather"), points("all_to_all"),
            max(times[0] - sizes[0] / pace, 0.5), pace,
        )  # fmt: skip

    def dense(self, batch: int, context: int, ranks: int) -> dict[str, float]:
        """us of the parts of a dense decode of 128 heads, q and out on every rank."""
        flop, out_bytes = 2 * batch * HEADS * context * (ROW + V), batch * HEADS * (2 * V + 4)
        parts = {"attend": flop / ranks / self.flop_us, "exchange": 0.0, "merge": 0.0}
        if ranks > 1 and not is_merged_by_heads(ranks, HEADS, out_bytes):
            parts["exchange"] = exchange_us(self.gather, out_bytes, ranks)
            parts["merge"] = self.merge((ranks + 1) * out_bytes)
        elif ranks > 1:
            some = out_bytes / ranks
            parts["exchange"] = exchange_us(self.swap, some, ranks) + exchange_us(self.gather, some, ranks)
            parts["merge"] = self.merge((ranks + 1) * some)
        return parts

    def merge(self, size: float) -> float:
        return self.merge_us + size / self.merge_bytes_us


def exchange_us(points: np.ndarray, size: float, ranks: int) -> float:
    """A collective in which a rank sends `size` bytes to each of the others."""
    sizes, times = points.T
    sent = size * (ranks - 1)
    if sent > sizes[-1]:
        pace = (sizes[-1] - sizes[-2]) / (times[-1] - times[-2])
        return float(times[-1] + (sent - sizes[-1]) / pace) + HOP_US * (ranks - 2)
    return float(np.interp(sent, sizes, times)) + HOP_US * (ranks - 2)


def v4_megabytes(tokens: int, ranks: int) -> dict[str, float]:
    """What a request takes on each rank in one C4A and one C128A layer."""
    return {
        "compressed rows": (tokens / 4 * C4A_ROW + tokens / 128 * C128A_ROW) / ranks / 1e6,
        "indexer's keys": tokens / 4 * INDEXER_ROW / 1e6,
        "window": 2 * 128 * C4A_ROW / 1e6,
    }


def checked(model: Model, rows: list[dict[str, Any]]) -> list[tuple[str, float, float]]:
    """(config, predicted us, measured us) of dense decodes over two GPUs."""
    measured = {row["config"]: row["us_graph"] for row in rows
                if row["op"] == "dense_mla_decode" and row["impl"] == "nccl x2"}  # fmt: skip
    sizes = {config: tuple(int(word.lstrip("bctx")) for word in config.split() if word[0] == "b" or word.isdigit())
             for config in measured}  # fmt: skip
    return [(config, sum(model.dense(*sizes[config], 2).values()), us) for config, us in measured.items()]


def draw(model: Model, path: pathlib.Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "cumla"
    from matplotlib import pyplot

    ranks = (1, 2, 4, 8)
    figure, axes = pyplot.subplots(1, 3, figsize=(12, 3.6))
    for axis, batch in zip(axes, (1, 16), strict=False):
        stack(axis, ranks, [model.dense(batch, MILLION, n) for n in ranks])
        axis.set_title(f"dense decode, {batch} x 1M tokens, 128 heads")
        axis.set_ylabel("us a layer")
    stack(axes[2], ranks, [v4_megabytes(MILLION, n) for n in ranks])
    axes[2].set_title("V4: C4A + C128A layer, 1M tokens")
    axes[2].set_ylabel("MB a request on each GPU")
    for axis in axes:
        axis.set_xlabel("GPUs")
        axis.legend(frameon=False, fontsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def stack(axis: Any, ranks: tuple[int, ...], parts: list[dict[str, float]]) -> None:
    bottom = np.zeros(len(ranks))
    for colour, name in zip(COLOURS, parts[0], strict=True):
        heights = np.array([part[name] for part in parts])
        axis.bar([str(n) for n in ranks], heights, bottom=bottom, label=name, color=colour)
        bottom += heights
    for i, top in enumerate(bottom):
        axis.text(i, top, f"{top:,.0f}", ha="center", va="bottom", fontsize=8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=pathlib.Path, default=ROOT / "benchmarks/results/h200x2/parallel.json")
    parser.add_argument("--plot", type=pathlib.Path, help="draw the model")
    args = parser.parse_args()
    rows = json.loads(args.json.read_text())["rows"]
    model = Model.of(rows)
    print(f"{'dense decode over two GPUs':28} {'model us':>9} {'measured':>9}")
    for config, predicted, us in checked(model, rows):
        print(f"{config:28} {predicted:9.1f} {us:9.1f} {predicted / us - 1:+9.0%}")
    print(f"\n{'1M tokens, us a layer':28} {'attend':>9} {'exchange':>9} {'merge':>9} {'times':>9}")
    for batch in (1, 16):
        one = sum(model.dense(batch, MILLION, 1).values())
        for ranks in (1, 2, 4, 8):
            parts = model.dense(batch, MILLION, ranks)
            name, times = f"dense, b{batch}, {ranks} GPUs", [f"{us:9.1f}" for us in parts.values()]
            print(f"{name:28}", *times, f"{one / sum(parts.values()):9.2f}")
    print(f"\n{'V4, MB a request and GPU':28} {'rows':>9} {'indexer':>9} {'window':>9}")
    for ranks in (1, 2, 4, 8):
        print(f"{f'{ranks} GPUs':28}", *(f"{size:9.1f}" for size in v4_megabytes(MILLION, ranks).values()))
    us = MILLION / 4 / INDEXER_ROWS_PER_US
    print(f"\nindexer's scores of a request of 1M tokens, on every GPU: {us:.1f} us a layer")
    if args.plot:
        draw(model, args.plot)


if __name__ == "__main__":
    main()
