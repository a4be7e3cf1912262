"""Divisions of sparse decode's work among thread blocks: what each takes, and the costs that this says.

Few queries are done by tiles of 16, 32 or 64 heads, whole, in parts, or in clusters. What is chosen is what costs least
by the constants of kernels/cuda/sparse/division.py. This measures what there is, tells how far from the best
of them that one is, and prints constants that fit all of them (least squares of relative errors).

    benchmarks/divisions.py --json FILE
    benchmarks/divisions.py --fit FILE...    of what was measured before, without a device
"""

from __future__ import annotations

import collections
import json
import pathlib
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from cumla.kernels.cuda.sparse.division import HOPPER_COSTS, Costs, Division, choices, terms

OP = "sparse_mla_decode division"
LEAST = 1e-3  # us: no cost is less


class Row(NamedTuple):
    """Tiles of so many heads and blocks, divided in some way, and the us of a call."""

    config: str
    height: int
    tiles: int
    blocks: int
    sms: int
    division: Division
    us: float


def name_of(division: Division) -> str:
    if division.together:
        return f"clusters of {division.parts}"
    return f"{division.parts} parts" if division.parts else "straddling" if division.cut else "whole"


def candidates(tiles: int, blocks: int, sms: int, clusters: tuple[tuple[int, int], ...]) -> list[Division]:
    """The choices of which any may be best: of parts, those that are no longer than with one part less."""
    found, longest = [], 0
    for division in choices(tiles, blocks, sms, clusters):
        longer = division.parts and not division.together and -(-blocks // division.parts) == longest
        if longer or (division.cut and not division.parts and (tiles < sms // 2 or sms % tiles == 0)):
            continue
        if division.parts and not division.together:
            longest = -(-blocks // division.parts)
        found.append(division)
    parts = [division for division in found if division.cut and division.parts]
    return [division for division in found if division not in parts[:-4]]


def fit(rows: list[Row]) -> Costs:
    """The costs by which the times of tiles of one height are best told; those that say nothing stay as they are."""
    before = HOPPER_COSTS[rows[0].height]
    counts = np.array([terms(row.division, row.tiles, row.blocks, row.sms) for row in rows], float)
    us = np.array([row.us for row in rows])
    costs, free = np.array(before, float), np.asarray(counts.any(axis=0), bool).reshape(-1)
    while free.any():
        rest = us - counts[:, ~free] @ costs[~free]
        found, *_ = np.linalg.lstsq(counts[:, free] / us[:, None], rest / us, rcond=None)
        costs[free] = found
        if (found >= LEAST).all():
            break
        too_low = np.flatnonzero(free)[found < LEAST]
        costs[too_low], free[too_low] = LEAST, False
    return Costs(*costs.tolist())


def expected(row: Row, costs: Costs) -> float:
    return float(np.dot(terms(row.division, row.tiles, row.blocks, row.sms), costs))


def tell(rows: list[Row]) -> None:
    """The costs that fit, and how good the choices are that they and those of now make."""
    of_height = collections.defaultdict(list)
    for row in rows:
        of_height[row.height].append(row)
    fitted = {height: fit(of_height[height]) for height in sorted(of_height, reverse=True)}
    for height, costs in fitted.items():
        off = [expected(row, costs) / row.us - 1 for row in of_height[height]]
        numbers = ", ".join(f"{name}={value:.3g}" for name, value in costs._asdict().items())
        print(f"    {height}: Costs({numbers}),  # of {len(off)}, off by {np.abs(off).max():.0%} at most", flush=True)
    by_config = collections.defaultdict(list)
    for row in rows:
        by_config[row.config].append(row)
    for config, mine in by_config.items():
        best, line = min(mine, key=lambda row: row.us), ""
        for label, by_height in (("now", HOPPER_COSTS), ("fitted", {**HOPPER_COSTS, **fitted})):
            chosen = min(mine, key=lambda row: expected(row, by_height[row.height]))
            more = f"+{chosen.us / best.us - 1:.1%}"
            line += f"  {label}: {chosen.height} {name_of(chosen.division)} {chosen.us:.2f} ({more})"
        print(f"{config:34} best: {best.height} {name_of(best.division)} {best.us:.2f} {line}", flush=True)


def measured(report: Any) -> Iterable[Row]:
    """Each of the configurations of few queries (benchmarks/decode.py), in each way to divide it."""
    import functools

    from common import graph_us

    from cumla.bench.problem import Sizes
    from cumla.bench.sparse import SETS, DecodeInputs, recorded_decodes
    from cumla.kernels.cuda.device import device_sms
    from cumla.kernels.cuda.launch import recorded_launches
    from cumla.kernels.cuda.sparse import kernels as sparse_kernels
    from cumla.kernels.cuda.sparse import work as sparse_work

    sms, clusters = device_sms(0), sparse_kernels._clusters(0)
    for config in recorded_decodes():
        tokens, blocks = config.batch * config.s_q, -(-config.topk // 64) + -(-config.extra // 64)
        if tokens > 128 or blocks > 64 or config.lengths or not report.wants(OP, str(config)):
            continue
        sets = [DecodeInputs(config, Sizes("cuda"), seed) for seed in range(SETS)]
        kinds = set()  # of which results were looked at
        for height in HOPPER_COSTS:
            if height > 16 and height >= 2 * config.heads:
                continue
            tiles = tokens * -(-config.heads // height)
            if tiles > 2 * sms:
                continue
            for division in candidates(tiles, blocks, sms, clusters):
                sparse_kernels.tile_heads = lambda *_, height=height: height
                sparse_work.divide = lambda *_, division=division: division
                with recorded_launches():
                    for inputs in sets:
                        inputs.plans.clear()
                    error = None
                    if (kind := (height, division.cut, division.together)) not in kinds:
                        kinds.add(kind)
                        sets[0].out[:] = 0
                        error = sets[0].check(sets[0].cumla("cuda"))
                    us = graph_us([functools.partial(inputs.cumla, "cuda") for inputs in sets])
                report.add(OP, str(config), f"{height} {name_of(division)}", us_graph=us, max_abs_err=error)
                yield Row(str(config), height, tiles, blocks, sms, division, us)


def main() -> None:
    from argparse import ArgumentParser, RawDescriptionHelpFormatter

    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write what was measured, after each row")
    parser.add_argument("--only", metavar="TEXT", default="", help="measure only configurations that have TEXT")
    parser.add_argument("--fit", type=pathlib.Path, nargs="+", metavar="FILE", help="measure nothing")
    args = parser.parse_args()
    if args.fit:
        found = [row for file in args.fit for row in json.loads(file.read_text())]
        rows = [Row(*row)._replace(division=Division(*row[5])) for row in found]
    else:
        import argparse

        from common import Report

        rows = []
        report = Report(argparse.Namespace(sources=None, json=None, only=args.only))
        for row in measured(report):
            rows.append(row)
            if args.json:
                args.json.write_text(json.dumps(rows))
    tell(rows)


if __name__ == "__main__":
    main()
