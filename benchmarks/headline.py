"""The chart of README, measured here: cumla and its peers on one GPU.

    python -m benchmarks.headline FOLDER

Writes decode.json, prefill.json and trace_decode.json to the folder, and speed.svg, the chart of these records; prints
the ratios. The peers are installed from benchmarks/peers.txt (benchmarks/Containerfile has all of it); without them a
line says what is missing. Exit status 1 if a part failed.
"""

import argparse
import pathlib
import subprocess
import sys

from cumla.bench import peers

ROOT = pathlib.Path(__file__).resolve().parent.parent
PARTS = {
    "decode.json": "benchmarks.operations decode --only lengths",
    "prefill.json": "benchmarks.operations prefill --only lengths",
    "trace_decode.json": "benchmarks.trace --heads 64 --steps decode8,decode64",
}


def missing() -> list[str]:
    """The peers that cannot be imported."""
    found = {"FlashMLA": peers.module(peers.FLASH_MLA), "DeepGEMM": peers.deep_gemm(), "vLLM": peers.vllm_operations()}
    return [name for name, peer in found.items() if peer is None]


def commands(folder: pathlib.Path) -> list[list[str]]:
    """The command of each part."""
    return [[sys.executable, "-m", *options.split(), "--json", str(folder / file)] for file, options in PARTS.items()]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path, metavar="FOLDER")
    folder = parser.parse_args(argv).folder
    absent = missing()
    if absent:
        print(
            f"headline: got no {', '.join(absent)}, expected the peers of benchmarks/peers.txt on Python 3.12: "
            "pip install -r benchmarks/peers.txt",
            file=sys.stderr,
        )
        return 1
    folder.mkdir(parents=True, exist_ok=True)
    for command in [
        *commands(folder.resolve()),
        [sys.executable, "tools/chart.py", "--records", str(folder.resolve())],
    ]:
        print("$", *command[1:], flush=True)
        if subprocess.run(command, cwd=ROOT).returncode:
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
