"""The benchmarks behind results/. Each file runs as a script and by `python -m benchmarks.NAME`."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent))  # as in a script: files import each other by name
