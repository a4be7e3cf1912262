"""Every program of csrc/ that tests compile: file, macros and target.

All variants of a file are compiled for Hopper, of a file for older devices for the oldest target; every second variant
for the other of these two targets; one for each further target. Where options are independent, or targets equivalent,
they alternate: outputs of a top-k; sm_86 and sm_89; numbers of heads of portable attention for targets with equal
shared memory.
"""

import cumla
from cumla.kernels.cuda import compile as compiler
from cumla.kernels.cuda.sparse import portable as sparse_portable

TARGETS = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100", "sm_120")
INSERTS = {"SLOT": "int64"}
QUERIES = {"INPUT": "bf16", "WEIGHT": "float", "TABLE": "float", "POSITION": "int64", "SSMAX": 0, "HADAMARD": 0}
MHA = {
    "VALUE": "bf16", "OUTPUT": "bf16", "QK_DIM": 192, "ROPE_DIM": 64, "V_DIM": 128, "CAUSAL": 1, "ALIGNED": 1,
    "ACCUMULATE": 0,
}  # fmt: skip
MHA_TYPES = [("bf16", "bf16", 1), ("bf16", "float", 0), ("f16", "f16", 1)]


def projection_macros(tokens, rows, splits, stages, fine, aligned, early, finite, power_of_two, output):
    return {
        "TOKENS": tokens, "ROWS": rows, "SPLITS": splits, "STAGES": stages, "OUTPUT": output,
        "BLOCK_COLUMNS": 32 if fine else 128, "ALIGNED": aligned, "EARLY": early, "FINITE": finite,
        "POWER_OF_TWO": power_of_two,
    }  # fmt: skip


# Files of csrc/ with the macros of their launchers. What is not listed here or below has no macros.
SOURCES = [
    (
        "common/cache_insert.cu",
        {**INSERTS, "LAYOUT": "DSV4_FP8", "INPUT": "bf16", "POWER_OF_TWO": 1, "MIN_EXPONENT": -22, "ALIGNED": 1},
    ),
    (
        "common/cache_insert.cu",
        {**INSERTS, "LAYOUT": "V32_FP8", "INPUT": "f16", "POWER_OF_TWO": 0, "MIN_EXPONENT": -13, "ALIGNED": 1},
    ),
    (
        "common/cache_insert.cu",
        {**INSERTS, "LAYOUT": "DSV4_FP8", "INPUT": "float", "POWER_OF_TWO": 1, "MIN_EXPONENT": -22, "ALIGNED": 0},
    ),
    *(
        (
            "common/cache_insert.cu",
            {**INSERTS, "LAYOUT": name, "INPUT": given, "POWER_OF_TWO": 1, "MIN_EXPONENT": -22, "ALIGNED": a},
        )
        for name, given, a in (
            ("DSV41_FP8", "bf16", 1),
            ("DSV41_FP4", "bf16", 1),
            ("DSV41_FP4_SPLIT", "float", 0),
            ("INDEXER_MXFP4", "f16", 1),
        )
    ),
    ("common/indexer_insert.cu", {**INSERTS, "INPUT": "bf16", "POWER_OF_TWO": 1, "ALIGNED": 1}),
    ("common/indexer_insert.cu", {**INSERTS, "INPUT": "float", "POWER_OF_TWO": 0, "ALIGNED": 0}),
    ("common/indexer_keys.cu", {**INSERTS, "INPUT": "float", "VALUE": "bf16", "LAYOUT": "INDEXER_BF16"}),
    ("common/indexer_keys.cu", {**INSERTS, "INPUT": "bf16", "VALUE": "float", "LAYOUT": "INDEXER_F32"}),
    ("common/indexer_logits.cu", {"PAGED": 0, "LAYOUT": "INDEXER_F32"}),
    ("common/indexer_logits.cu", {"PAGED": 1, "LAYOUT": "INDEXER_MXFP4"}),
    ("common/candidates.cu", {"THREADS": 256}),
    *(
        (
            "common/latents.cu",
            {
                "INPUT": given, "WEIGHT": given, "OUTPUT": output, "SLOT": "int64", "POSITION": "int", "RATIO": ratio,
                "ROUND_POOLED": rounded, "WIDE": wide,
            },
        )
        for given, output, ratio, rounded, wide in (("float", "bf16", 2, 0, 1), ("bf16", "float", 1, 1, 0))
    ),
    *(
        (
            "common/key_pools.cu",
            {
                "INPUT": given, "WEIGHT": given, "STATE": state, "STATE_SLOT": "int64", "SLOT": "int64",
                "POSITION": "int", "LAYOUT": layout, "POOL": pool, "HADAMARD": rotated, "WIDE": wide, "ALIGNED": wide,
            },
        )
        for given, state, layout, pool, rotated, wide in (
            ("bf16", "bf16", "INDEXER_FP8", 4, 1, 1),
            ("float", "float", "INDEXER_BF16", 12, 0, 0),
        )
    ),
    *(
        (
            "sm80/index_scores.cu",
            {
                "QUERY": query, "LAYOUT": layout, "HEADS": heads, "PAGED": paged, "CANDIDATES": candidates,
                "ALIGNED": aligned,
            },
        )
        for query, layout, heads, paged, candidates, aligned in (
            ("uint8", "INDEXER_FP8", 64, 1, 0, 1),
            ("uint8", "INDEXER_FP8", 64, 0, 0, 1),
            ("uint8", "INDEXER_MXFP4", 64, 1, 1, 1),
            ("bf16", "INDEXER_BF16", 64, 1, 0, 0),
            ("uint8", "INDEXER_FP8", 32, 1, 1, 1),
            ("uint8", "INDEXER_MXFP4", 32, 1, 1, 1),
            ("uint8", "INDEXER_MXFP4", 32, 1, 0, 1),
            ("bf16", "INDEXER_MXFP4", 32, 0, 0, 1),
            ("bf16", "INDEXER_BF16", 32, 1, 0, 1),
            ("uint8", "INDEXER_FP8", 0, 0, 0, 0),
            ("bf16", "INDEXER_MXFP4", 0, 1, 1, 1),
            ("bf16", "INDEXER_BF16", 0, 1, 0, 0),
        )
    ),
    ("sm80/prompt_scores.cu", {"QUERY": "uint8", "LAYOUT": "INDEXER_FP8", "HEADS": 64, "ALIGNED": 1}),
    *(("common/candidate_logits.cu", {"LAYOUT": layout}) for layout in ("INDEXER_MXFP4", "INDEXER_F32")),
    ("common/indexer_queries.cu", {**QUERIES, "OUTPUT": "uint8", "Q_FORMAT": "MXFP4_ROWS", "ALIGNED": 0}),
    (
        "common/indexer_queries.cu",
        {**QUERIES, "OUTPUT": "uint8", "Q_FORMAT": "FP8", "SSMAX": 1, "HADAMARD": 1, "ALIGNED": 1},
    ),
    *(
        ("common/indexer_queries.cu", {**QUERIES, "OUTPUT": output, "Q_FORMAT": q_format, "ALIGNED": aligned})
        for output, q_format, aligned in (("uint8", "FP8", 1), ("float", "FP8", 0), ("uint8", "MXFP4", 1))
    ),
    *(
        (file, {**macros, "OUTPUT": output})
        for output in ("ToColumns", "ToSlots")
        for file, macros in (
            ("common/indexer_topk_stream.cu", {"THREADS": 256, "ALIGNED": 1}),
            ("common/indexer_topk_stream.cu", {"THREADS": 512, "ALIGNED": 0}),
            ("common/indexer_topk_stream.cu", {"THREADS": 512, "ALIGNED": 1}),
            *(
                ("common/indexer_topk_registers.cu", {"THREADS": threads, "BLOCKS": 1, "READS": reads, "ALIGNED": a})
                for threads, reads in ((1024, 2), (1024, 4), (512, 2))
                for a in (1, 0)
            ),
            ("common/indexer_topk_bound.cu", {"THREADS": 1024, "BLOCKS": 1, "READS": 2, "ROUNDS": 1, "ALIGNED": 1}),
            ("common/indexer_topk_bound.cu", {"THREADS": 1024, "BLOCKS": 1, "READS": 8, "ROUNDS": 1, "ALIGNED": 1}),
            ("common/indexer_topk_bound.cu", {"THREADS": 1024, "BLOCKS": 1, "READS": 4, "ROUNDS": 1, "ALIGNED": 0}),
            *(
                (
                    "common/indexer_topk_bound.cu",
                    {"THREADS": threads, "BLOCKS": 1, "READS": reads, "ROUNDS": 1, "ALIGNED": a, "ESTIMATED": guessed},
                )
                for threads, reads, a, guessed in ((1024, 4, 0, 1), (1024, 8, 1, 1))
            ),
            *(
                ("common/indexer_topk_bound.cu", {"THREADS": 1024, "BLOCKS": 1, "READS": 8, "ROUNDS": 8, "ALIGNED": a})
                for a in (0, 1)
            ),
            ("common/indexer_topk_wide.cu", {"THREADS": 512}),
        )
    ),
    *(
        (
            "sm90/indexer/logits.cu",
            {
                "HEADS": heads, "PAGED": paged, "PASS": queries, "PASSES": 1, "QUERY_GROUPS": groups, "MXFP4": 0,
                "MAXIMA": 0, "CANDIDATES": 0,
            },
        )
        for heads, paged, queries, groups in (
            (64, 0, 2, 2),
            (64, 0, 2, 4),
            (64, 1, 1, 1),
            (64, 1, 2, 1),
            (64, 1, 2, 2),
            (16, 0, 4, 4),
            (16, 1, 1, 1),
            (16, 1, 4, 1),
            (16, 1, 4, 2),
            (32, 0, 4, 2),
            (32, 0, 4, 4),
            (32, 1, 1, 1),
            (32, 1, 2, 1),
            (32, 1, 4, 1),
            (32, 1, 3, 2),
            (32, 1, 4, 2),
        )
    ),
    *(
        (
            "sm90/indexer/logits.cu",
            {
                "HEADS": heads, "PAGED": 1, "PASS": queries, "PASSES": products, "QUERY_GROUPS": 1, "MXFP4": 1,
                "MAXIMA": 0, "CANDIDATES": 0,
            },
        )
        for heads, queries, products in ((32, 1, 1), (32, 2, 1), (32, 2, 2), (32, 2, 3), (64, 1, 1), (64, 1, 6))
    ),
    *(
        (
            "sm90/indexer/logits.cu",
            {
                "HEADS": heads, "PAGED": 1, "PASS": queries, "PASSES": products, "QUERY_GROUPS": groups,
                "MXFP4": mxfp4, "MAXIMA": 1, "CANDIDATES": 0,
            },
        )
        for heads, queries, products, groups, mxfp4 in (
            (64, 2, 1, 1, 0),
            (32, 1, 1, 1, 0),
            (32, 4, 1, 1, 0),
            (32, 3, 1, 2, 0),
            (32, 1, 1, 1, 1),
            (32, 2, 3, 1, 1),
        )
    ),
    *(
        (
            "sm90/indexer/logits.cu",
            {
                "HEADS": heads, "PAGED": 1, "PASS": 1, "PASSES": 1, "QUERY_GROUPS": 1, "MXFP4": mxfp4, "MAXIMA": 0,
                "CANDIDATES": 1,
            },
        )
        for heads, mxfp4 in ((32, 0), (32, 1), (64, 0), (64, 1))
    ),
    ("common/cache_gather.cu", {"LAYOUT": "DSV4_FP8", "OUTPUT": "bf16", "TOKENS": 2, "ALIGNED": 1, "STREAM": 1}),
    ("common/cache_gather.cu", {"LAYOUT": "DSV41_FP8", "OUTPUT": "bf16", "TOKENS": 2, "ALIGNED": 1, "STREAM": 1}),
    ("common/cache_gather.cu", {"LAYOUT": "DSV41_FP4", "OUTPUT": "bf16", "TOKENS": 2, "ALIGNED": 1, "STREAM": 0}),
    ("common/cache_gather.cu", {"LAYOUT": "V32_FP8", "OUTPUT": "float", "TOKENS": 2, "ALIGNED": 0, "STREAM": 0}),
    ("common/indexer_gather.cu", {"LAYOUT": "INDEXER_FP8", "TO_E4M3": 0, "ALIGNED": 1}),
    ("common/indexer_gather.cu", {"LAYOUT": "INDEXER_MXFP4", "TO_E4M3": 0, "ALIGNED": 0}),
    ("common/indexer_gather.cu", {"LAYOUT": "INDEXER_MXFP4", "TO_E4M3": 1, "ALIGNED": 1}),
    ("common/dense_insert.cu", {"INPUT": "bf16", "CACHE": "bf16", "KV_C_DIM": 512, "SLOT": "int64", "ALIGNED": 1}),
    ("common/dense_insert.cu", {"INPUT": "float", "CACHE": "e4m3", "KV_C_DIM": 512, "SLOT": "int", "ALIGNED": 0}),
    ("common/dense_gather.cu", {"UNIT": "uint4"}),
    ("common/dense_gather.cu", {"UNIT": "uint8"}),
    ("common/dense_gather.cu", {"OUTPUT": "bf16", "ALIGNED": 1}),
    ("common/dense_gather.cu", {"OUTPUT": "float", "ALIGNED": 0}),
    *(
        (
            "common/norm_rope.cu",
            {
                "LAYOUT": layout, "SLOT": slot, "POSITION": "int64", "WEIGHT": weight, "UNIT": unit,
                "ROUND_ROWS": int(unit == 8), "IN_HALVES": int("FP4" in layout), "SSMAX": int("41" in layout),
                "ALIGNED": aligned,
            },
        )
        for layout, slot, weight, unit, aligned in (
            ("DSV4_FP8", "int64", "float", 8, 1),
            ("DSV4_BF16", "int", "bf16", 2, 0),
            ("DSV41_FP8", "int64", "float", 8, 1),
            ("DSV41_FP8_SPLIT", "int", "bf16", 2, 0),
            ("DSV41_FP4", "int64", "bf16", 8, 1),
            ("DSV41_FP4_SPLIT", "int", "float", 2, 0),
        )
    ),
    *(
        (
            "common/indexer_norm_rope.cu",
            {
                "LAYOUT": layout, "INPUT": value, "WEIGHT": value, "SLOT": "int64", "POSITION": "int",
                "HADAMARD": aligned, "ALIGNED": aligned,
            },
        )
        for layout, value, aligned in (("INDEXER_FP8", "float", 1), ("INDEXER_BF16", "bf16", 0))
    ),
    *(
        (
            "common/compressor.cu",
            {
                "LAYOUT": layout, "INPUT": value, "WEIGHT": value, "STATE_SLOT": "int64", "SLOT": "int64",
                "POSITION": "int", "SECOND": second, "RATIO": ratio, "COFF": 2 if ratio == 4 else 1, "PARTS": 1,
                "GROUPS": groups, "AHEAD": ahead, "WIDE": aligned, "ALIGNED": aligned,
            },
        )
        for layout, second, value, ratio, groups, ahead, aligned in (
            ("DSV4_FP8", "INDEXER_FP8", "float", 4, 1, 8, 1),
            ("DSV4_FP8", "DSV4_FP8", "float", 128, 4, 4, 1),
            ("INDEXER_FP8", "INDEXER_FP8", "bf16", 4, 1, 8, 0),
            ("INDEXER_BF16", "INDEXER_BF16", "float", 128, 8, 4, 1),
        )
    ),
    ("common/copy_blocks.cu", {"UNIT": "uint4", "CHUNK": 1024, "PAIR": "int64"}),
    ("common/copy_blocks.cu", {"UNIT": "uint8", "CHUNK": 1024, "PAIR": "int"}),
    ("common/copy_spans.cu", {"SPAN": "int64"}),
    ("common/copy_spans.cu", {"SPAN": "int"}),
    ("common/advance.cu", {"TOKEN": "int64", "SAMPLED": "int", "POSITION": "int64", "SLOT": "int64"}),
    *(
        (
            "common/prefill_rows.cu",
            {
                "LAYOUT": layout, "EXTRA_LAYOUT": extra, "COMPACT": compact, "OUTPUT": "bf16", "TOKENS": 2,
                "ALIGNED": 1, "STREAM": 1, "WIDE_ENTRIES": compact,
            },
        )
        for layout, extra in (("DSV4_FP8", "DSV4_FP8"), ("DSV41_FP8", "DSV41_FP4"))
        for compact in (1, 0)
    ),
    ("common/indices.cu", {"ALIGNED": 1}),
    ("common/indices.cu", {"ALIGNED": 0}),
    ("sm90/decode/decode.cu", {"LAYOUT": "DSV4_FP8"}),
    ("sm90/decode/decode.cu", {"LAYOUT": "V32_FP8"}),
    *(("sm90/decode/decode.cu", {"LAYOUT": "DSV4_FP8", "TILE_HEADS": heads}) for heads in (32, 16)),
    *(("sm90/decode/decode.cu", {"LAYOUT": "V32_FP8", "TILE_HEADS": heads}) for heads in (32, 16)),
    *(
        ("sm90/decode/decode.cu", {"LAYOUT": layout, "TILE_HEADS": heads, "PARTS": parts})
        for layout in ("DSV4_FP8", "V32_FP8")
        for heads, parts in ((64, 2), (64, 6), (32, 2), (32, 5), (16, 2), (16, 3))
    ),
    *(
        ("sm90/decode/decode.cu", {**formats, "TILE_HEADS": heads, "PARTS": parts})
        for formats, heads, parts in (
            ({"LAYOUT": "DSV41_FP8", "EXTRA_LAYOUT": "DSV41_FP4"}, 64, 1),
            ({"LAYOUT": "DSV41_FP8", "EXTRA_LAYOUT": "DSV41_FP4"}, 64, 6),
            ({"LAYOUT": "DSV41_FP8_SPLIT", "EXTRA_LAYOUT": "DSV41_FP4_SPLIT"}, 32, 5),
            ({"LAYOUT": "DSV41_FP8", "EXTRA_LAYOUT": "DSV41_FP4"}, 16, 3),
            ({"LAYOUT": "DSV41_FP8"}, 64, 1),
            ({"LAYOUT": "DSV41_FP4"}, 64, 2),
            ({"LAYOUT": "V32_NOPE_FP8"}, 64, 1),
            ({"LAYOUT": "DSV4_BF16"}, 64, 1),
            ({"LAYOUT": "MLA_BF16"}, 64, 1),
        )
    ),
    ("sm90/prefill/prefill.cu", {"LAYOUT": "DSV4_BF16"}),
    ("sm90/prefill/prefill.cu", {"LAYOUT": "MLA_BF16"}),
    ("sm90/prefill_fp8/prefill.cu", {"LAYOUT": "DSV4_BF16"}),
    *(("common/sparse/expand_rows.cu", {"LAYOUT": x}) for x in ("DSV4_FP8", "V32_FP8")),
    *(("sm90/prefill_fp8_rows.cu", {"LAYOUT": x}) for x in ("DSV4_BF16", "DSV4_FP8", "V32_NOPE_FP8")),
    *(("sm90/few_heads/prefill.cu", {"LAYOUT": "DSV4_BF16", "TILE_HEADS": heads}) for heads in (16, 32)),
    *(("sm90/few_heads/prefill.cu", {"LAYOUT": "MLA_BF16", "TILE_HEADS": heads}) for heads in (16, 32)),
    *(("common/sparse/exact.cu", {"LAYOUT": "DSV4_FP8", "ALIGNED": 1, "COMBINES": combines}) for combines in (1, 0)),
    ("common/sparse/exact.cu", {"LAYOUT": "V32_FP8", "ALIGNED": 1, "COMBINES": 1}),
    ("common/sparse/exact.cu", {"LAYOUT": "MLA_BF16", "ALIGNED": 0, "COMBINES": 0}),
    (
        "common/sparse/exact.cu",
        {"LAYOUT": "DSV41_FP8", "EXTRA_LAYOUT": "DSV41_FP4", "ALIGNED": 1, "COMBINES": 1, "FLOAT64_ONLY": 1},
    ),
    ("common/sparse/exact.cu", {"LAYOUT": "DSV41_FP4_SPLIT", "ALIGNED": 0, "COMBINES": 0, "FLOAT64_ONLY": 1}),
    ("common/dequantize_blocks.cu", {"ALIGNED": 1}),
    ("common/dequantize_blocks.cu", {"ALIGNED": 0}),
    ("common/quantize_groups.cu", {"ALIGNED": 1}),
    ("common/quantize_groups.cu", {"ALIGNED": 0}),
    ("sm90/fp8_product.cu", {"OUTPUT": "bf16"}),
    ("sm90/fp8_product.cu", {"OUTPUT": "float"}),
    ("sm90/fp8_product.cu", {"OUTPUT": "uint8"}),
    *(
        ("sm80/projection.cu", projection_macros(*numbers, output))
        for *numbers, output in (
            (8, 128, 1, 6, 0, 1, 1, 1, 1, "bf16"),
            (32, 128, 1, 4, 0, 1, 1, 1, 0, "float"),
            (16, 16, 1, 2, 1, 1, 0, 0, 0, "bf16"),
            (64, 128, 1, 3, 1, 1, 1, 1, 0, "float"),
            (128, 128, 1, 2, 0, 1, 1, 1, 0, "bf16"),
            (8, 64, 1, 5, 0, 0, 0, 0, 0, "float"),
        )
    ),
    *(
        ("sm90/projection.cu", projection_macros(*numbers, output))
        for *numbers, output in (
            (8, 128, 2, 6, 0, 1, 1, 1, 1, "bf16"),
            (128, 256, 1, 3, 0, 1, 1, 1, 1, "bf16"),
            (32, 128, 4, 4, 0, 1, 1, 1, 0, "float"),
            (32, 128, 1, 4, 0, 1, 1, 1, 1, "bf16"),
            (32, 64, 1, 6, 0, 1, 1, 1, 1, "bf16"),
            (16, 128, 8, 5, 0, 1, 1, 0, 1, "float"),
            (32, 128, 2, 4, 1, 1, 0, 0, 1, "bf16"),
            (32, 256, 1, 5, 0, 1, 1, 1, 1, "bf16"),
            (64, 128, 2, 6, 1, 1, 1, 0, 1, "bf16"),
            (128, 64, 3, 5, 0, 1, 1, 1, 1, "bf16"),
            (128, 128, 2, 4, 0, 1, 1, 0, 0, "bf16"),
            (128, 256, 4, 3, 0, 1, 0, 1, 1, "float"),
            (128, 128, 4, 4, 1, 1, 0, 0, 1, "float"),
        )
    ),
    ("common/merge_partials.cu", {"VALUE": "bf16", "ALIGNED": 1}),
    ("common/merge_partials.cu", {"VALUE": "f16", "ALIGNED": 0}),
    ("common/merge_partials.cu", {"VALUE": "float", "ALIGNED": 1}),
    ("common/merge.cu", {"VALUE": "bf16"}),
    ("common/merge.cu", {"VALUE": "f16"}),
    ("common/merge.cu", {"VALUE": "float"}),
    *(
        ("sm80/mha_varlen.cu", {**MHA, "VALUE": value, "OUTPUT": out, "CAUSAL": causal})
        for value, out, causal in MHA_TYPES
    ),
    ("sm80/mha_varlen.cu", {**MHA, "QK_DIM": 256, "ROPE_DIM": 0, "V_DIM": 256, "ALIGNED": 0}),
    *(("sm80/mha_varlen.cu", {**MHA, "OUTPUT": "float", "ALIGNED": aligned, "ACCUMULATE": 1}) for aligned in (0, 1)),
    ("sm90/dense/mha_varlen.cu", {"VALUE": "bf16", "OUTPUT": "bf16", "CAUSAL": 1, "ACCUMULATE": 0}),
    ("sm90/dense/mha_varlen.cu", {"VALUE": "f16", "OUTPUT": "float", "CAUSAL": 0, "ACCUMULATE": 0}),
    ("sm90/dense/mha_varlen.cu", {"VALUE": "bf16", "OUTPUT": "float", "CAUSAL": 0, "ACCUMULATE": 1}),
    ("sm90/dense/mha_varlen.cu", {"VALUE": "f16", "OUTPUT": "float", "CAUSAL": 1, "ACCUMULATE": 1}),
    ("sm90/dense/decode/decode.cu", {"VALUE": "bf16", "PAIRED": 0}),
    ("sm90/dense/decode/decode.cu", {"VALUE": "f16", "PAIRED": 0}),
    ("sm90/dense/decode/decode.cu", {"VALUE": "bf16", "PAIRED": 1}),
    ("sm90/dense/decode/decode.cu", {"VALUE": "f16", "PAIRED": 1}),
    # the form for racecheck (sm90/hopper.cuh)
    ("sm90/decode/decode.cu", {"LAYOUT": "DSV4_FP8", "EVERY_LANE_ARRIVES": 1}),
    ("sm90/decode/decode.cu", {"LAYOUT": "DSV4_FP8", "TILE_HEADS": 32, "PARTS": 2, "EVERY_LANE_ARRIVES": 1}),
    ("sm90/prefill/prefill.cu", {"LAYOUT": "DSV4_BF16", "EVERY_LANE_ARRIVES": 1}),
    ("sm90/prefill/prefill.cu", {"LAYOUT": "DSV4_BF16", "TRACE": 1}),
    ("sm90/prefill_fp8/prefill.cu", {"LAYOUT": "DSV4_BF16", "EVERY_LANE_ARRIVES": 1}),
    ("sm90/few_heads/prefill.cu", {"LAYOUT": "MLA_BF16", "TILE_HEADS": 32, "EVERY_LANE_ARRIVES": 1}),
    (
        "sm90/dense/mha_varlen.cu",
        {"VALUE": "bf16", "OUTPUT": "bf16", "CAUSAL": 1, "ACCUMULATE": 0, "EVERY_LANE_ARRIVES": 1},
    ),
    *(("sm90/dense/decode/decode.cu", {"VALUE": "bf16", "PAIRED": pair, "EVERY_LANE_ARRIVES": 1}) for pair in (0, 1)),
    *(
        ("sm80/dense/decode.cu", {
            "VALUE": value, "CACHE": cache, "KEYS": keys, "STAGES": stages, "Q_REGISTERS": registers, "ALIGNED": whole,
            "WHOLE_STEPS": whole,
        })
        for keys, stages, registers in ((32, 3, 96), (16, 4, 112), (32, 4, 96))
        for value, cache, whole in (("bf16", "bf16", 1), ("f16", "f16", 0), ("bf16", "e4m3", 1), ("f16", "e4m3", 0))
    ),
    ("common/dense_decode_merge.cu", {"VALUE": "bf16", "ALIGNED": 1, "AT_ONCE": 4, "MAX_SETS": 1}),
    ("common/dense_decode_merge.cu", {"VALUE": "f16", "ALIGNED": 0, "AT_ONCE": 8, "MAX_SETS": 1}),
    ("common/dense_decode_merge.cu", {"VALUE": "bf16", "ALIGNED": 1, "AT_ONCE": 8, "MAX_SETS": 8}),
    ("common/dense_decode_merge.cu", {"VALUE": "bf16", "ALIGNED": 1, "AT_ONCE": 16, "MAX_SETS": 5}),
    ("common/window_metadata.cu", {"SLOT": "int64"}),
    ("common/window_metadata.cu", {"SLOT": "int"}),
]  # fmt: skip


def targets_of(file):
    """Sources in Hopper's folder are only for Hopper; those in sm80/ also serve all newer devices."""
    return ("sm_90a",) if file.startswith("sm90/") else TARGETS


# Shared memory of a thread block and of a multiprocessor, in KiB.
SHARED_MEMORY = {
    "sm_80": (163, 164), "sm_86": (99, 100), "sm_89": (99, 100), "sm_90a": (227, 228), "sm_100": (227, 228),
    "sm_120": (99, 100),
}  # fmt: skip


def portable_attention(formats, heads, target):
    """The portable attention kernel in a device's sizes."""
    size = sparse_portable.choose(formats, heads, *(1024 * limit for limit in SHARED_MEMORY[target]))
    return size.file, sparse_portable.macros(formats, size), target


FIRST = dict(reversed(SOURCES))  # variant of each file
FILES = list(FIRST)
OUTPUTS = ("ToColumns", "ToSlots")


def is_its_turn(number, file, macros, target):
    """Whether variant `number` of SOURCES is compiled for a target."""
    if macros is FIRST[file]:
        return target != ("sm_86", "sm_89")[FILES.index(file) % 2]
    if target not in ("sm_80", "sm_90a"):
        return False
    output = macros.get("OUTPUT")
    if output in OUTPUTS:
        variant = sum(other.get("OUTPUT") == output for _, other in SOURCES[:number])
        return OUTPUTS[(variant + (target == "sm_80")) % 2] == output
    return number % 2 == 0 or target == ("sm_80" if file.startswith("sm80/") else "sm_90a")


COMPILATIONS = [
    (file, macros, target)
    for number, (file, macros) in enumerate(SOURCES)
    for target in targets_of(file)
    if is_its_turn(number, file, macros, target)
]
COMPILATIONS += [
    portable_attention(formats, heads, target)
    for number, formats in enumerate(
        (
            *((x, x) for x in (cumla.DSV4_FP8, cumla.V32_FP8, cumla.MLA_BF16, cumla.DSV4_BF16, cumla.DSV41_FP8)),
            (cumla.DSV41_FP8, cumla.DSV41_FP4),
            (cumla.DSV41_FP8_SPLIT, cumla.DSV41_FP4_SPLIT),
            (cumla.V32_NOPE_FP8, cumla.V32_NOPE_FP8),
        )
    )
    for target in TARGETS
    for heads in ((16, 64) if target in ("sm_80", "sm_86", "sm_90a") else (16, 64)[number % 2 :][:1])
]
COMPILATIONS += [
    ("sm80/projection.cu", projection_macros(tokens, 128, splits, 4, 0, 1, 1, 1, 1, "bf16"), target)
    for tokens, splits, target in ((8, 8, "sm_90a"), (32, 4, "sm_90a"), (32, 2, "sm_100"))
]
COMPILATIONS += [  # clusters
    (
        "common/compressor.cu",
        {
            "LAYOUT": "DSV4_FP8", "SECOND": "DSV4_FP8", "INPUT": "float", "WEIGHT": "float", "STATE_SLOT": "int64",
            "SLOT": "int64", "POSITION": "int", "RATIO": 128, "COFF": 1, "PARTS": parts, "GROUPS": groups, "AHEAD": 8,
            "WIDE": 1, "ALIGNED": 1,
        },
        target,
    )
    for target in ("sm_90a", "sm_100")
    for parts, groups in ((8, 16), (4, 8))
]  # fmt: skip
COMPILATIONS += [
    (
        "common/indexer_topk_registers.cu",
        {"THREADS": threads, "BLOCKS": blocks, "READS": reads, "ALIGNED": 1, "OUTPUT": OUTPUTS[turn % 2]},
        target,
    )
    for first, target in enumerate(("sm_90a", "sm_100"))
    for turn, (threads, reads, blocks) in enumerate(
        ((512, 2, 8), (512, 4, 4), (1024, 4, 2), (1024, 2, 8), (1024, 4, 8), (256, 2, 1)), first
    )
]
COMPILATIONS += [
    (
        "common/indexer_topk_bound.cu",
        {
            "THREADS": threads, "BLOCKS": blocks, "READS": 8, "ROUNDS": rounds, "ALIGNED": int(rounds < 8),
            "OUTPUT": OUTPUTS[turn % 2],
        },
        target,
    )
    for turn, (threads, blocks, rounds, target) in enumerate((
        (512, 8, 1, "sm_90a"),
        (1024, 2, 1, "sm_90a"),
        (1024, 8, 1, "sm_100"),
        (1024, 8, 4, "sm_90a"),
        (1024, 4, 8, "sm_90a"),
        (1024, 2, 2, "sm_100"),
        (1024, 8, 8, "sm_120"),
    ))
]  # fmt: skip
COMPILATIONS += [  # slots of pools
    (f"common/indexer_topk_{name}.cu", {**macros, "OUTPUT": "ToSlots", "POOL": 4}, "sm_90a")
    for name, macros in (
        ("registers", {"THREADS": 1024, "BLOCKS": 8, "READS": 4, "ALIGNED": 1}),
        ("bound", {"THREADS": 1024, "BLOCKS": 1, "READS": 8, "ROUNDS": 1, "ALIGNED": 1}),
        ("stream", {"THREADS": 512, "ALIGNED": 1}),
        ("wide", {"THREADS": 512}),
    )
]
LISTED = {file for file, _, _ in COMPILATIONS}
PLAIN = sorted({path.relative_to(compiler.CSRC).as_posix() for path in compiler.CSRC.rglob("*.cu")} - LISTED)
COMPILATIONS += [
    (file, {}, target)
    for turn, file in enumerate(PLAIN)
    for target in targets_of(file)
    if target != ("sm_86", "sm_89")[turn % 2]
]
