"""The peers' chains for whole layers: vLLM's operations from hidden states to the layer's output, in one graph.

DeepGEMM multiplies by FP8 weights, after vLLM's quantisation of the activations. Inserts, indexer logits, top-k,
index maps and attention are vLLM's, DeepGEMM's and FlashMLA's, with lengths where they take them. cumla's operations
replace those that these libraries lack here (or have only as PyTorch's eager operations); `OURS` names them. As in
vLLM, a V4 layer's compressors run on a second stream.

DeepGEMM compiles a kernel for each product in seconds. `Compilers` does so in processes, during other work.
"""

import dataclasses
import functools
import json
import subprocess
import sys

from common import cupy

from cumla.bench import peers
from cumla.ops.compressor import compress_and_insert
from cumla.ops.indexer import fused_indexer_q_rope_quant
from cumla.ops.norm_rope import (
    apply_rope,
    fused_q_kv_rmsnorm,
    indexer_knorm_rope_and_insert,
    inverse_rope_and_quantize,
)

FUNCTIONS = "DeepGEMM and operations of vLLM 0.26, FlashMLA of vLLM 0.33, torch's bfloat16 products"
OURS = {
    "C4A": "low-rank norms, compressors, quantisation of index queries, inverse RoPE with its quantisation",
    "V3.2": "low-rank norms, RoPE, insert of index keys, quantisation of index queries",
}
LATENT, GROUP = 512, 128


class Compilers:
    """Processes that compile DeepGEMM's kernels into its cache.

    Args:
        products: (groups, rows, columns), a process for each
        heads: numbers of heads of indexers, a process for each
        batches: numbers of tokens
    """

    def __init__(self, products, heads, batches):
        jobs = [{"product": product, "batches": batches} for product in products]
        jobs += [{"heads": count, "batches": batches} for count in heads]
        here = [sys.executable, __file__]
        self.processes = [subprocess.Popen([*here, json.dumps(job)], stdout=subprocess.DEVNULL) for job in jobs]

    def wait(self, seconds=60):
        """Wait for the processes. If one fails or is late, the first call of its kernel compiles it."""
        for process in self.processes:
            try:
                process.wait(seconds)
            except subprocess.TimeoutExpired:
                process.kill()


def compile_kernels(job):
    """Compile a job's kernels by calling them with zeros."""
    gemm = peers.deep_gemm()
    if gemm is None:
        return
    for tokens in job["batches"]:
        if "heads" in job:
            call_logits(gemm, tokens, job["heads"])
        else:
            call_product(gemm, tokens, *job["product"])


def call_logits(gemm, tokens, heads):
    import torch

    zeros = functools.partial(torch.zeros, device="cuda")
    lens, page = torch.ones(tokens, 1, dtype=torch.int32, device="cuda"), 64
    schedule = gemm.get_paged_mqa_logits_metadata(lens, page, torch.cuda.get_device_properties(0).multi_processor_count)
    q, keys = zeros(tokens, 1, heads, 128).to(torch.float8_e4m3fn), zeros(1, page, 1, 132, dtype=torch.uint8)
    gemm.fp8_paged_mqa_logits(
        q, keys, zeros(tokens, heads), lens, torch.zeros_like(lens), schedule, 256, clean_logits=False
    )


def call_product(gemm, tokens, groups, rows, columns):
    import torch

    fp8, zeros = torch.float8_e4m3fn, functools.partial(torch.zeros, device="cuda")
    weight = zeros(groups, rows, columns, dtype=torch.uint8).view(fp8), zeros(groups, -(-rows // 128), columns // 128)
    x = zeros(groups, tokens, columns, dtype=torch.uint8).view(fp8)
    out = zeros(tokens, groups, rows, dtype=torch.bfloat16)
    if groups == 1:
        scales = zeros(columns // GROUP, -(-tokens // 4) * 4).t()[:tokens]
        gemm.fp8_gemm_nt((x[0], scales), (weight[0][0], weight[1][0]), out[:, 0])
    else:
        scales = zeros(groups, tokens, columns // GROUP).transpose(0, 1)
        gemm.fp8_einsum("bhr,hdr->bhd", (x.transpose(0, 1), scales), weight, out, recipe=(1, GROUP, GROUP))


class Chain:
    """Code common to both models' chains. Arrays of the layer and its step are shared with torch.

    Attributes:
        step: called without arguments; writes out
        is_ue8m0: whether scales of activations are powers of two, as in cumla; vLLM's scales on Hopper are not
    """

    is_ue8m0 = False

    def __init__(self, layer, caches, metadata, tokens, x, out):
        import torch

        self.torch, self.layer, self.config, self.tokens = torch, layer, layer.config, tokens
        self.arrays, self.tensors = {}, {}
        self.x, self.out = self.tensor(x), self.tensor(out)
        self.caches = {name: self.tensor(array) for name, array in vars(caches).items() if array is not None}
        self.metadata, self.cos_sin = metadata, self.tensor(layer.cos_sin)
        self.indexer = metadata.rows[layer.ratio].indexer.decode
        self.positions = self.tensor(metadata.positions)[: len(x)].long()
        self.gemm, self.ops = peers.deep_gemm(), peers.vllm_operations()
        self.mla, self.maps = peers.module(peers.FLASH_MLA), peers.module(peers.VLLM_CACHE)
        if None in (self.gemm, self.ops, self.mla, self.maps):
            raise ImportError("the peers are not installed: DeepGEMM, vLLM's operations and FlashMLA")
        self.plan, _ = self.mla.get_mla_metadata()
        self.lens = self.tensor(self.indexer.seq_lens)
        self.lens = self.lens if self.lens.ndim == 2 else self.lens[:, None]
        self.index_table = self.tensor(self.indexer.block_table)
        multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
        page = self.caches["indexer"].shape[1]
        self.schedule = self.gemm.get_paged_mqa_logits_metadata(self.lens, page, multiprocessors)
        self.columns = -(-int(self.lens.max()) // 256) * 256
        self.selected = self.empty(len(x), self.config.index_topk, dtype=torch.int32)
        self.index_q = self.empty(len(x), self.config.index_n_heads, 128, dtype=torch.uint8)
        self.index_weights = self.empty(len(x), self.config.index_n_heads, dtype=torch.float32)
        self.workspace = torch.zeros(1 << 20, dtype=torch.uint8, device="cuda")

    def empty(self, *shape, dtype=None):
        return self.torch.empty(shape, dtype=dtype or self.torch.bfloat16, device="cuda")

    def tensor(self, array):
        """An array of the layer or of its metadata as a torch tensor, created once: a capture does not allow it."""
        if id(array) not in self.tensors:
            self.tensors[id(array)] = array, peers.tensor(array)
        return self.tensors[id(array)][1]

    def memory(self, name, *shape, dtype=None):
        """A tensor at the same address in every call."""
        if (name, shape) not in self.arrays:
            self.arrays[name, shape] = self.empty(*shape, dtype=dtype)
        return self.arrays[name, shape]

    def quantized(self, x):
        """Codes and scales of groups of 128 values, in DeepGEMM's layout."""
        torch, (tokens, columns) = self.torch, x.shape
        codes = self.memory("codes", tokens, columns, dtype=torch.float8_e4m3fn)
        padded = self.memory("scales", columns // GROUP, -(-tokens // 4) * 4, dtype=torch.float32)
        scales = padded.t()[:tokens]
        limits = 1e-10, -448.0, 448.0
        self.ops._C.per_token_group_fp8_quant(x, codes, scales, GROUP, *limits, self.is_ue8m0, True, True)
        return codes, scales

    def product(self, quantized, name, weight):
        out = self.memory(name, len(quantized[0]), weight.shape[0])
        self.multiply(quantized, weight, out)
        return out

    def multiply(self, quantized, weight, out):
        codes = self.tensor(weight.codes).view(self.torch.float8_e4m3fn)
        self.gemm.fp8_gemm_nt(quantized, (codes, self.tensor(weight.scales)), out)

    def select(self, projected, weights, rope_first):
        """Slots and number of each token's selected rows."""
        heads = self.config.index_n_heads
        q = projected.view(-1, heads, 128)
        fused_indexer_q_rope_quant(
            self.positions, q, self.cos_sin, weights, rope_first=rope_first, is_neox=rope_first,
            out=(self.index_q, self.index_weights),
        )  # fmt: skip
        logits = self.gemm.fp8_paged_mqa_logits(
            self.index_q.view(self.torch.float8_e4m3fn)[:, None], self.caches["indexer"][:, :, None],
            self.index_weights, self.lens, self.index_table, self.schedule, self.columns, clean_logits=False,
        )  # fmt: skip
        choose = getattr(self.ops._C, peers.top_k_function(len(q)))
        choose(logits, self.lens, self.selected, self.workspace, self.config.index_topk, self.columns)

    def slots(self, table, block_size):
        tokens = self.tokens
        return self.maps.compute_global_topk_indices_and_lens(
            self.selected, self.tensor(tokens.token_to_req_indices), table, block_size,
            self.tensor(tokens.is_valid_token),
        )  # fmt: skip


class V4Chain(Chain):
    """A C4A layer of DeepSeek V4."""

    @staticmethod
    def products(config):
        """Groups, rows and columns of DeepGEMM's products."""
        rank, hidden, groups = config.q_lora_rank, config.hidden_size, config.o_groups
        width = config.num_attention_heads * LATENT
        return [
            (1, rank + LATENT, hidden), (1, width, rank), (1, config.index_n_heads * 128, rank),
            (groups, config.o_lora_rank, width // groups), (1, hidden, groups * config.o_lora_rank),
        ]  # fmt: skip

    def __init__(self, layer, caches, metadata, x, out):
        super().__init__(layer, caches, metadata, metadata.tokens, x, out)
        self.side = self.torch.cuda.Stream()

    def __call__(self):
        layer, config, torch = self.layer, self.config, self.torch
        main, rank = torch.cuda.current_stream(), config.q_lora_rank
        self.side.wait_stream(main)
        with torch.cuda.stream(self.side):
            pooled = torch.mm(self.x, self.tensor(layer.wide).t(), out_dtype=torch.float32)
            self.pool(pooled)
        low = self.product(self.quantized(self.x), "low", layer.low_rank)
        qr, kv = self.memory("qr", len(low), rank), self.memory("kv", len(low), LATENT)
        norms = (self.tensor(weight) for weight in (layer.queries.norm, layer.rows.norm))
        fused_q_kv_rmsnorm(low[:, :rank], low[:, rank:], *norms, config.rms_norm_eps, out=(qr, kv))
        low_rank = self.quantized(qr)
        index_q = self.product(low_rank, "index q", layer.queries.index_q_b)
        projected = self.product(low_rank, "q", layer.queries.q_b).view(len(low), -1, LATENT)
        cache = self.caches["window"]
        q = self.ops._C.fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert(
            projected, kv, cache.view(len(cache), -1), self.tensor(self.tokens.slot_mapping), self.positions,
            self.cos_sin, projected.shape[1], config.rms_norm_eps, cache.shape[1],
        )  # fmt: skip
        main.wait_stream(self.side)
        self.select(index_q, pooled[:, -config.index_n_heads :], False)
        o = self.attend(q)
        low_o = self.memory("low o", len(o), *layer.output.o_a.shape[:2])
        self.multiply_groups(o, low_o)
        self.multiply(self.quantized(low_o.view(len(o), -1)), layer.output.o_b, self.out)
        return self.out

    def multiply_groups(self, o, out):
        """out [T, G, N] from attention's output [T, heads, 512]: inverse RoPE, quantisation, product."""
        torch, fp8, weight = self.torch, self.torch.float8_e4m3fn, self.layer.output.o_a
        groups, _, columns = weight.shape
        values = self.memory("o values", groups, len(o), columns, dtype=torch.uint8)
        scales = self.memory("o scales", groups, len(o), columns // GROUP, dtype=torch.float32)
        made = values, scales
        inverse_rope_and_quantize(o, self.positions, self.cos_sin, groups, is_ue8m0=self.is_ue8m0, out=made)
        self.gemm.fp8_einsum(
            "bhr,hdr->bhd", (values.view(fp8).transpose(0, 1), scales.transpose(0, 1)),
            (self.tensor(weight.codes).view(fp8), self.tensor(weight.scales)), out, recipe=(1, GROUP, GROUP),
        )  # fmt: skip

    def pool(self, pooled):
        layer, caches = self.layer, self.caches
        own, its = layer.pooled.parts
        step = self.metadata.rows[4]
        compress_and_insert(
            pooled[:, : own.columns], *map(self.tensor, (own.position_bias, own.norm_weight)), caches["state"],
            *map(self.tensor, (step.state_slot_mapping, step.state_block_table)), caches["compressed"],
            self.tensor(step.slot_mapping), self.positions, self.tensor(self.tokens.token_to_req_indices),
            self.tensor(self.tokens.query_start_loc), self.cos_sin, compress_ratio=4, eps=self.config.rms_norm_eps,
            layout=layer.layouts.rows, index_kv_score=pooled[:, own.columns : own.columns + its.columns],
            index_position_bias=self.tensor(its.position_bias), index_norm_weight=self.tensor(its.norm_weight),
            index_state_cache=caches["indexer_state"], index_k_cache=caches["indexer"],
        )  # fmt: skip

    def attend(self, q):
        tokens, compressed = self.tokens, self.caches["compressed"]
        table = self.tensor(self.metadata.rows[4].block_table)
        indices, lens = self.slots(table, compressed.shape[1])
        out = self.memory("o", len(q), 1, q.shape[1], LATENT)
        self.mla.flash_mla_with_kvcache(
            q[:, None], self.caches["window"][:, :, None], None, None, LATENT, self.plan, None,
            softmax_scale=LATENT**-0.5, is_fp8_kvcache=True, indices=self.tensor(tokens.decode_swa_indices),
            topk_length=self.tensor(tokens.decode_swa_lens), attn_sink=self.tensor(self.layer.sinks), out=out,
            extra_k_cache=compressed[:, :, None], extra_indices_in_kvcache=indices[:, None], extra_topk_length=lens,
        )  # fmt: skip
        return out[:, 0]


class V32Chain(Chain):
    """A layer of DeepSeek V3.2. W_UK and W_UV are bfloat16, as in vLLM."""

    @staticmethod
    def products(config):
        """Groups, rows and columns of DeepGEMM's products."""
        rank, hidden, heads = config.q_lora_rank, config.hidden_size, config.num_attention_heads
        return [
            (1, rank + LATENT + 64, hidden), (1, 128, hidden), (1, heads * (config.qk_nope_head_dim + 64), rank),
            (1, config.index_n_heads * 128, rank), (1, hidden, heads * config.v_head_dim),
        ]  # fmt: skip

    def __init__(self, layer, caches, metadata, x, out):
        super().__init__(layer, caches, metadata, metadata.tokens, x, out)
        rank, width = layer.config.q_lora_rank, layer.config.num_attention_heads * (layer.config.qk_nope_head_dim + 64)
        low, queries = layer.low_rank, layer.queries.q_b
        parts = low.between(0, rank), low.between(rank + 128, low.shape[0])
        codes, scales = (cupy.concatenate([getattr(part, name) for part in parts]) for name in ("codes", "scales"))
        self.low_rank = dataclasses.replace(low, codes=codes, scales=scales)  # one matrix each, as in vLLM
        self.wk, self.q_b = low.between(rank, rank + 128), queries.between(0, width)
        self.index_q_b = queries.between(width, queries.shape[0])
        dequantized = (weight.dequantized(x.dtype) for weight in (layer.queries.latent, layer.output.value))
        self.latent, self.value = (
            self.tensor(weight).transpose(1, 2) for weight in dequantized
        )  # [h, P, 512], [h, 512, V]

    def __call__(self):
        layer, config, torch = self.layer, self.config, self.torch
        tokens, heads, rank = len(self.x), config.num_attention_heads, config.q_lora_rank
        nope, slots = config.qk_nope_head_dim, self.tensor(self.tokens.slot_mapping)
        hidden = self.quantized(self.x)
        low = self.product(hidden, "low", self.low_rank)
        keys = self.product(hidden, "index keys", self.wk)
        weights = torch.mm(self.x, self.tensor(layer.wide).t(), out_dtype=torch.float32)
        qr, kv = self.memory("qr", tokens, rank), low[:, rank:]
        norms = (self.tensor(weight) for weight in (layer.queries.norm, layer.rows.norm))
        fused_q_kv_rmsnorm(low[:, :rank], kv[:, :LATENT], *norms, 1e-6, out=(qr, kv[:, :LATENT]))
        low_rank = self.quantized(qr)
        projected = self.product(low_rank, "q", self.q_b).view(tokens, heads, -1)
        q = self.memory("absorbed q", tokens, heads, LATENT + 64)
        self.torch.bmm(projected[..., :nope].transpose(0, 1), self.latent, out=q[..., :LATENT].transpose(0, 1))
        apply_rope(projected[..., nope:], self.positions, self.cos_sin, out=q[..., LATENT:])
        apply_rope(kv[:, None], self.positions, self.cos_sin, out=kv[:, None])
        scale = self.memory("scale", 1, dtype=torch.float32)  # not read
        self.ops._C_cache_ops.concat_and_cache_mla(
            kv[:, :LATENT], kv[:, LATENT:], self.caches["rows"], slots, "fp8_ds_mla", scale
        )
        indexer_knorm_rope_and_insert(
            keys, self.tensor(layer.keys.norm), self.tensor(layer.keys.bias), self.caches["indexer"], slots,
            self.positions, self.cos_sin, eps=1e-6, layout=layer.layouts.indexer,
        )  # fmt: skip
        self.select(self.product(low_rank, "index q", self.index_q_b), weights, True)
        o = self.attend(q)
        values = self.memory("values", tokens, heads, config.v_head_dim)
        torch.bmm(o.transpose(0, 1), self.value, out=values.transpose(0, 1))
        self.multiply(self.quantized(values.view(tokens, -1)), layer.output.o, self.out)
        return self.out

    def attend(self, q):
        rows = self.caches["rows"]
        indices, _ = self.slots(self.tensor(self.tokens.block_table), rows.shape[1])
        out = self.memory("o", len(q), 1, q.shape[1], LATENT)
        self.mla.flash_mla_with_kvcache(
            q[:, None], rows[:, :, None], None, None, LATENT, self.plan, None, softmax_scale=self.config.softmax_scale,
            is_fp8_kvcache=True, indices=indices[:, None], out=out,
        )  # fmt: skip
        return out[:, 0]


if __name__ == "__main__":
    compile_kernels(json.loads(sys.argv[1]))
