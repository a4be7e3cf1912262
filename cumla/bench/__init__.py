"""`cumla bench`: how fast the operations are on this machine, what changed between two runs, and pictures of it."""

NAMES = ("insert", "gather", "decode", "prefill", "indices", "indexer", "dense", "metadata")  # of the suites
