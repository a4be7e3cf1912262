"""The kernel after a call: it may start before the call's results are stored, unless early_release=False."""

import ctypes
import inspect
import pathlib
import re

import numpy as np
import pytest

import cumla
import emulation
from cumla.interop.ops import OPS
from cumla.kernels.cuda.launch import recorded_launches
from cumla.kernels.cuda.ordinary import ordinary_launch
from cumla.layers import SparseMLALayer
from cumla.models import deepseek_v4, deepseek_v32, deepseek_v41, hidden_states
from cumla.parallel import ShardedAttention
from emulation import launches, queues
from support import operations
from support.lab import BF16

pytestmark = pytest.mark.skipif(emulation.unavailable() is not None, reason=str(emulation.unavailable()))

RELEASING = {name for name in OPS if "early_release" in inspect.signature(getattr(cumla, name)).parameters}
DOCS = pathlib.Path(__file__).parent.parent / "docs"

# A kernel of another library, launched to overlap with the kernel ahead of it; it does not wait.
FOLLOWER = """
struct Copy { const unsigned char* from; unsigned char* to; long long bytes; };
extern "C" __global__ void follower(const Copy* copies, int count) {
    for (int c = 0; c < count; ++c)
        for (long long i = threadIdx.x; i < copies[c].bytes; i += blockDim.x) copies[c].to[i] = copies[c].from[i];
}
"""


class Follower:
    """Copies arrays as early as possible: `early_release` decides whether it sees an earlier call's results."""

    def __init__(self, here, arrays):
        arrays = [x for x in arrays if x.nbytes]
        memories = list({x.data.mem.ptr: x.data.mem for x in arrays}.values())
        self.copies = [here.xp.zeros(memory.size, np.uint8) for memory in memories]
        words = [(memory.ptr, copy.data.ptr, memory.size) for memory, copy in zip(memories, self.copies, strict=True)]
        self.here, self.memories, self.table = here, memories, here.put(np.array(words, np.uint64))

    def launch(self):
        arguments = (ctypes.c_uint64 * 2)(self.table.data.ptr, len(self.memories))
        kernel = launches.Kernel(FOLLOWER, "follower", 90)
        kept = arguments, self.table, self.memories, self.copies
        work = launches.Launch(kernel, (1, 1, 1), (32, 1, 1), 0, ctypes.addressof(arguments), kept)
        self.here.xp.cuda.get_current_stream().add(queues.KernelWork(work, overlap=True))

    def saw_results(self):
        queues.finish_everything()
        return all(
            ctypes.string_at(memory.ptr, memory.size) == copy.tobytes()
            for memory, copy in zip(self.memories, self.copies, strict=True)
        )


def on_device(here, value):
    if isinstance(value, list | tuple):
        return operations.rebuilt(value, [on_device(here, x) for x in value])
    return here.put(value) if isinstance(value, np.ndarray) else value


def arrays_in(values):
    found = []
    for value in values:
        found += arrays_in(value) if isinstance(value, list | tuple) else [value] if hasattr(value, "data") else []
    return found


def written_by(example, arguments, results):
    """The arrays that a call has written."""
    op = OPS[example.op]
    results = () if results is None else results if isinstance(results, tuple) else (results,)
    return arrays_in([*results, *(arguments.get(name) for name in op.writes)])


@pytest.mark.parametrize("name", [name for name, x in operations.EXAMPLES.items() if x.op in RELEASING])
@pytest.mark.nowhere(when=lambda x: not operations.is_on("cuda", x.get("name")))
def test_a_kernel_that_does_not_wait_sees_results_after_an_ordinary_launch(here, monkeypatch, name):
    """Also when a call is repeated from the launch cache."""
    monkeypatch.setattr(queues, "MOST_OVERLAPPING", 16)  # more than any call launches
    example = operations.EXAMPLES[name]
    for early_release in (True, False):
        for _ in range(2):
            arguments = {n: on_device(here, x) for n, x in operations.arguments_of(example, 0).items()}
            queues.finish_everything()
            results = example.spec.function(**arguments, early_release=early_release, backend="cuda")
            follower = Follower(here, written_by(example, arguments, results))
            follower.launch()
            assert follower.saw_results() != early_release


def test_in_a_graph(here, rng):
    import cupy

    x, weight = rng.standard_normal((5, 256)).astype(BF16), rng.integers(0, 120, (130, 256)).astype(np.uint8)
    x, weight, scale = here.put(x), here.put(weight), here.put(np.full((2, 2), 0.25, np.float32))
    for early_release in (True, False):
        out = here.put(np.zeros((5, 130), BF16))
        follower, stream = Follower(here, [out]), cupy.cuda.Stream(non_blocking=True)

        def call(out=out, early_release=early_release):
            cumla.fp8_block_linear(x, weight, scale, early_release=early_release, out=out)

        call()
        out.view(np.uint16)[...] = 0
        queues.finish_everything()
        with stream:
            stream.begin_capture()
            call()
            follower.launch()
            graph = stream.end_capture()
        graph.launch(stream)
        assert follower.saw_results() != early_release


def releases(text):
    """Whether a kernel's source, with its macros, lets the next kernel start before its end."""
    for condition in re.findall(r"(?:if \((\w+)\) )?pdl_release\(\);", text.partition("inline void pdl_release")[2]):
        macro = re.search(rf"#define {condition} (\w+)", text) if condition else None
        if macro is None or macro[1] != "0":
            return True
    return False


@pytest.mark.parametrize("name", [name for name, x in operations.EXAMPLES.items() if x.op not in RELEASING])
@pytest.mark.nowhere(when=lambda x: not operations.is_on("cuda", x.get("name")))
def test_other_calls_do_not_release_early(here, name):
    """The last kernel of a call without the argument never lets the next one start before its end."""
    example = operations.EXAMPLES[name]
    arguments = {n: on_device(here, x) for n, x in operations.arguments_of(example, 0).items()}
    with recorded_launches() as found:
        example.spec.function(**arguments, backend="cuda")
    assert not found or not releases(found[-1].kernel.raw.code)


def test_sources_that_release_early_are_of_known_calls():
    """A kernel that is added here may be the last one of a call: then the call takes early_release."""
    sources = pathlib.Path(cumla.__file__).parent / "kernels/cuda/csrc"
    found = {
        str(path.relative_to(sources).parent if path.suffix == ".cuh" else path.relative_to(sources))
        for path in sources.rglob("*.cu*") if "pdl_release();" in path.read_text()
    }  # fmt: skip
    assert found == {
        "common/compressor.cu", "common/dense_decode_merge.cu", "common/indexer_insert.cu",
        "common/indexer_topk_bound.cu", "common/indexer_topk_registers.cu", "common/sparse/exact.cu",
        "sm80/projection.cu", "sm90/decode", "sm90/dense/decode", "sm90/few_heads/prefill.cu",
        "sm90/indexer", "sm90/prefill/prefill.cu", "sm90/projection.cu",
    }  # fmt: skip


STEPS = [
    SparseMLALayer, deepseek_v4.DeepseekV4Attention, deepseek_v32.DeepseekV32Attention,
    deepseek_v41.DeepseekV41Attention, ShardedAttention,
]  # fmt: skip


def test_the_page_names_the_calls():
    text = (DOCS / "interop.md").read_text().partition("## The next kernel")[2].partition("\n## ")[0]
    named = set(re.findall(r"`(\w+)`", text))
    assert named & OPS.keys() == RELEASING
    assert {step.__name__ for step in STEPS} <= named


@pytest.mark.parametrize("step", STEPS)
def test_steps_take_the_argument(step):
    parameter = inspect.signature(step.step).parameters["early_release"]
    assert (parameter.kind, parameter.default) == (parameter.KEYWORD_ONLY, True)


@pytest.mark.parametrize("early_release", [True, False])
def test_steps_of_models_end_in_an_ordinary_launch(here, early_release):
    x = here.put(np.zeros((2, 3), BF16))
    with recorded_launches() as found:
        hidden_states.attend(lambda *_: None, x, (2, 3), x.dtype, None, None, None, early_release)
    assert [launch.kernel.raw.name for launch in found] == ["ordinary_launch"] * (not early_release)


def test_an_ordinary_launch_is_ordinary(here):
    with recorded_launches() as found:
        ordinary_launch()
    assert [launch.overlap for launch in found] == [False]


def test_on_the_host_it_changes_nothing():
    logits = np.array([[1.0, 3.0, 2.0]], np.float32)
    assert (cumla.top_k_per_row(logits, 2, early_release=False) == cumla.top_k_per_row(logits, 2)).all()
    with pytest.raises(TypeError, match="early_release: got 0 of type int, expected True or False"):
        cumla.top_k_per_row(logits, 2, early_release=0)
