"""Arguments are packed where the compiled kernel looks for them."""

import re
import struct

import pytest

from cumla.kernels.cuda import compile as compiler
from cumla.kernels.cuda.launch import HEAD, PACKING, _LaunchMemory, packing

nvrtc = pytest.importorskip("cuda.bindings.nvrtc")

KERNELS = [
    ("step.cu", "build_sparse_swa", {"SLOT": "int64"}),
    ("indexer_step.cu", "build_indexer_decode", {}),
    ("indexer_step.cu", "build_indexer_chunk", {}),
    ("advance.cu", "advance_step", {"TOKEN": "int64", "SAMPLED": "int", "POSITION": "int64", "SLOT": "int64"}),
    ("mla_gather.cu", "gather_cache", {"UNIT": "uint4"}),
]
WIDTHS = {"u64": 8, "s64": 8, "f64": 8, "u32": 4, "s32": 4, "f32": 4, "u8": 1, "s8": 1, "b8": 1}


def parameters_of(text, name):
    """Bytes of each parameter of a kernel, as the compiler has them."""
    options = [*compiler.OPTIONS, "--device-as-default-execution-space", "-arch=compute_90"]
    _, program = nvrtc.nvrtcCreateProgram(text.encode(), b"kernel.cu", 0, None, None)
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
    assert status == nvrtc.nvrtcResult.NVRTC_SUCCESS
    _, size = nvrtc.nvrtcGetPTXSize(program)
    ptx = b" " * size
    nvrtc.nvrtcGetPTX(program, ptx)
    nvrtc.nvrtcDestroyProgram(program)
    entry = re.search(rf"\.entry {name}\((.*?)\)", ptx.decode(), re.DOTALL)[1]
    return [WIDTHS[kind] for kind in re.findall(r"\.param \.(\w+)", entry)]


@pytest.mark.parametrize(
    ("file", "name", "defines"), KERNELS, ids=lambda value: value if isinstance(value, str) else ""
)
def test_packing_is_the_compilers(file, name, defines):
    text = "".join(f"#define {macro} {value}\n" for macro, value in defines.items()) + compiler.source(file)
    codes = packing(text, name, defines).format
    assert [struct.calcsize(code) for code in codes] == parameters_of(text, name)


def test_every_type():
    text = 'extern "C" __global__ void f(const int* a, int64 b, const SLOT c, float d, double e, bool g, uint32 h) {'
    assert packing(text, "f", {"SLOT": "int"}).format == "PqifdbI".replace("b", PACKING["bool"])


def test_a_struct_is_its_members():
    struct_text = "\nstruct Pair {\n    const int* a;\n    int64 b, c;\n    int d, e;\n};\n"
    text = struct_text + 'extern "C" __global__ void f(const __grid_constant__ Pair pair, int last) {'
    assert packing(text, "f", {}).format == "Pqqiii"


def test_what_is_not_there():
    text = 'extern "C" __global__ void f(const Problem problem, int a) {'
    with pytest.raises(ValueError, match="Problem: unknown type"):
        packing(text, "f", {})
    with pytest.raises(ValueError, match="g: no such kernel"):
        packing(text, "g", {})


def test_what_the_driver_reads():
    """Offsets of CUlaunchConfig and CUlaunchAttribute in cuda.h."""
    at = {name: getattr(_LaunchMemory, name).offset for name, _ in _LaunchMemory._fields_}
    assert [at[name] for name in ("grid", "block", "shared_bytes", "stream", "attributes", "num_attributes")] == [
        0, 12, 24, 32, 40, 48,
    ]  # fmt: skip
    assert at["attribute_value"] - at["attribute_id"] == 8
    assert at["extra"] - at["attribute_id"] == 72
    assert HEAD.size == at["argument_bytes"] + 8
    assert at["arguments"] % 16 == 0
