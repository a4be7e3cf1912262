"""Shared by both Numba backends: plain functions that each compiles for its own target."""
