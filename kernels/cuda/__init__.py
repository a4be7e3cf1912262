"""The fast path: CuPy launches CUDA C++ from csrc/, which NVRTC compiles at first use.

csrc/ names a file after its op, with the architecture where it is bound to one. The sources include no
host headers; the layouts' numbers reach them as a header that `compile.py` writes from `cumla.layout`.
"""
