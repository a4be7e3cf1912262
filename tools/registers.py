#!/usr/bin/env python3
"""Registers, shared memory and spills of a CUDA source of cumla, without a GPU.

    tools/registers.py sm90/decode/decode.cu sm_90a LAYOUT=DSV4_FP8

Compiles csrc/FILE for a target with the macros of its launcher (tests/support/programs.py lists them). Finds lines
that spill in the machine code if CUDA's nvdisasm is on the path; writes the program to --cubin.
"""

import argparse
import collections
import pathlib
import re
import shutil
import subprocess
import tempfile

from cuda.bindings import nvrtc

from cumla.kernels.cuda.compile import OPTIONS, source


def compiled(text: str, file: str, target: str) -> tuple[str, bytes]:
    """The compiler's log and the program, compiled with CuPy's options."""
    options = [*OPTIONS, "--device-as-default-execution-space", "-ftz=true", f"-arch={target}"]
    options += ["--ptxas-options=-v", "-lineinfo"]
    encoded = [option.encode() for option in options]
    _, program = nvrtc.nvrtcCreateProgram(text.encode(), file.encode(), 0, None, None)
    (status,) = nvrtc.nvrtcCompileProgram(program, len(encoded), encoded)
    _, size = nvrtc.nvrtcGetProgramLogSize(program)
    log = bytearray(size)
    nvrtc.nvrtcGetProgramLog(program, log)
    said = log.decode().replace("\0", "").strip()
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise SystemExit(said)
    _, size = nvrtc.nvrtcGetCUBINSize(program)
    cubin = bytearray(size)
    nvrtc.nvrtcGetCUBIN(program, cubin)
    return said, bytes(cubin)


def spills(cubin: pathlib.Path, text: str) -> list[str]:
    """Source lines whose code loads (LDL) or stores (STL) registers in local memory, and the number of instructions."""
    run = subprocess.run(["nvdisasm", "-g", cubin], capture_output=True, text=True, check=True)
    lines, line, found = text.split("\n"), 0, collections.Counter()
    for row in run.stdout.split("\n"):
        at = re.match(r"\s*//## File .*line (\d+)", row)
        line = int(at[1]) if at else line
        access = re.search(r"\b(LDL|STL)\b", row)
        if access:
            found[line, access[1]] += 1
    return [f"{kind} x {count}: {lines[line - 1].strip()}" for (line, kind), count in sorted(found.items())]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", help="a file of kernels/cuda/csrc")
    parser.add_argument("target", nargs="?", default="sm_90", help="such as sm_80 or sm_90a (default: sm_90)")
    parser.add_argument("macros", nargs="*", metavar="NAME=VALUE")
    parser.add_argument("--cubin", type=pathlib.Path, help="write the program to this file")
    args = parser.parse_args()
    text = "".join("#define {} {}\n".format(*macro.split("=", 1)) for macro in args.macros) + source(args.file)
    log, program = compiled(text, args.file, args.target)
    print(log)
    with tempfile.TemporaryDirectory() as folder:
        cubin = args.cubin or pathlib.Path(folder) / "program.cubin"
        cubin.write_bytes(program)
        if shutil.which("nvdisasm"):
            print(*spills(cubin, text), sep="\n")


if __name__ == "__main__":
    main()
