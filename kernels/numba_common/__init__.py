"""Shared by both Numba backends: plain functions that each backend compiles for its target."""
