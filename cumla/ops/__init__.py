"""The public operations, one file a family. Each operation checks its arguments and calls a backend's kernels."""
