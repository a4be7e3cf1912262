"""cumla's operations under torch.compile: no graph breaks, correct mutation marks, the bits of eager calls."""

import subprocess
import sys

import numpy as np
import pytest

import cumla
from cumla.arrays import dlpack
from cumla.interop.ops import OPS
from support import operations

torch = pytest.importorskip("torch")
ops = pytest.importorskip("cumla.interop.torch")

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=DEVICES)
def device(request):
    torch._dynamo.reset()
    return request.param


@pytest.fixture
def compiler(device):
    """Inductor needs a compiler for host code; without one AOTAutograd runs the same graphs."""
    return "aot_eager" if device == "cpu" else "inductor"


def to(device):
    """A function of NumPy arrays that returns tensors with separate memory."""
    return lambda array: dlpack.give(np.array(array), "torch").to(device)


def on_host(tensor):
    """Copied by torch, on whose current stream results are ready: CuPy's current stream may differ."""
    return dlpack.borrow(tensor.detach().cpu())


def tensors(arguments, device):
    put = to(device)
    return {name: put(value) if isinstance(value, np.ndarray) else value for name, value in arguments.items()}


def eager(case, arguments, device):
    writes = OPS[operations.operation(case)].writes
    return [on_host(tensor) for tensor in operations.expected(case, arguments, writes, to(device))]


def assert_same(got, want):
    for ours, expected in zip(got, want, strict=True):
        operations.assert_same_bits(on_host(ours), expected)


@pytest.mark.parametrize("case", operations.CASES)
def test_compiles_without_graph_breaks_to_the_bits_of_an_eager_call(case, device, compiler, rng):
    arguments = operations.CASES[case](rng)
    name = operations.operation(case)
    function = getattr(ops, name)
    given = tensors(arguments, device)
    results = torch.compile(lambda given: function(**given), fullgraph=True, backend=compiler)(given)
    results = () if results is None else results if isinstance(results, tuple) else (results,)
    written = [given[name] for name in OPS[name].writes if given.get(name) is not None]
    assert_same([*results, *written], eager(case, arguments, device))


def with_names(arguments):
    """Arguments with cache formats by name, as operators take them."""
    return {name: getattr(x, "name", x) if "layout" in name else x for name, x in arguments.items()}


@pytest.mark.parametrize("case", operations.CASES)
def test_opcheck(case, device, rng):
    """Mutation marks, fake kernels and autograd registration, by torch's own operator test."""
    name = operations.operation(case)
    given = with_names(tensors(operations.CASES[case](rng), device))
    torch.library.opcheck(getattr(torch.ops.cumla, name).default, (), given)


def test_early_release_is_an_argument_of_operators():
    choose = torch.compile(lambda x: ops.top_k_per_row(x, 2, early_release=False), fullgraph=True, backend="eager")
    assert choose(torch.tensor([[1.0, 3.0, 2.0]])).tolist() == [[1, 2]]


@pytest.mark.parametrize(
    "case", ["sparse_mla_decode-DSV4_FP8-two-caches", "sparse_mla_prefill-512", "compute_swa_indices_and_lens"]
)
def test_given_results_are_written(case, device, compiler, rng):
    arguments = operations.CASES[case](rng)
    op = OPS[operations.operation(case)]
    want = eager(case, arguments, device)
    results = [torch.empty_like(to(device)(array)) for array in want]
    given = dict(zip(op.outputs, results if len(op.outputs) > 1 else [tuple(results)], strict=True))
    call = getattr(ops, op.name)
    function = torch.compile(lambda t, given: call(**t, **given), fullgraph=True, backend=compiler)
    back = function(tensors(arguments, device), given)
    assert_same(results, want)
    assert all(ours.data_ptr() == result.data_ptr() for ours, result in zip(back, results, strict=True))
    raw = with_names(tensors(arguments, device))
    torch.library.opcheck(getattr(torch.ops.cumla, f"{op.name}_out").default, tuple(results), raw)


def test_keys_and_scales_may_be_a_pair(rng):
    arguments = operations.CASES["fp8_mqa_logits"](rng)
    names = ("q", "kv", "kv_scales", "weights", "cu_seqlen_ks", "cu_seqlen_ke")
    q, kv, scales, *rest = (torch.from_numpy(arguments[name]) for name in names)
    got = ops.fp8_mqa_logits(q, (kv, scales), *rest)
    assert operations.same_bits(got.numpy(), ops.fp8_mqa_logits(q, kv, *rest, kv_scales=scales).numpy())


def test_some_results_given_is_an_error(rng):
    given = tensors(operations.CASES["sparse_mla_decode-V32_FP8"](rng), "cpu")
    with pytest.raises(ValueError, match="sparse_mla_decode: got only some of out, lse, expected all or none"):
        ops.sparse_mla_decode(**given, lse=torch.zeros(2, 3, 1))


def decode_step(cache, k, q, selected, table, slots, seq_lens, sink):
    """A C4A layer's step for a batch of decodes: insert, map window and selected rows, attend."""
    requests = seq_lens.shape[0]
    starts = torch.arange(requests + 1, dtype=torch.int32, device=q.device)
    token_to_req, valid = starts[:-1], slots >= 0
    ops.quantize_and_insert_k_cache(k, cache, slots, operations.BLOCK)
    window, window_lens = ops.compute_swa_indices_and_lens(
        starts, seq_lens, token_to_req, valid, table, operations.BLOCK, 3, requests
    )
    rows, row_lens = ops.compute_global_topk_indices_and_lens(selected, token_to_req, table, operations.BLOCK, valid)
    return ops.sparse_mla_decode(
        q[:, None], cache, window[:, None], layout=cumla.DSV4_FP8, topk_length=window_lens, extra_k_cache=cache,
        extra_indices=rows[:, None], extra_topk_length=row_lens, attn_sink=sink,
    )  # fmt: skip


def step_inputs(rng, device, table, seq_lens):
    slots = table[np.arange(3), (seq_lens - 1) // operations.BLOCK] * operations.BLOCK
    slots = (slots + (seq_lens - 1) % operations.BLOCK).astype(np.int64)
    arrays = (
        operations.rows(rng, 3, 512), operations.rows(rng, 3, 2, 512), operations.ints(rng, 2, 3, 4) - 1, table, slots,
        seq_lens.astype(np.int32), rng.standard_normal(2).astype(np.float32),
    )  # fmt: skip
    return [to(device)(array) for array in arrays]


def packed_cache(rng, device):
    """Pages with a larger stride than their tokens' bytes, as in an engine."""
    pages = torch.zeros(operations.BLOCKS, operations.BLOCK * 584 + 240, dtype=torch.uint8)
    cache = pages[:, : operations.BLOCK * 584].view(operations.BLOCKS, operations.BLOCK, 584)
    cache.copy_(torch.from_numpy(operations.fp8_cache(rng, cumla.DSV4_FP8)))
    return pages.to(device)[:, : operations.BLOCK * 584].view(operations.BLOCKS, operations.BLOCK, 584)


def test_a_layers_decode_step_compiled_in_one_graph(device, compiler, rng):
    ours = packed_cache(rng, device)
    theirs = ours.clone()
    compiled = torch.compile(decode_step, fullgraph=True, backend=compiler)
    table, seq_lens = operations.page_table(rng), np.array([2, 5, 1])
    for _ in range(4):
        inputs = step_inputs(rng, device, table, seq_lens)
        out, lse = compiled(ours, *inputs)
        want_out, want_lse = decode_step(theirs, *inputs)
        assert torch.equal(ours, theirs)
        assert torch.equal(out.view(torch.int16), want_out.view(torch.int16))
        assert torch.equal(lse, want_lse)
        seq_lens = seq_lens + 1


def test_shapes_that_change_are_compiled_once(device, compiler, rng):
    """Symbolic shapes reach the fake kernels."""
    cache = to(device)(operations.fp8_cache(rng, cumla.DSV4_FP8))
    counter = pytest.importorskip("torch._dynamo.testing").CompileCounterWithBackend(compiler)
    decode = torch.compile(ops.sparse_mla_decode, fullgraph=True, backend=counter, dynamic=True)
    for batch, topk in ((3, 5), (4, 9), (6, 7)):
        q = to(device)(operations.rows(rng, batch, 1, 2, 512))
        indices = to(device)(operations.ints(rng, 24, batch, 1, topk))
        out, lse = decode(q, cache, indices)
        want_out, want_lse = cumla.sparse_mla_decode(q, cache, indices)
        assert torch.equal(out, want_out)
        assert torch.equal(lse, want_lse)
    assert counter.frame_count == 1


def test_errors_name_the_argument(rng):
    given = tensors(operations.CASES["sparse_mla_decode-V32_FP8"](rng), "cpu")
    given["indices"] = given["indices"][:1]
    with pytest.raises(ValueError, match=r"indices: got shape \(1, 2, 8\), expected \[b, s_q, any\]"):
        ops.sparse_mla_decode(**given)
    with pytest.raises(ValueError, match="layout: got 'DSV5', expected one of DSV4_FP8"):
        torch.ops.cumla.sparse_mla_decode(given["q"], given["k_cache"], given["indices"], layout="DSV5")


@pytest.mark.gpu
def test_torch_captures_a_graph(rng):
    """The step inside torch.cuda.graph, its results in torch's pool; replayed with other lengths and slots."""
    table, seq_lens = operations.page_table(rng), np.array([2, 5, 1])
    ours = packed_cache(rng, "cuda")
    theirs = ours.clone()
    static = step_inputs(rng, "cuda", table, seq_lens)
    decode_step(ours.clone(), *static)  # compiles the kernels
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = decode_step(ours, *static)
    for _ in range(4):
        for mine, new in zip(static, step_inputs(rng, "cuda", rng.permutation(table), seq_lens), strict=True):
            mine.copy_(new)
        graph.replay()
        want_out, want_lse = decode_step(theirs, *static)
        assert torch.equal(ours, theirs)
        assert torch.equal(out, want_out)
        assert torch.equal(lse, want_lse)
        seq_lens = seq_lens + 1


@pytest.mark.gpu
def test_reduce_overhead(rng):
    """Inductor's graphs skip functions that change their inputs: only attention is tested."""
    cache = to("cuda")(operations.fp8_cache(rng, cumla.DSV4_FP8))
    decode = torch.compile(
        lambda q, cache, indices: ops.sparse_mla_decode(q * 1, cache, indices), fullgraph=True, mode="reduce-overhead"
    )
    for _ in range(4):
        q = torch.randn(3, 1, 4, 512, device="cuda", dtype=torch.bfloat16)
        indices = to("cuda")(operations.ints(rng, 24, 3, 1, 9))
        out, lse = (x.clone() for x in decode(q, cache, indices))
        want_out, want_lse = cumla.sparse_mla_decode(q, cache, indices)
        assert torch.equal(out, want_out)
        assert torch.equal(lse, want_lse)


def test_importing_cumla_imports_no_framework():
    code = "import sys, cumla; assert not {'torch', 'jax', 'cupy', 'numba'} & set(sys.modules), sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_that_there_are_no_gradients_is_said(rng):
    given = tensors(operations.CASES["sparse_mla_decode-V32_FP8"](rng), "cpu")
    given["q"].requires_grad_()
    out, _ = ops.sparse_mla_decode(**given)
    with pytest.warns(UserWarning, match="cumla::sparse_mla_decode: an autograd kernel was not registered"):
        out.float().sum().backward()
    assert given["q"].grad is None


ONE_OF_EACH = [next(x for x in operations.CASES if operations.operation(x) == name) for name in OPS]


@pytest.mark.parametrize("case", ONE_OF_EACH)
def test_tensors_without_values_name_the_argument(case, rng):
    """None, tensors on the device "meta" among others, and freed ones: no result is made of them."""
    arguments, op = operations.CASES[case](rng), OPS[operations.operation(case)]
    function = getattr(ops, op.name)
    arrays = [name for name in op.arrays if isinstance(arguments.get(name), np.ndarray)]
    for argument in arrays:
        given = tensors(arguments, "cpu")
        if not op.optional(argument):
            with pytest.raises(TypeError, match=f"^{argument}: got None, expected a tensor"):
                function(**{**given, argument: None})
        if len(arrays) > 1:
            named = arrays[1] if argument == arrays[0] else argument
            with pytest.raises(
                ValueError, match=f"^{named}: got a tensor on (meta|cpu), expected it on (cpu|meta) as "
            ):
                function(**{**given, argument: given[argument].to("meta")})
        if (argument == "scale" and arguments.get("kv_cache_dtype") == "auto") or not given[argument].numel():
            continue
        given[argument] = given[argument].clone()
        given[argument].untyped_storage().resize_(0)
        with pytest.raises(ValueError, match=rf"^({argument}|kv\[\d\] \(\w+\)): got a tensor of .* was resized to 0"):
            function(**given)
    if arrays:
        results = function(**tensors(arguments, "meta"))
        assert all(
            x.device.type == "meta" for x in (results if isinstance(results, tuple) else (results,)) if x is not None
        )


def test_a_batch_by_torch_vmap(rng):
    """torch's fallback calls the operator for each item."""
    q, kv = torch.randn(3, 2, 1, 512), torch.randn(9, 512)
    indices = torch.randint(0, 9, (2, 4), dtype=torch.int32)
    got = torch.vmap(lambda q: ops.sparse_mla_prefill(q, kv, indices)[0])(q)
    want = [cumla.sparse_mla_prefill(item, kv, indices)[0] for item in q]
    assert torch.equal(got, torch.stack(want))
