"""The kernels, one folder per backend; every folder has the same files with the same functions.

Callers are the checked functions of `cumla`: arrays that arrive here have the right shape, dtype and
device. What is inside them is not trusted: an index out of range is absent, a length is clamped.
"""
