"""Carries arrays and streams between frameworks and cumla. Nothing here knows of kernels."""
