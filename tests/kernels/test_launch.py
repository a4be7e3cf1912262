"""Arguments are packed at the offsets that the compiled kernel reads."""

import contextlib
import re
import struct
import threading

import pytest

import cumla
import support.nvrtc
from cumla.kernels.cuda import compile as compiler
from cumla.kernels.cuda.constants import constant
from cumla.kernels.cuda.launch import (
    HEAD,
    PACKING,
    Kernel,
    _codes,
    _LaunchMemory,
    are_recorded,
    packing,
    parameters,
    recorded_launches,
)
from support.nvrtc import compiled, text_of
from support.programs import COMPILATIONS

support.nvrtc.nvrtc()

KERNELS = [
    ("common/window_metadata.cu", "build_sparse_swa", {"SLOT": "int64"}),
    ("common/indexer_metadata.cu", "build_indexer", {}),
    ("common/indexer_metadata.cu", "build_indexer_chunk", {}),
    ("common/advance.cu", "advance_step", {"TOKEN": "int64", "SAMPLED": "int", "POSITION": "int64", "SLOT": "int64"}),
    ("common/dense_gather.cu", "gather_cache", {"UNIT": "uint4"}),
]
WIDTHS = {"u64": 8, "s64": 8, "f64": 8, "u32": 4, "s32": 4, "f32": 4, "u8": 1, "s8": 1, "b8": 1}


def hopper_program(file):
    """The first program of a file for Hopper, which test_compile.py compiles, too: text, macros and machine code."""
    macros = next(macros for other, macros, target in COMPILATIONS if (other, target) == (file, "sm_90a"))
    return text_of(file, macros), macros, compiled(file, macros, "sm_90a")[1]


def parameters_of(file, defines, name):
    """Bytes of each parameter of a kernel, from the compiler."""
    ptx = compiled(file, defines, "compute_90")[1].decode()
    entry = re.search(rf"\.entry {name}\((.*?)\)", ptx, re.DOTALL)[1]
    found = re.findall(r"\.param (?:\.align \d+ )?\.(\w+) \w+(?:\[(\d+)\])?", entry)  # size of a struct
    return [WIDTHS[kind] * int(count or 1) for kind, count in found]


@pytest.mark.parametrize(
    ("file", "name", "defines"), KERNELS, ids=lambda value: value if isinstance(value, str) else ""
)
def test_packing_is_the_compilers(file, name, defines):
    text = text_of(file, defines)
    codes = [_codes(text, defines.get(c_type, c_type)) for c_type in parameters(text, name).values()]
    assert "".join(codes) == packing(text, name, defines).format
    assert [struct.calcsize(code) for code in codes] == parameters_of(file, defines, name)


def parameters_in(program):
    """(offset, bytes) of each parameter of a program's only kernel, and where in their constant bank they begin."""
    entries = re.findall(rb"\x04\x17\x0c\x00(.{12})", program, re.DOTALL)  # EIATTR_KPARAM_INFO
    places = [struct.unpack("<4xHHI", entry) for entry in entries]
    parameters = [(offset, flags >> 18) for _, offset, flags in sorted(places)]
    size = struct.pack("<H", sum(parameters[-1]))  # entry of the bank; without it code may look like an entry
    (bank,) = re.findall(rb"\x04\x0a\x08\x00.{4}(..)" + re.escape(size), program, re.DOTALL)  # EIATTR_PARAM_CBANK
    return parameters, *struct.unpack("<H", bank)


def test_a_tensor_map_has_the_alignment_that_the_device_needs():
    """At a multiple of 64 in the constant bank, at the offset where it is packed."""
    text, macros, program = hopper_program("sm90/dense/decode/decode.cu")
    parameters, start = parameters_in(program)
    codes = packing(text, "mla_decode_sm90", macros).format
    ends = [struct.calcsize(codes[:end]) for end in range(1, len(codes) + 1)]
    at = [end - struct.calcsize(code) for end, code in zip(ends, codes, strict=True)]
    assert [offset for offset, _ in parameters] == [x for i, x in enumerate(at) if not 8 < i < 24]
    assert sum(parameters[-1]) == ends[-1]
    assert parameters[8] == (48, 128)
    assert (start + 48) % 64 == 0


@pytest.mark.parametrize(
    ("folder", "name"), [("prefill", "sparse_mla_prefill"), ("few_heads", "sparse_mla_prefill_few_heads")]
)
def test_the_map_of_queries_has_the_alignment_that_the_device_needs(folder, name):
    text, macros, program = hopper_program(f"sm90/{folder}/prefill.cu")
    parameters, start = parameters_in(program)
    (_, problem_bytes), (at, map_bytes) = parameters
    assert (at, map_bytes) == (problem_bytes, 128)
    assert (start + at) % 64 == 0
    assert packing(text, name, macros).size == at + map_bytes


def test_every_type():
    text = 'extern "C" __global__ void f(const int* a, int64 b, const SLOT c, float d, double e, bool g, uint32 h) {'
    assert packing(text, "f", {"SLOT": "int"}).format == "PqifdbI".replace("b", PACKING["bool"])


def test_a_struct_is_its_members():
    struct_text = "\nstruct Pair {\n    const int* a;\n    int64 b, c;\n    int d, e;\n};\n"
    text = struct_text + 'extern "C" __global__ void f(const __grid_constant__ Pair pair, int last) {'
    assert packing(text, "f", {}).format == "Pqqiii"


def test_arguments_by_name():
    text = (
        '\nstruct Pair {\n    int64 a, b;\n};\nextern "C" __global__ void f(const int* x, Pair pair, VALUE *y, int n) {'
    )
    names = parameters(text, "f")
    assert names == {"x": "*", "pair": "Pair", "y": "*", "n": "int"}
    kernel = Kernel.__new__(Kernel)  # this test needs no device
    kernel._parameters = tuple(names)
    assert kernel.arguments(n=4, y=3, x=1, pair=(7, 8)) == (1, 7, 8, 3, 4)
    with pytest.raises(TypeError, match="m, n: got x, pair, y, m, expected x, pair, y, n"):
        kernel.arguments(x=1, pair=(7, 8), y=3, m=4)


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


def members(struct_name):
    """The names of a struct's members in csrc/common/sparse/work.cuh, in order."""
    text = (compiler.CSRC / "common/sparse/work.cuh").read_text()
    body = re.search(rf"^struct {struct_name} \{{(.*?)^\}};", text, re.MULTILINE | re.DOTALL)[1]
    body = re.sub(r"//[^\n]*", "", body.split("__device__")[0])
    declarations = [line.strip() for line in body.split(";") if line.strip()]
    return [re.findall(r"\w+", name)[-1] for line in declarations for name in re.sub(r"\[\d+\]", "", line).split(",")]


def test_parameters_by_name_are_ordered_as_in_the_struct():
    from cumla.kernels.cuda.sparse.work import PackedSegment, SparseProblem

    assert members("Segment") == list(PackedSegment._fields)
    assert members("SparseProblem") == list(SparseProblem._fields)


def test_launches_are_recorded_still_where_sources_change(emulated, tmp_path):
    """Otherwise a comparison of versions would always run the launch cache's first version."""
    try:
        with recorded_launches():
            compiler.look_first_in(tmp_path)
            assert are_recorded()
    finally:
        compiler.look_first_in()


def test_launches_of_kernels_that_threads_create_at_once_are_recorded(emulated, monkeypatch):
    """Otherwise the launch cache would repeat a call without these launches."""
    import cupy

    both, made = threading.Barrier(2), []

    def use(device):  # a call of the CUDA runtime releases the GIL
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait(0.5)

    monkeypatch.setattr(cupy.cuda.Device, "use", use)
    threads = [
        threading.Thread(target=lambda: made.append(Kernel(OnTwoDevices(), struct.Struct(""), {}))) for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for kernel in made:
        with recorded_launches() as launches:
            kernel((0,), (1,), ())
        assert [launch.kernel for launch in launches] == [kernel]


class OnTwoDevices:
    """A RawKernel, whose attributes apply to the current device."""

    def __init__(self):
        self.current, self.allowed = 0, {}
        self.kernel = self

    @property
    def ptr(self):
        return 100 + self.current

    def __setattr__(self, name, value):
        if name == "max_dynamic_shared_size_bytes":
            self.allowed[self.current] = value
        else:
            super().__setattr__(name, value)


@pytest.mark.usefixtures("emulated")
def test_shared_memory_is_asked_for_on_every_device():
    """Launches on the second GPU of a process were refused by the driver: attributes were set only on the first."""
    raw = OnTwoDevices()
    made = Kernel(raw, struct.Struct(""), {})
    assert made.handle(0) == 100
    made.max_dynamic_shared_size_bytes = 200_000
    assert made.handle(0) == 100
    raw.current = 1
    assert made.handle(1) == 101
    assert raw.allowed == {0: 200_000, 1: 200_000}
    assert made.max_dynamic_shared_size_bytes == 200_000


def test_numbers_that_sources_declare():
    assert constant("common/sparse/work.cuh", "SPLITS_AT") == 2 * 513 + (1 << 14)  # of others
    assert constant("common/sparse/plan.cu", "MAX_RANGES") == 512  # of an included file
    assert constant("sm80/mha_varlen.cu", "QK_STRIDE", QK_DIM=192) == 2 * 192 + 16  # by a function
    sizes = {"LAYOUT": cumla.DSV4_FP8, "KEYS": 32, "STAGES": 3, "CTAS": 1}
    assert constant("sm80/sparse/scores.cuh", "WARPS_N", **sizes, TILE_HEADS=32) == 4  # of conditions
    assert constant("sm80/sparse/scores.cuh", "HEADS", **sizes) == 64  # a macro's default
    longer = {**sizes, "EXTRA_LAYOUT": cumla.V32_FP8}  # of two formats
    assert constant("sm80/sparse/scores.cuh", "LONGER_ROW", **longer) == 656
    for name in ("QUERIES", "NOTHING"):  # of a macro that is not given
        with pytest.raises(KeyError):
            constant("sm90/indexer/work.cuh", name)
