"""The fast path: CuPy launches CUDA C++ from csrc/, which NVRTC compiles at first use.

A file of csrc/ has its op's name, and is in an architecture's folder if it needs that architecture. The sources
include no host headers; `compile.py` writes the layouts' constants from `cumla.layout` as a header.
"""
