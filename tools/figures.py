#!/usr/bin/env python3
"""The README's figures beside the records in benchmarks/results: prints each one that is not what its record says.

    python tools/figures.py

Exit status 1 if a figure differs from its record or has none. A label below is the start of the table's row, whose
numbers are those of the records in order, first cumla's, then the peer's.
"""

import json
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
KINDS = ("c4a", "window", "c128a", "v32")  # columns of the first table, for each of its devices
DECODE = "sparse_mla_decode"
LAYER = "{}, b {}, 32,768 of context, fp8 weights"


def each(form, *values):
    return [form.format(value) for value in values]


# Label, file, operation, configurations, the peer. "cumla (": whichever way a layer chose.
CALLS = [
    ("sparse decode, 64", "h200/decode", DECODE, ["DSV4_FP8 h64 b1 s1 128+512, lengths"], "flash_mla"),
    ("8 / 32 / 64", "h200/decode", DECODE, each("DSV4_FP8 h64 b{} s1 128+512, lengths", 8, 32, 64), "flash_mla"),
    ("window alone", "h200/decode", DECODE, each("DSV4_FP8 h64 b{} s1 128, lengths", 1, 128), "flash_mla"),
    ("V4.1's formats", "h200/formats", DECODE, each("DSV41_FP8 h64 b{} s1 128+512, lengths", 1, 8, 32, 128), None),
    (
        "V4.1: choice", "h200/candidates", "candidate_topk",
        each("b {} x 1048576, 2048 blocks k 512, full lists", 1, 16, 128), "all positions",
    ),
    (
        "FP8 weights of a query", "h200/products", "fp8_block_linear", each("{} tokens, 32768 x 1024", 1, 32, 128),
        "deep_gemm",
    ),
    ("a C4A layer from", "h200/layers", "layer", [LAYER.format("C4A", b) for b in (32, 128)], "chain"),
    ("a V3.2 layer", "h200/layers", "layer", [LAYER.format("V3.2", b) for b in (32, 128)], "chain"),
    ("a C4A layer's 4,096", "h200/layers", "layer, prompt", ["C4A, 4,096 tokens"], "bfloat16"),
    ("128 heads, 128 +", "h200/decode", DECODE, each("DSV4_FP8 h128 b{} s1 128+1024, lengths", 8, 128), "flash_mla"),
    ("16 heads, 128 +", "h200/decode", DECODE, each("DSV4_FP8 h16 b{} s1 128+1024, lengths", 32, 128), "flash_mla"),
    ("V3.2, 128 heads", "h200/decode", DECODE, each("V32_FP8 h128 b{} s1 2048, lengths", 8, 128), "flash_mla"),
    ("dense decode", "h100/mla", "dense_mla_decode", each("h128 b{} of 8192, lengths", 1, 16, 64, 128), "flash_mla"),
    (
        "the same, all of", "h100/mla", "dense_mla_decode", each("h128 b{} of 8192, full lists", 1, 16, 64, 128),
        "flash_mla",
    ),
    (
        "a C4A layer's prefill", "h200/prefill_chunks", "prefill chunk", ["1 x 512 new, 128K context, equal contexts"],
        "vllm",
    ),
    (
        "8 x 256 tokens", "h200/prefill_chunks", "prefill chunk",
        ["8 x 256 new, 16K context, lengths", "4 x 1,024 new, 32K context, lengths"], "vllm",
    ),
    ("sparse prefill, 64", "h200/prefill", "sparse_mla_prefill", ["d512 h64 topk 640 of 32K, lengths"], "flash_mla"),
    (
        "the same, 512 /", "h200/prefill", "sparse_mla_prefill",
        each("d512 h64 topk 640 of 32K T{}, lengths", 512, 2004), "flash_mla",
    ),
    (
        "128 heads, 2,048 keys", "h200/prefill", "sparse_mla_prefill",
        each("d512 h128 topk 2048 of 32K{}, lengths", "", ", fp8 products"), "flash_mla",
    ),
    (
        "16 / 32 heads", "h200/prefill", "sparse_mla_prefill", each("d512 h{} topk 1152 of 32K, lengths", 16, 32),
        "flash_mla",
    ),
    ("scores of prompts", "h200/indexer", "fp8_mqa_logits", ["8192 x 32768, lengths"], "deep_gemm"),
    ("scores of pages", "h200/indexer", "fp8_paged_mqa_logits", ["b 128 x 32768 next_n 1, lengths"], "deep_gemm"),
    ("the same of 2", "h200/indexer", "fp8_paged_mqa_logits", ["b 64 x 32768 next_n 2, lengths"], "deep_gemm"),
    ("choice of 512, H100", "h100/indexer", "top_k decode", each("{} x 8192 k 512, lengths", 1, 32, 128), "vllm"),
    ("choice of 512 / 2,048", "h200/indexer", "top_k decode", each("128 x 32768 k {}, lengths", 512, 2048), "vllm"),
    ("host time", "h200/interop", "call: decode", each("h64 b{} 128+512, lengths", 1, 32, 128), "flash_mla"),
]  # fmt: skip
OWN = {"prefill chunk": "cumla (", "call: decode": "torch"}  # cumla's rows where they are not named so
TABLE = [  # rows of the trace: label, heads and names of steps
    ("64 heads: decode, 8", [("h64", "decode8")]), ("16 |", [("h64", "decode16")]), ("64 |", [("h64", "decode64")]),
    ("256 |", [("h64", "decode256")]), ("64 running, 2,048", [("h64", "mixed64x2048")]),
    ("128 running", [("h64", "mixed128x2048")]),
    ("64 requests of 2 / 4", [("h64", "mtp2x64"), ("h64", "mtp4x64")]),
    ("128 heads: decode", [("h128", "decode8"), ("h128", "decode64"), ("h128", "decode256")]),
    ("128 heads: 64 running", [("h128", "mixed64x2048")]),
    ("16 heads: decode", [("h16", "decode8"), ("h16", "decode64"), ("h16", "decode256")]),
]  # fmt: skip
NUMBER = re.compile(r"(?<![\w.])\d[\d,]*(?:\.\d+)?(?!\w)")


def numbers(text):
    return NUMBER.findall(text.split("(")[0])


def is_rounded(printed, value):
    """Whether a figure is a record's value, rounded once or, by way of the tables of the benchmarks, twice."""
    digits = len(printed.partition(".")[2])
    return value is not None and abs(float(printed.replace(",", "")) - value) <= 0.56 * 10.0**-digits


def read(file):
    path = RESULTS / f"{file}.json"
    return json.loads(path.read_text()) if path.exists() else {"rows": [], "table": []}


def time_of(record, op, config, impl):
    for row in record["rows"]:
        if (row["op"], row["config"]) == (op, config) and (row["impl"] == impl or impl[-1] == "(" in row["impl"]):
            return row.get("us") if op.startswith("call") else row.get("us_graph") or row.get("us")
    return None


def ratios(device):
    """The ratios in all files of the trace by kind, heads and steps; names of steps without requests have 64."""
    found = {}
    for path in sorted((RESULTS / device).glob("trace*.json")):
        for line in json.loads(path.read_text()).get("table", ()):
            steps = line["steps"] + ("x64" if re.fullmatch(r"mtp\d", line["steps"]) else "")
            found[line["kind"], line["heads"], steps] = line["ratio"]
    return found


def pairs_of_calls(line, label, file, op, configs, peer):
    """Printed numbers with what the records say, and where."""
    record = read(file)
    impls = [OWN.get(op, "cumla")] + ([peer] if peer else [])
    wanted = [(config, impl) for impl in impls for config in configs]
    if peer is None:  # V4.1's formats, beside V4's rows
        beside = [config.replace("DSV41_FP8", "DSV4_FP8") for config in configs]
        wanted += [(config, impl) for impl in ("cumla", "flash_mla") for config in beside]
    printed = [x for cell in line.split("|")[2:4] for x in numbers(cell)]
    where = [f"{file}.json: {op} | {config} | {impl}" for config, impl in wanted]
    return printed, [time_of(record, op, *x) for x in wanted], where


def pairs_of_trace(line, steps):
    columns = [(device, kind) for device in ("h200", "h100") for kind in KINDS]
    found = {device: ratios(device) for device in ("h200", "h100")}
    printed, values, where = [], [], []
    for (device, kind), cell in zip(columns, line.split("|")[2:10], strict=True):
        if cell.strip() != "-":
            printed += numbers(cell)
            values += [found[device].get((kind, *step)) for step in steps]
            where += [f"{device}/trace*.json: {kind} {' '.join(step)}" for step in steps]
    return printed, values, where


def main():
    lines = (ROOT / "README.md").read_text().splitlines()
    wrong = 0
    for label, *what in CALLS + TABLE:
        rows = [(n, x) for n, x in enumerate(lines, 1) if x.startswith(f"| {label}")]
        if len(rows) != 1:
            print(f"README.md: {len(rows)} rows begin with {label!r}, expected one")
            wrong += 1
            continue
        ((number, line),) = rows
        printed, values, where = pairs_of_trace(line, *what) if len(what) == 1 else pairs_of_calls(line, label, *what)
        if len(printed) != len(values):
            print(f"README.md:{number}: {label}: got {len(printed)} figures, expected {len(values)}")
            wrong += 1
            continue
        for figure, value, place in zip(printed, values, where, strict=True):
            if not is_rounded(figure, value):
                says = "has no such row" if value is None else f"says {value:,.2f}"
                print(f"README.md:{number}: {label}: {figure}; {place} {says}")
                wrong += 1
    print(f"{wrong} figures are not those of their records")
    return min(wrong, 1)


if __name__ == "__main__":
    sys.exit(main())
