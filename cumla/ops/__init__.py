"""The public operations, a file for each family. Each operation checks its arguments and calls a backend's kernels."""
