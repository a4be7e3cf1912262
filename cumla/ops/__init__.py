"""The public operations, a file for each family. Each checks its arguments once and calls a backend's kernels."""
