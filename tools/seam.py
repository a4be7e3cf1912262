#!/usr/bin/env python3
"""Print a program with which mypy checks every file of every backend against its Protocol (`make types`).

tools/seam.py > FILE && mypy FILE
"""

from cumla.dispatch.backends import BACKENDS
from cumla.kernels.types.operations import FILES

print("from cumla.kernels.types import operations")
for backend in BACKENDS:
    for file, operations in FILES.items():
        name = f"{backend}_{file}"
        print(f"from cumla.kernels.{backend} import {file} as {name}")
        print(f"checked_{name}: operations.{operations.__name__} = {name}")
