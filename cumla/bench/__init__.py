"""`cumla bench`: how fast the operations are on this machine, what changed between two runs, and pictures of it."""

NAMES = (  # of the suites
    "insert", "gather", "decode", "prefill", "indexer", "dense",
)  # fmt: skip
LAYOUT_NAMES = (  # of caches
    "DSV4_FP8", "V32_FP8", "DSV41_FP8", "DSV41_FP4", "DSV41_FP8_SPLIT", "DSV41_FP4_SPLIT", "V32_NOPE_FP8",
)  # fmt: skip
