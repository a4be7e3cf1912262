"""Writes the numbers of a run as tables on the terminal and as a JSON file."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..terminal import say
from .blocks import BLOCK_TOKENS
from .options import MODEL_OF
from .summary import ATTENTION_OPS
from .tables import NumberTable
from .trace import HASH_TOKENS
from .verify import (
    FP4_COSINE_BOUND,
    FP4_MEAN_BOUND,
    FP4_RMS_BOUND,
    FP8_COSINE_BOUND,
    FP8_MEAN_BOUND,
    FP8_RMS_BOUND,
)

SHOWN_FAILURES = 5


def json_text(summary: dict[str, Any]) -> str:
    return json.dumps(_finite(summary), indent=1, allow_nan=False)


def write_json(path: Path, summary: dict[str, Any]) -> None:
    """Write a summary to a file. Raises OSError if it cannot be written in full."""
    path.write_text(f"{json_text(summary)}\n", encoding="utf-8")


def _finite(value: Any) -> Any:
    """A copy with None in place of NaN and infinities, which JSON lacks."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def print_report(console: Console, summary: dict[str, Any]) -> None:
    tables: list[Table | NumberTable] = [
        _run(summary),
        _throughput(summary),
        _latency(summary),
        _ops(summary),
        _cache(summary),
        *([_groups(summary)] if summary["prefix"].get("groups") and summary["prefix"]["shared_tokens"] else []),
        *([_ranks(summary)] if "ranks" in summary else []),
        *([_exactness(summary)] if summary["verification"]["samples"] or not _is_unchecked(summary) else []),
    ]
    if summary["verification"]["fp8"]:
        tables.append(_fp8_cost(summary))
    for table in tables:
        if isinstance(table, NumberTable):
            table.print(console)
        else:
            console.print(table)
        console.print()
    failures = summary["verification"]["failures"]
    for failure in failures[:SHOWN_FAILURES]:
        say(console, f"[red]beyond bounds:[/red] {escape(failure)}")
    if len(failures) > SHOWN_FAILURES:
        console.print(f"[red]and {len(failures) - SHOWN_FAILURES} more[/red]")
    say(console, meaning(summary))


def meaning(summary: dict[str, Any]) -> str:
    """A sentence on the result of the run, and the next steps."""
    checked, backend = summary["verification"], summary["config"]["backend"]
    if checked["failures"]:
        return (
            f"[red]Results are wrong[/red] on backend {backend}: do not serve with it here. `cumla check` says which "
            "operations are; please report its output."
        )
    parts = []
    if checked["samples"]:
        parts.append(f"[green]All {checked['samples']:,} sampled outputs are right[/green] on backend {backend}.")
    if compared := summary["prefix"].get("host", {}).get("compared"):
        parts.append(f"Prefixes that came back from host memory unchanged: {compared:,} of {compared:,}.")
    unchecked = [name for name in summary["config"]["layers"] if name in MODEL_OF] if _on_ranks(summary) else []
    if unchecked:
        parts.append(
            f"Outputs of {', '.join(unchecked)} were not checked: with --ranks no rank has all of their rows; a run "
            "without it checks them."
        )
    return " ".join(
        [
            *parts,
            "Next: --json FILE keeps all numbers, --html FILE and --plot FILE draw them, `cumla bench` times calls.",
        ]
    )


def _on_ranks(summary: dict[str, Any]) -> bool:
    return bool(summary["config"]["ranks"] > 1)


def _is_unchecked(summary: dict[str, Any]) -> bool:
    """Whether no layer is checked: all are layers of models on ranks, none of which has all rows."""
    return _on_ranks(summary) and set(summary["config"]["layers"]) <= MODEL_OF.keys()


def _run(summary: dict[str, Any]) -> Table:
    config, share = summary["config"], summary["share"]
    left_out = share["trace_requests"] - share["requests"]
    cut = share["requests"] - share["whole_requests"]
    lengths = "as long as in the trace"
    if cut:
        limits = (("max_len", "tokens (--max-len)"), ("max_output", "of output (--max-output)"))
        to = " and ".join(f"{config[name]:,} {what}" for name, what in limits if config[name] is not None)
        lengths = f"{cut:,} of the {share['requests']:,} cut to {to}"
    rows = (
        (
            "requests",
            f"{share['requests']:,} of the trace's {share['trace_requests']:,}"
            + (f"; {left_out:,} left out (--requests)" if left_out else ""),
        ),
        ("their lengths", lengths),
        (
            "their tokens",
            f"{share['tokens']:,} of {share['tokens_uncut']:,} ({share['tokens'] / share['tokens_uncut']:.0%}); "
            f"the trace has {share['trace_tokens']:,}",
        ),
        ("tokens that ran", _tokens(summary)),
        ("layers", f"{', '.join(config['layers'])}; {counted(config['heads'], 'head')}"),
        ("window", f"{config['window']:,} tokens"),
        ("topk", f"{config['topk']:,} compressed rows"),
        ("batch", f"at most {config['batch_tokens']:,} tokens a step"),
        ("seed", f"{config['seed']}"),
        ("backend", config["backend"]),
    )
    table = Table(title="What ran", title_justify="left", show_header=False)
    for row in rows:
        table.add_row(*row)
    return table


def _tokens(summary: dict[str, Any]) -> str:
    """The requests' tokens: run, found in the cache, or last outputs, which are never run as no token follows them."""
    totals, hits, last = summary["totals"], summary["prefix"]["shared_tokens"], summary["totals"]["requests"]
    ran = totals["prefill"]["tokens"] + totals["decode"]["tokens"]
    return (
        f"{ran:,} + {hits:,} prefix hits + {last:,} last outputs, dropped as no token follows them, "
        f"= {ran + hits + last:,}"
    )


def _latency(summary: dict[str, Any]) -> NumberTable:
    layers = len(summary["config"]["layers"])
    columns = list(summary["latency"]["step_ms"])
    table = NumberTable(
        f"Latency: milliseconds in attention of {counted(layers, 'layer')}, and nothing else",
        ["", *columns],
        caption="First output: from a request's simulated arrival to the end of the step that computes it.",
    )  # fmt: skip
    for name, key in (("a step", "step_ms"), ("a request's first output", "first_output_ms")):
        table.add_row(name, *(f"{summary['latency'][key][column]:,.2f}" for column in columns))
    return table


def counted(count: int, word: str) -> str:
    return f"{count} {word}" if count == 1 else f"{count} {word}s"


def _throughput(summary: dict[str, Any]) -> NumberTable:
    totals, layers = summary["totals"], len(summary["config"]["layers"])
    table = NumberTable(
        f"Throughput: {totals['requests']} requests in {totals['steps']} steps, {totals['wall_seconds']:.1f} s",
        ["", "tokens", f"tokens/s in attention of {counted(layers, 'layer')}", "tokens/s of the run"],
        caption="Attention is metadata and the ops above the line in the table of ops; the run includes the ops below "
        "it. Time that serves both kinds is split by tokens.",
    )  # fmt: skip
    for kind in ("prefill", "decode"):
        numbers = totals[kind]
        table.add_row(
            kind,
            f"{numbers['tokens']:,}",
            f"{numbers['tokens_per_second']:,.0f}",
            f"{numbers['tokens_per_wall_second']:,.0f}",
        )
    return table


def _ops(summary: dict[str, Any]) -> NumberTable:
    ops = {(row["layer"], row["op"]): row for row in summary["ops"]}
    layers = list(dict.fromkeys(layer for layer, op in ops if op in ATTENTION_OPS))
    counts_bytes = {layer for (layer, _), row in ops.items() if row["gbps"] is not None}
    columns, attached = ["op"], []
    for layer in layers:
        columns.append(f"{layer} ms")
        if layer in counts_bytes:
            attached.append(len(columns))
            columns.append("GB/s")
    caption = "Below the line only metadata counts as attention."
    if counts_bytes:
        caption = f"GB/s: bytes the op has to move over its time. {caption}"
    title = f"Time {'and bandwidth ' if counts_bytes else ''}by op and layer type"
    table = NumberTable(title, columns, caption, attached)
    last = [op for op in ATTENTION_OPS if any((layer, op) in ops for layer in layers)][-1]
    for op in (*ATTENTION_OPS, "index k", "index q", "scores", "choice", "activations"):
        cells = []
        for layer in layers:
            row = ops.get((layer, op))
            cells.append("" if row is None else f"{row['seconds'] * 1e3:,.1f}")
            if layer in counts_bytes:
                cells.append("" if row is None or row["gbps"] is None else f"{row['gbps']:,.2f}")
        if any(cells):
            table.add_row(op, *cells, end_section=op == last)
    for (layer, op), row in ops.items():
        if layer not in layers:
            table.add_row(op, f"{row['seconds'] * 1e3:,.1f}", *[""] * (len(columns) - 2))
    return table


def _cache(summary: dict[str, Any]) -> Table:
    cache, prefix, totals = summary["cache"], summary["prefix"], summary["totals"]
    table = Table(title="Cache", title_justify="left", show_header=False)
    rows = (
        ("size", f"{cache['blocks']:,} blocks of {BLOCK_TOKENS} tokens, {cache['bytes'] / 2**20:,.0f} MiB"),
        ("in use", f"{cache['held_peak']:.0%} at most, {cache['held_mean']:.0%} in the mean"),
        ("kept for later prefixes", f"{cache['idle_peak']:.0%} at most"),
        ("requests that waited for room", f"{totals['requests_that_waited']} of {totals['requests']}"),
        (
            "prefix hits",
            f"{prefix['shared_tokens']:,} of {prefix['prompt_tokens']:,} prompt tokens "
            f"({prefix['shared_share']:.1%}), in {prefix['requests_with_hits']} requests",
        ),
    )
    for row in (*rows, *_host(summary)):
        table.add_row(*row)
    return table


def _host(summary: dict[str, Any]) -> list[tuple[str, str]]:
    """Rows on prefixes in host memory."""
    host = summary["prefix"].get("host")
    if host is None:
        return []
    seconds = {row["op"]: row["seconds"] for row in summary["ops"] if row["layer"] == "step"}
    rows = [("host memory", f"{summary['config']['host_pages']:,} pages a group, {host['bytes'] / 2**20:,.1f} MiB")]
    for direction in ("out", "in"):
        moved, took = host[f"bytes_{direction}"], seconds.get(f"swap {direction}", 0.0)
        speed = f", {moved / took / 1e9:.2f} GB/s" if took else ""
        rows.append((
            f"swapped {direction}",
            f"{host[f'prefixes_{direction}']:,} times {HASH_TOKENS} tokens: {host[f'pages_{direction}']:,} pages, "
            f"{moved / 2**20:,.1f} MiB{speed}",
        ))  # fmt: skip
    return rows


def _groups(summary: dict[str, Any]) -> NumberTable:
    prefix = summary["prefix"]
    table = NumberTable(
        f"Prefix hits by page group: what {counted(prefix['requests_with_hits'], 'request')} took instead of computing",
        ["layers", "tokens of a page", "tokens needed", "pages", "MiB"],
        caption="A hit needs only the newest rows of windows, and states of rows that are not complete.",
    )
    for row in prefix["groups"]:
        table.add_row(
            f"{row['layers']} {row['group']}", f"{row['page_tokens']:,}" if row["page_tokens"] else "a ring",
            f"{row['positions']:,}", f"{row['pages']:,}", f"{row['bytes'] / 2**20:,.2f}",
        )  # fmt: skip
    return table


def _ranks(summary: dict[str, Any]) -> NumberTable:
    totals = summary["totals"]
    tokens = totals["prefill"]["tokens"] + totals["decode"]["tokens"]
    table = NumberTable(
        f"{counted(len(summary['ranks']), 'rank')} that share the rows of long contexts",
        ["rank", "caches MiB", "on one device", "shared rows MiB", "on one device", "ms attending", "exchanging",
         "merging", "sent MiB", "KiB a token"],
        caption="Exchanging includes waiting for other ranks; on devices all times include waiting for the host.",
    )  # fmt: skip
    for rank in summary["ranks"]:
        seconds, sent = rank["seconds"], rank["sent_bytes"]
        sizes = [rank[key] for key in ("cache_bytes", "bytes_on_one", "compressed_bytes", "compressed_bytes_on_one")]
        times = [seconds["decode"] + seconds["prefill"], seconds["exchange"], seconds["merge"]]
        table.add_row(
            f"{rank['rank']}", *(f"{size / 2**20:,.1f}" for size in sizes), *(f"{1e3 * time:,.1f}" for time in times),
            f"{sent / 2**20:,.1f}", f"{sent / 2**10 / tokens:,.1f}",
        )  # fmt: skip
    return table


def _exactness(summary: dict[str, Any]) -> NumberTable:
    checked = summary["verification"]
    table = NumberTable(
        f"Against float64: {checked['samples']:,} samples, {len(checked['failures'])} beyond bounds\n"
        "Exactness, over the rows in the cache",
        ["", "samples", "largest error", "share of its bound", "cosine distance", "bound"],
    )  # fmt: skip
    for kind, numbers in checked["exactness"].items():
        table.add_row(
            kind,
            f"{numbers['samples']:,}",
            f"{numbers['error_worst']:.2g}",
            f"{numbers['bound_share_worst']:.0%}",
            f"{numbers['cosine_worst']:.1e}",
            f"{numbers['cosine_bound']:.0e}",
        )
    return table


def _fp8_cost(summary: dict[str, Any]) -> NumberTable:
    layers = list(summary["verification"]["fp8"].items())
    kinds = {numbers["fp4"] for _, numbers in layers}
    table = NumberTable(
        f"What {'FP8 and FP4 cost' if True in kinds else 'FP8 costs'}, over the rows before quantisation",
        ["layer", "samples", "rms error, mean", "worst", "cosine distance, mean", "worst"],
        caption="Root mean square error relative to the out's own root mean square.",
    )  # fmt: skip
    for layer, numbers in layers:
        table.add_row(
            layer,
            f"{numbers['samples']:,}",
            f"{numbers['rms_mean']:.4f}",
            f"{numbers['rms_worst']:.4f}",
            f"{numbers['cosine_mean']:.1e}",
            f"{numbers['cosine_worst']:.1e}",
            end_section=layer == layers[-1][0],
        )
    for fp4, name, mean, rms, cosine in (
        (False, "bound", FP8_MEAN_BOUND, FP8_RMS_BOUND, FP8_COSINE_BOUND),
        (True, "bound, FP4 rows", FP4_MEAN_BOUND, FP4_RMS_BOUND, FP4_COSINE_BOUND),
    ):
        if fp4 in kinds:
            table.add_row(name, "", f"{mean:.4f}", f"{rms:.4f}", "", f"{cosine:.1e}")
    return table
