#!/usr/bin/env python3
"""Check that two checkouts compile to the same machine code, after a change of names or comments.

    tools/compare_sections.py OLD NEW [--map FILE] [--targets sm_90a,sm_80] [--match sparse]

Compiles the programs of NEW's tests/support/programs.py by NVRTC from both checkouts and compares .text* and
.nv.constant* sections, except .nv.constant4: it lists the addresses of all variables, of which each constexpr is one.
A load of such an address is compared by the variable's name. FILE has a line `old<TAB>new` for each renamed function,
kernel, macro or source file. Prints the sections that differ; exit status 1 if any does. Each checkout compiles in its
own process.
"""

import argparse
import hashlib
import json
import pathlib
import re
import runpy
import struct
import subprocess
import sys

COMPARED = re.compile(r"\.(text|nv\.constant(?!4))")
LOADS_OF_CONSTANTS = (0xAB9, 0xB82)  # opcodes of ULDC and LDC


def sections(cubin: bytes) -> dict[str, str]:
    """A hash of each section of code or constants of a 64-bit ELF file."""
    (start,) = struct.unpack_from("<Q", cubin, 40)
    size, count, names = struct.unpack_from("<3H", cubin, 58)
    headers = [struct.unpack_from("<2I4Q2I2Q", cubin, start + i * size) for i in range(count)]

    def text(of: int, offset: int) -> str:
        at = headers[of][4] + offset
        return cubin[at : cubin.index(b"\0", at)].decode()

    variables: dict[int, str] = {}  # by the offset of their address in .nv.constant4
    for name_at, _, _, _, offset, length, link, *_ in headers:
        if text(names, name_at) == ".rela.nv.constant4":
            for at, info, _ in struct.iter_unpack("<QQq", cubin[offset : offset + length]):
                (name_of,) = struct.unpack_from("<I", cubin, headers[link][4] + 24 * (info >> 32))
                variables[at] = text(headers[link][6], name_of)
    found = {}
    for name_at, _, _, _, offset, length, *_ in headers:
        name = text(names, name_at)
        if COMPARED.match(name):
            content = cubin[offset : offset + length]
            found[name] = hashlib.sha256(named(content, variables) if "text" in name else content).hexdigest()
    return found


def named(code: bytes, variables: dict[int, str]) -> bytes:
    """Machine code with the names of variables in place of the offsets of their addresses in constant bank 4."""
    parts = []
    for low, high in struct.iter_unpack("<QQ", code):
        offset = low >> 40 << 2 & 0xFFFC  # of an address of 8 bytes, or of its upper half
        if low & 0xFFF in LOADS_OF_CONSTANTS and low >> 54 & 31 == 4 and offset & ~7 in variables:
            low &= ~(0x3FFE << 40)
            parts.append(variables[offset & ~7].encode())
        parts.append(struct.pack("<QQ", low, high))
    return b"".join(parts)


def compile_all(programs: list[tuple[str, dict[str, str], str]]) -> dict[str, dict[str, str]]:
    """Sections by program, from the cumla that this process imports."""
    from cuda.bindings import nvrtc

    from cumla.kernels.cuda.compile import OPTIONS, source

    found = {}
    for file, macros, target in programs:
        text = "".join(f"#define {name} {value}\n" for name, value in macros.items()) + source(file)
        options = [*OPTIONS, "--device-as-default-execution-space", "-ftz=true", f"-arch={target}"]
        _, program = nvrtc.nvrtcCreateProgram(text.encode(), file.encode(), 0, None, None)
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
        key = " ".join((file, *(f"{name}={value}" for name, value in macros.items()), target))
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            found[key] = {"does not compile": ""}
            continue
        _, size = nvrtc.nvrtcGetCUBINSize(program)
        cubin = bytearray(size)
        nvrtc.nvrtcGetCUBIN(program, cubin)
        nvrtc.nvrtcDestroyProgram(program)
        found[key] = sections(bytes(cubin))
    return found


def renamed(text: str, names: list[list[str]]) -> str:
    """Replace names in the text; in mangled names also their lengths."""
    for old, new in names:
        text = text.replace(f"{len(old)}{old}", f"{len(new)}{new}")
        text = re.sub(rf"(?<![A-Za-z0-9_]){re.escape(old)}(?![A-Za-z0-9_])", new, text)
    return text


def run_in(root: pathlib.Path, *arguments: str, given: str | None = None) -> subprocess.Popen[str]:
    """Run this file in a process that imports cumla and tests of a checkout."""
    start = (
        "import runpy, sys; sys.path[:0] = sys.argv[1:3]; del sys.argv[:3]; "
        "runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    command = [sys.executable, "-c", start, str(root), str(root / "tests"), __file__, *arguments]
    process = subprocess.Popen(command, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    if given is not None and process.stdin is not None:
        process.stdin.write(given)
    if process.stdin is not None:
        process.stdin.close()
    return process


def answer(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    said = process.stdout.read()
    if process.wait():
        raise SystemExit(f"{process.args}: exit status {process.returncode}")
    return said.splitlines()[-1]


def main() -> None:
    if sys.argv[1:2] == ["--list"]:
        print(json.dumps(runpy.run_path("tests/support/programs.py")["COMPILATIONS"]))
        return
    if sys.argv[1:2] == ["--compile"]:
        print(json.dumps(compile_all(json.load(sys.stdin))))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=pathlib.Path)
    parser.add_argument("new", type=pathlib.Path)
    parser.add_argument("--map", type=pathlib.Path, help="lines old<TAB>new")
    parser.add_argument("--targets", default="sm_90a,sm_80", help="default: sm_90a,sm_80")
    parser.add_argument("--match", default="", help="only files whose path has this in it")
    args = parser.parse_args()
    names = [line.split("\t")[:2] for line in args.map.read_text().splitlines() if line] if args.map else []
    roots = [args.old.resolve(), args.new.resolve()]
    listed = [json.loads(answer(run_in(root, "--list"))) for root in roots]
    wanted = [[p for p in programs if p[2] in args.targets.split(",") and args.match in p[0]] for programs in listed]
    processes = [run_in(root, "--compile", given=json.dumps(p)) for root, p in zip(roots, wanted, strict=True)]
    old, new = (json.loads(answer(process)) for process in processes)
    old = {renamed(key, names): {renamed(name, names): x for name, x in found.items()} for key, found in old.items()}
    differing = 0
    for key in sorted(old.keys() | new.keys()):
        before, after = old.get(key, {}), new.get(key, {})
        for name in sorted(before.keys() | after.keys()):
            if before.get(name) != after.get(name):
                differing += 1
                how = "only in OLD" if name not in after else "only in NEW" if name not in before else "differs"
                print(f"{key}: {name}: {how}")
        if "does not compile" in after:
            differing += 1
            print(f"{key}: does not compile")
    print(f"{len(new)} programs, {sum(map(len, new.values()))} sections, {differing} that differ")
    sys.exit(differing > 0)


if __name__ == "__main__":
    main()
