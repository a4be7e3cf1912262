#!/usr/bin/env python3
"""List imports between the packages of the project and check that none goes upward.

    tools/imports.py

LAYERS orders the packages from the bottom up; a package may import itself and those before it. Imports inside functions
and module names in strings count, too. Exit status 1 for an upward import, files that import one another in a circle, a
file in no layer, or a tracked file at the root that ROOT_FILES does not name, such as a scratch file.
"""

import ast
import collections
import graphlib
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
LAYERS = (
    "cumla.layout_fields",
    "cumla.layout",
    "cumla.bounds",
    "cumla.errors",
    "cumla.terminal",
    "cumla.arrays",
    "cumla.kernels.types",
    "cumla.kernels.check_results",
    "cumla.kernels.numba_common",
    "cumla.kernels",
    "cumla.timing",
    "cumla.dispatch",
    "cumla.ops",
    "cumla.metadata",
    "cumla.layers",
    "cumla.models",
    "cumla.pages",
    "cumla.parallel",
    "cumla.specs",
    "cumla",
    "cumla.interop",
    "cumla.replay",
    "cumla.bench",
    "cumla.export",
    "cumla.cli",
    "cumla.__main__",
)
ROOT_FILES = {
    ".ci", ".clang-format", ".gitignore", ".pre-commit-config.yaml", "benchmarks", "CHANGELOG.md", "CONTRIBUTING.md",
    "cumla", "cumla_command.py", "docs", "examples", "interop", "kernels", "LICENSE", "Makefile", "mkdocs.yml",
    "pyproject.toml", "README.md", "setup.cfg", "tests", "tools",
}  # fmt: skip


def layer_of(module: str) -> str | None:
    """The layer of a module: the longest prefix in LAYERS, where `cumla` is only its __init__."""
    fitting = [layer for layer in LAYERS if module == layer or (layer != "cumla" and module.startswith(layer + "."))]
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
    """The modules of the package that a module imports, at any depth."""
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
    """Count imports between layers. Returns counts and errors."""
    known, counts, wrong = modules(), collections.Counter(), []
    for module, path in sorted(known.items()):
        layer = layer_of(module)
        if layer is None:
            wrong.append(f"{module} is in no layer")
            continue
        for used in sorted(imports(module, path, known)):
            other = layer_of(used)
            if other is None or other == layer:
                continue
            counts[layer, other] += 1
            if LAYERS.index(other) > LAYERS.index(layer):
                wrong.append(f"{module} ({layer}) uses {used} ({other})")
    return counts, wrong


def circles() -> list[str]:
    """Files that import one another in a circle, also for types only; packages' __init__ files do not count."""
    known = modules()
    files = {module: path for module, path in known.items() if path.stem != "__init__"}
    used = {module: imports(module, path, known) & files.keys() - {module} for module, path in files.items()}
    try:
        graphlib.TopologicalSorter(used).prepare()
    except graphlib.CycleError as error:
        return [f"a circle: {' <- '.join(error.args[1])}"]
    return []


def strays() -> list[str]:
    """Tracked files at the root that ROOT_FILES does not name."""
    if not (ROOT / ".git").exists():
        return []
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    names = {path.split("/")[0] for path in tracked.split("\0") if path}
    return [f"{name} is tracked and is not in ROOT_FILES" for name in sorted(names - ROOT_FILES)]


def main() -> int:
    counts, wrong = arrows()
    wrong += circles() + strays()
    for layer in LAYERS:
        used = [(LAYERS.index(other), other, count) for (user, other), count in counts.items() if user == layer]
        print(f"{layer:28} -> {', '.join(f'{other} {count}' for _, other, count in sorted(used)) or '-'}")
    print(f"{sum(counts.values())} arrows between layers, {len(wrong)} of them upward or astray")
    print(*wrong, sep="\n")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
