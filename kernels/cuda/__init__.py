"""The fast path: CuPy launches CUDA C++ from csrc/, which NVRTC compiles at first use.

csrc/ names a file after its op, and puts it in an architecture's folder if it needs that architecture. The sources
include no host headers; `compile.py` writes the layouts' constants from `cumla.layout` as a header.
"""
