#!/usr/bin/env python3
"""Which room imports which: arrows from each room of the project to those it uses, and those that run upward.

    tools/rooms.py

Rooms stand in the order of ROOMS, from the cellar to the roof; a room may use those before it and itself. Imports
inside functions count too, and names in strings. Exit status 1 with an arrow that runs upward, a file that is in no
room, or one that git tracks at the root and BESIDE does not name, as a scratch file would be.
"""

from __future__ import annotations

import ast
import collections
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
ROOMS = (
    "cumla._checkout",
    "cumla.layout",
    "cumla.bounds",
    "cumla.arrays",
    "cumla.kernels.types",
    "cumla.kernels.numba_common",
    "cumla.kernels",
    "cumla.dispatch",
    "cumla.ops",
    "cumla.metadata",
    "cumla.layers",
    "cumla.models",
    "cumla.parallel",
    "cumla.checks",
    "cumla",
    "cumla.interop",
    "cumla.replay",
    "cumla.bench",
    "cumla.cli",
    "cumla.__main__",
)
BESIDE = {
    ".ci", ".gitignore", ".pre-commit-config.yaml", "benchmarks", "CHANGELOG.md", "CONTRIBUTING.md", "cumla",
    "cumla_command.py", "docs", "examples", "interop", "kernels", "LICENSE", "Makefile", "mkdocs.yml", "pyproject.toml",
    "README.md", "setup.cfg", "tests", "tools",
}  # fmt: skip


def room_of(module: str) -> str | None:
    """The room that a module is in: the longest name that it begins with, `cumla` being for its __init__ alone."""
    fitting = [room for room in ROOMS if module == room or (room != "cumla" and module.startswith(room + "."))]
    return max(fitting, key=len, default=None)


def modules() -> dict[str, pathlib.Path]:
    """Every module of the package by its name as installed."""
    found = {}
    for folder, name in (("cumla", "cumla"), ("kernels", "cumla.kernels"), ("interop", "cumla.interop")):
        for path in (ROOT / folder).rglob("*.py"):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            found[".".join([name, *parts]).removesuffix(".__init__")] = path
    return found


def imports(module: str, path: pathlib.Path, known: dict[str, pathlib.Path]) -> set[str]:
    """The modules of the package that a module imports, wherever in it."""
    package = module.split(".") if path.stem == "__init__" else module.split(".")[:-1]
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name in known}
        elif isinstance(node, ast.ImportFrom):
            base = ".".join([*package[: len(package) - node.level + 1]] if node.level else [])
            base = ".".join(part for part in (base, node.module) if part)
            names = {f"{base}.{alias.name}" for alias in node.names}
            found |= {name if name in known else base for name in names if name in known or base in known}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and "." in node.value:
            found |= {node.value} & known.keys()  # for importlib
    return found


def arrows() -> tuple[collections.Counter[tuple[str, str]], list[str]]:
    """How many imports there are from room to room, and what is wrong."""
    known, counts, wrong = modules(), collections.Counter(), []
    for module, path in sorted(known.items()):
        room = room_of(module)
        if room is None:
            wrong.append(f"{module} is in no room")
            continue
        for used in sorted(imports(module, path, known)):
            other = room_of(used)
            if other is None or other == room:
                continue
            counts[room, other] += 1
            if ROOMS.index(other) > ROOMS.index(room):
                wrong.append(f"{module} ({room}) uses {used} ({other})")
    return counts, wrong


def strays() -> list[str]:
    """What git tracks at the root that has no business there."""
    if not (ROOT / ".git").exists():
        return []
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    names = {path.split("/")[0] for path in tracked.split("\0") if path}
    return [f"{name} is tracked and is not of BESIDE" for name in sorted(names - BESIDE)]


def main() -> int:
    counts, wrong = arrows()
    wrong += strays()
    for room in ROOMS:
        used = [(ROOMS.index(other), other, count) for (user, other), count in counts.items() if user == room]
        print(f"{room:28} -> {', '.join(f'{other} {count}' for _, other, count in sorted(used)) or '-'}")
    print(f"{sum(counts.values())} arrows between rooms, {len(wrong)} of them upward or astray")
    print(*wrong, sep="\n")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
