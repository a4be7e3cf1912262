"""What is installed, which devices there are, and which backends can run."""

from __future__ import annotations

import argparse
import importlib.metadata
import platform
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .. import __version__
from ..dispatch import backends
from ..errors import InputError
from ..layout import DSV4_BF16, DSV4_FP8, DSV41_FP8, MLA_BF16, V32_FP8, CacheLayout
from ..ops.support import Capability, assumed_capability, shown_capability, supports
from ..terminal import Progress

PACKAGES = (
    "numpy", "ml_dtypes", "numba", "rich", "cupy-cuda12x", "cupy-cuda13x", "numba-cuda", "torch", "jax", "matplotlib",
)  # fmt: skip


HEADS = (16, 32, 64, 128)  # of a rank, by which attention kernels differ


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Print versions, devices and backends; for each backend that cannot run, why, and the line that installs it."
    )
    parser.add_argument("--capability", metavar="X.Y", help="which kernels a device of this compute capability gets")
    parser.set_defaults(run=command)


def command(args: argparse.Namespace) -> int:
    if args.capability is not None:
        return run_capability(Console(), args.capability)
    return run(Console())


def versions() -> dict[str, str]:
    """Python, cumla and those of PACKAGES that are installed; nothing is imported for it."""
    found = {"python": platform.python_version(), "cumla": __version__}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def cuda_versions() -> dict[str, str]:
    """The CUDA driver's version, and of what CuPy uses the runtime's and the compiler's; empty without a device."""
    cupy = _usable_cupy()
    if cupy is None:
        return {}
    return {
        "driver": _cuda_version(cupy.cuda.runtime.driverGetVersion()),
        "runtime": _cuda_version(cupy.cuda.runtime.runtimeGetVersion()),
        "nvrtc": ".".join(str(part) for part in cupy.cuda.nvrtc.getVersion()),
    }


def devices() -> list[dict[str, Any]]:
    """The CUDA devices: name, number of SMs, memory in bytes, compute capability."""
    cupy = _usable_cupy()
    if cupy is None:
        return []
    found = []
    for index in range(cupy.cuda.runtime.getDeviceCount()):
        properties = cupy.cuda.runtime.getDeviceProperties(index)
        found.append(
            {
                "name": properties["name"].decode(),
                "sms": properties["multiProcessorCount"],
                "memory_bytes": properties["totalGlobalMem"],
                "compute_capability": f"{properties['major']}.{properties['minor']}",
            }
        )
    return found


def describe_machine() -> dict[str, Any]:
    """Everything that a file of results should say about where they come from."""
    return {
        "versions": versions(),
        "processor": platform.processor() or platform.machine(),
        "cuda": cuda_versions(),
        "devices": devices(),
    }


def run_capability(console: Console, capability: Capability) -> int:
    """Print what a device of this compute capability gets. Raises InputError for one that is not known."""
    try:
        with assumed_capability(capability) as limits:
            kib = limits.shared_bytes >> 10
            name = shown_capability(limits.capability)
            console.print(f"Compute capability {name}: {kib} KiB of shared memory a CTA", highlight=False)
            table = _new_table("Attention: kernel, heads x keys of a tile", "call", *map(str, HEADS))
            for layout in (DSV4_FP8, V32_FP8, DSV41_FP8, DSV4_BF16, MLA_BF16):
                prefill = not layout.quantized_dim
                name = f"prefill, {layout.head_dim} values" if prefill else f"decode, {layout.name}"
                table.add_row(name, *(_kernel(layout, heads, prefill, capability) for heads in HEADS))
            table.add_row("dense decode, MLA_BF16", *(_dense_kernel(heads, capability) for heads in HEADS))
    except ValueError as error:
        raise InputError(f"--{error}") from None
    console.print(table)
    return 0


def _kernel(layout: CacheLayout, heads: int, prefill: bool, capability: Capability) -> str:
    from ..kernels.cuda.sparse.kernels import portable_size

    if prefill:
        rows = {"q": ((1, heads, layout.head_dim), "bfloat16"), "kv": ((64, layout.head_dim), "bfloat16")}
        name = _asked("sparse_mla_prefill", capability, **rows, indices=((1, 64), "int32"))
    else:
        q, cache = ((1, 1, heads, layout.head_dim), "bfloat16"), ((1, 64, layout.token_bytes), "uint8")
        indices = ((1, 1, 64), "int32")
        name = _asked("sparse_mla_decode", capability, q=q, k_cache=cache, indices=indices, layout=layout)
    if name != "portable":
        return name
    size = portable_size(0, (layout, layout), heads)
    return f"{name} {size.heads} x {size.keys}"


def _dense_kernel(heads: int, capability: Capability) -> str:
    from ..kernels.cuda.dense_attention import portable_tile

    q, cache = ((1, 1, heads, MLA_BF16.head_dim), "bfloat16"), ((1, 64, MLA_BF16.head_dim), "bfloat16")
    lists = {"block_table": ((1, 1), "int32"), "cache_seqlens": ((1,), "int32")}
    name = _asked("dense_mla_decode", capability, q=q, k_cache=cache, **lists)
    return f"{name} {' x '.join(map(str, portable_tile(0)))}" if name == "portable" else name


def _asked(op: str, capability: Capability, **arguments: Any) -> str:
    """The kernel of a call, as `cumla.supports` names it."""
    (kernel,) = supports(op, capability=capability, **arguments).kernels
    return kernel.rpartition("(")[2].rstrip(")")


def run(console: Console) -> int:
    """Print it all."""
    table = _new_table("Versions", "package", "version")
    for package, version in versions().items():
        table.add_row(package, version)
    for part, version in cuda_versions().items():
        table.add_row(f"CUDA {part}", version)
    console.print(table)

    with Progress("looking for devices"):
        found, reasons = devices(), {name: backends.unavailable(name) for name in backends.BACKENDS}
    if found:
        table = _new_table("Devices", "device", "SMs", "memory", "compute capability")
        for device in found:
            memory = f"{device['memory_bytes'] / 2**30:.0f} GiB"
            table.add_row(device["name"], str(device["sms"]), memory, device["compute_capability"])
        console.print(table)
    else:
        console.print("Devices: no CUDA device that CuPy can use", highlight=False)

    table = _new_table("Backends", "backend", "arrays", "available")
    for name, backend in backends.BACKENDS.items():
        reason = reasons[name]
        state = "[green]yes[/green]" if reason is None else f"[yellow]no[/yellow]: {escape(reason)}"
        table.add_row(name, "CUDA" if backend.on_device else "host", state)
    console.print(table)
    return 0


def _new_table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _usable_cupy() -> Any:
    """CuPy where it finds a device, else None."""
    if backends.unavailable("cuda") is not None:
        return None
    import cupy

    return cupy


def _cuda_version(number: int) -> str:
    """13020 as 13.2"""
    return f"{number // 1000}.{number % 1000 // 10}"
