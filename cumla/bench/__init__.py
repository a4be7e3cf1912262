"""`cumla bench`: how fast the operations are on this machine, what changed between two runs, and pictures of it."""

NAMES = (  # of the suites
    "insert", "gather", "decode", "prefill", "indices", "indexer", "dense", "compressor", "norms", "merge", "metadata",
    "layers", "frameworks",
)  # fmt: skip
TRACE = "trace"  # steps of a request trace, which are measured in a way of their own
