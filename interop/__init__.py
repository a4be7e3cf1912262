"""Passes arrays and streams between frameworks and cumla. No module here depends on kernels."""
