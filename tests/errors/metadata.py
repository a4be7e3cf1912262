"""Invalid batches, configurations and arguments of metadata builders."""

import dataclasses
from types import SimpleNamespace

import numpy as np
from metadata.batches import make_batch

from cumla.metadata import (
    CommonAttentionMetadata,
    DeepseekSparseSWAMetadataBuilder,
    DeepseekV32IndexerMetadataBuilder,
    MLACommonMetadata,
    MLACommonMetadataBuilder,
    MLACommonState,
    MLAConfig,
    SequenceGroup,
    ServingConfig,
)
from support.lab import Lab
from support.refused import EITHER, Call, From, T, V, With

from .attention import NONSENSE

HOST = Lab("reference", on_device=False)
CONFIG = ServingConfig(
    block_size=8, compressed_block_size=128, num_speculative_tokens=1, max_num_batched_tokens=32, max_num_seqs=4,
    max_model_len=64,
)  # fmt: skip
BUILDERS = {"window": DeepseekSparseSWAMetadataBuilder, "indexer": DeepseekV32IndexerMetadataBuilder}
ALL_BUILDERS = BUILDERS | {"dense": MLACommonMetadataBuilder}


def i32(*numbers):
    return np.array(numbers, np.int32)


def build(builder):
    """Three requests with 2, 1 and 5 query tokens of 20, 1 and 30."""
    is_dense = builder is MLACommonMetadataBuilder
    built = builder(MLAConfig(**vars(CONFIG)) if is_dense else CONFIG, backend="reference")
    arguments = {"common_prefix_len": 0, "common_attn_metadata": make_batch(HOST, [20, 1, 30], [2, 1, 5])}
    return Call(built.build, arguments, writes=(vars(built),), creates=is_dense)


def build_with_table(builder, ratio, name):
    """Requests of 256 and 259 or 383 tokens, whose complete rows fit into two columns."""
    config = dataclasses.replace(CONFIG, compress_ratios=(ratio,), max_model_len=600)
    built = builder(config, backend="reference")
    batch = make_batch(HOST, [256, 384 - 1 if ratio == 128 else 259], [1, 1])
    arguments = {"common_prefix_len": 0, "common_attn_metadata": batch, name: np.zeros((2, 2), np.int32)}
    return Call(built.build, arguments, writes=(vars(built),))


def batch_itself():
    return Call(CommonAttentionMetadata, vars(make_batch(HOST, [9, 16], [1, 5])) | {"max_seq_len": -1}, creates=True)


LONG = make_batch(HOST, [256, 384], [1, 1])
# The names are those of the fields that contradict one another.
BATCHES = [
    *(("common_attn_metadata", With(**changes), V, text) for changes, text in (
        ({"query_start_loc_cpu": i32(0, 3, 2, 8)},
         "query_start_loc_cpu: request 1 goes from 3 to 2, expected starts that do not decrease"),
        ({"query_start_loc_cpu": i32(1, 2, 3, 8)},
         "query_start_loc_cpu: got 1 to 8, expected 0 to at most num_actual_tokens = 8"),
        ({"num_actual_tokens": 7}, "query_start_loc_cpu: got 0 to 8, expected 0 to at most num_actual_tokens = 7"),
        ({"seq_lens_cpu": i32(20, 0, 30)},
         "seq_lens_cpu: request 1 has 0 tokens, expected at least the 1 of its query"),
        ({"seq_lens_cpu": i32(20, 65, 30), "max_seq_len": 65, "block_table_tensor": np.zeros((3, 9), np.int32)},
         "seq_lens_cpu: request 1 has 65 tokens, expected at most max_model_len = 64"),
        ({"seq_lens_cpu": i32(20, 1, 33), "max_seq_len": 33},
         "block_table_tensor: request 2 has 33 tokens, but 4 columns of 8 cover 32"),
        ({"max_seq_len": 29}, "max_seq_len: got 29, but request 2 has 30 tokens"),
        ({"max_query_len": 4}, "max_query_len: got 4, but request 2 has 5 query tokens"),
        ({"num_computed_tokens_cpu": i32(18, 0, 24)},
         "num_computed_tokens_cpu: request 2 has 24, expected 30 tokens without the 5 of its query"),
        ({"query_start_loc_cpu": i32(0, 2**31 - 1, -(2**31), 8), "max_query_len": 2**31 - 1},
         "seq_lens_cpu: request 0 has 20 tokens, expected at least the 2147483647 of its query"),
        ({"query_start_loc_cpu": i32(0, 2, 7, 8), "seq_lens_cpu": i32(20, 30, 1)},
         r"query_start_loc_cpu: request 2 with 1 query tokens follows a prefill, expected decodes \(at most 2 tokens\)"
         " first"),
        ({"seq_lens_cpu": i32(20, 1)},
         r"query_start_loc_cpu, seq_lens_cpu: got shapes \(4,\) and \(2,\), expected \(4,\) and \(3,\)"),
        ({"seq_lens": i32(20, 1)}, r"seq_lens: got shape \(2,\), expected \[3\]"),
        ({"num_reqs": np.int64(3), "seq_lens": i32(20)}, r"seq_lens: got shape \(1,\), expected \[3\]"),
        ({"block_table_tensor": np.zeros((2, 4), np.int32)},
         r"block_table_tensor: got shape \(2, 4\), expected \[3, any\]"),
        *(({"slot_mapping": np.zeros(slots, np.int64)},
           f"slot_mapping: got {slots} entries, expected num_actual_tokens = 8 to max_num_batched_tokens = 32")
          for slots in (7, 33)),
    )),
    ("common_attn_metadata", make_batch(HOST, [9, 0, 4], [5, 0, 1]), V,
     "query_start_loc_cpu: request 2 with 1 query tokens follows a prefill"),
    ("common_attn_metadata.slot_mapping", [1] * 8, T, "slot_mapping: got list, expected an array"),
    ("common_attn_metadata.seq_lens", np.array([20, 1, 30]), T, "seq_lens: got dtype int64, expected int32"),
    ("", With(common_attn_metadata=make_batch(HOST, [3] * 5, [1] * 5), validate=False), V,
     "num_reqs: got 5, expected 0 to max_num_seqs = 4"),
    ("", With(common_attn_metadata=make_batch(HOST, [33], [33]), validate=False), V,
     "num_actual_tokens: got 33, expected 0 to max_num_batched_tokens = 32"),
]  # fmt: skip

NOT_NUMBERS = {
    "compress_ratios", "has_c1a", "noncausal_decodes", "batch_invariant", "chunked_prefill_enabled",
    "enable_prefix_caching", "dtype",
}  # fmt: skip
# Every number of a configuration has limits: one that is added, too.
NUMBERS = sorted({field.name for field in dataclasses.fields(MLAConfig)} - NOT_NUMBERS)
CONFIGS = [
    ("window_size", 0, V, "window_size: got 0, expected at least 1"),
    ("num_sms", 1.5, T, "num_sms: got 1.5 of type float, expected an integer"),
    ("num_speculative_tokens", -1, V, "num_speculative_tokens: got -1, expected at least 0"),
    ("num_speculative_tokens", 2**31 - 1, V, "num_speculative_tokens: got 2147483647, expected at most"),
    ("max_logits_bytes", 0, V, "max_logits_bytes: got 0, expected at least 1"),
    ("max_logits_bytes", 2**63, V, f"max_logits_bytes: got {2**63}, expected at most {2**63 - 1}"),
    ("block_size", 2**29, V, "block_size: got 536870912, expected at most 536870911"),
    ("compressed_block_size", 2**40, V, "compressed_block_size: got 1099511627776, expected at most"),
    ("max_model_len", 2**31, V, "max_model_len: got 2147483648, expected at most 2147483647"),
    ("num_heads", 200, V, "num_heads: got 200, expected at most 128"),
    ("num_heads", 0, V, "num_heads: got 0, expected at least 1"),
    ("index_topk", 0, V, "index_topk: got 0, expected at least 1"),
    ("compress_ratios", (3,), V, "compress_ratios: got 3, expected 0, 1, 2, 4 or 128"),
    ("compress_ratios", (), V, "compress_ratios: got no layers, expected at least one"),
    ("", With(compress_ratios=(128,), compressed_block_size=64), V,
     "compressed_block_size: got 64, expected a multiple of 128"),
    *(("block_size", wrong, T, "block_size: got ") for wrong in (True, 1.5, None, "8")),
    *(("compress_ratios", (1, wrong), T, "compress_ratios: got ") for wrong in (True, 1.5, None, "8")),
]  # fmt: skip


# ---- dense metadata: steps, graph buffers and sequence groups

DENSE = MLAConfig(block_size=8, max_num_batched_tokens=64, max_num_seqs=4, max_model_len=64)
LIKE = np.zeros(1, np.int64)


def decodes(number=2):
    return MLACommonMetadataBuilder(DENSE).build(0, make_batch(HOST, [5, 9, 3, 4][:number], [1] * number))


def advance():
    arguments = {
        "self": decodes(), "sampled_token_ids": np.array([1, 2]), "block_size": 8, "num_seqs": 2, "num_queries": 2,
        "model_input": SimpleNamespace(input_tokens=np.full(2, 7), input_positions=np.full(2, 7)),
    }  # fmt: skip
    return Call(MLACommonMetadata.advance_step, arguments)


def capture(max_batch_size, like):
    with MLACommonState(DENSE).graph_capture(max_batch_size, like):
        pass


def of_a_capture(name):
    """A call while graphs are captured."""

    def called(batch_size):
        state = MLACommonState(DENSE)
        with state.graph_capture(4, LIKE):
            getattr(state, name)(batch_size)

    return Call(called, {"batch_size": 2}, creates=True)


def prepare(number):
    """Decodes for a graph that was captured with three."""
    state = MLACommonState(DENSE)
    with state.graph_capture(3, LIKE):
        buffers = state.get_graph_input_buffers(state.graph_capture_get_metadata_for_batch(3))
    return Call(state.prepare_graph_input_buffers, {"input_buffers": buffers, "attn_metadata": decodes(number)})


def group():
    """A sequence group, and the metadata of a batch of it alone."""

    def build(**fields):
        built(SequenceGroup(**fields))

    arguments = {
        "is_prompt": True, "seq_ids": [0], "orig_seq_lens": [5], "query_lens": [5], "context_lens": [0],
        "block_tables": {0: [3]},
    }  # fmt: skip
    return Call(build, arguments, creates=True)


def built(group):
    builder = MLACommonMetadataBuilder(DENSE)
    builder.add_seq_group(group)
    return builder.build_groups(LIKE)


def groups(call, **arguments):
    builder = MLACommonMetadataBuilder(DENSE)
    return Call(getattr(builder, call), arguments, creates=True)


NO_SIZES = (None, -1, 1.5, True, "4", 10**20)

CALLS = {
    **{f"{builder.__name__}.build": lambda builder=builder: build(builder) for builder in ALL_BUILDERS.values()},
    "DeepseekSparseSWAMetadataBuilder.build-c128a": lambda: build_with_table(
        DeepseekSparseSWAMetadataBuilder, 128, "c128a_block_table"
    ),
    "DeepseekV32IndexerMetadataBuilder.build-c4a": lambda: build_with_table(
        DeepseekV32IndexerMetadataBuilder, 4, "block_table"
    ),
    **{builder.__name__: lambda builder=builder: Call(builder, {"config": MLAConfig()}, creates=True)
       for builder in ALL_BUILDERS.values()},
    "CommonAttentionMetadata": batch_itself,
    "ServingConfig": lambda: Call(ServingConfig, {}, creates=True),
    "MLAConfig": lambda: Call(MLAConfig, {}, creates=True),
    "MLACommonMetadata.advance_step": advance,
    "MLACommonState.graph_capture": lambda: Call(capture, {"max_batch_size": 4, "like": LIKE}, creates=True),
    **{f"MLACommonState.{name}": lambda name=name: of_a_capture(name)
       for name in ("graph_capture_get_metadata_for_batch", "graph_clone")},
    "MLACommonState.prepare_graph_input_buffers-3": lambda: prepare(3),
    "MLACommonState.prepare_graph_input_buffers-2": lambda: prepare(2),
    "SequenceGroup": group,
    "MLACommonMetadataBuilder.add_seq_group": lambda: groups("add_seq_group", group=SequenceGroup(**group().arguments)),
    "MLACommonMetadataBuilder.build_groups": lambda: groups("build_groups", like=LIKE, cuda_graph_pad_size=-1),
}  # fmt: skip
WRONG = {
    **{f"{builder.__name__}.build": BATCHES for builder in BUILDERS.values()},
    "DeepseekSparseSWAMetadataBuilder.build-c128a": [
        ("c128a_block_table", None, V, "c128a_block_table: got None, expected a block table for the C128A layers"),
        ("common_attn_metadata", LONG, V,
         "c128a_block_table: request 1 has 384 tokens, but 2 columns of 128 cover 256"),
    ],
    "DeepseekV32IndexerMetadataBuilder.build-c4a": [
        ("common_attn_metadata", LONG, V, "block_table: request 1 has 384 tokens, but 2 columns of 128 cover 256"),
    ],
    **{builder.__name__: [
        ("config", None, T, None), ("config", {}, T, None), ("config", From(lambda _: MLAConfig), T, None),
        ("backend", "cobol", V, "backend: got 'cobol', expected 'reference', 'cpu'"),
    ] for builder in ALL_BUILDERS.values()},
    "CommonAttentionMetadata": [
        ("seq_lens_cpu", wrong, EITHER, None)
        for wrong in (np.array([None]), np.zeros(2), np.array([20.0, 1.0, 30.0]), np.zeros((), np.int32))
    ],
    "ServingConfig": CONFIGS,
    "MLAConfig": [
        *CONFIGS,
        *((name, wrong, EITHER, None) for name in NUMBERS for wrong in (-1, 2**63, 0.5, "1", True, float("nan"))),
        *((name, 0, V, None) for name in NUMBERS if name != "num_speculative_tokens"),
    ],
    "MLACommonMetadata.advance_step": [
        ("self.seq_lens", [5, 9, 3], V, "num_seqs: got 2, expected 2, the requests of this metadata"),
        ("num_seqs", None, T, None), ("num_seqs", 2.0, T, None), ("num_seqs", True, T, None),
        ("num_queries", None, T, None), ("turn_prefills_into_decodes", 1, T, None),
        ("model_input", None, T, "model_input: got None, expected an object with input_tokens"),
        ("model_input", SimpleNamespace(input_tokens=LIKE), T, "model_input: got .*expected an object with input_posi"),
    ],
    "MLACommonState.graph_capture": [("max_batch_size", wrong, EITHER, None) for wrong in NO_SIZES],
    **{f"MLACommonState.{name}": [("batch_size", wrong, EITHER, None) for wrong in NO_SIZES]
       for name in ("graph_capture_get_metadata_for_batch", "graph_clone")},
    "MLACommonState.prepare_graph_input_buffers-3": [
        (f"input_buffers.{name}", wrong, EITHER, rf".*{name}('\])?: {text}") for name, wrong, text in (
            ("slot_mapping", np.zeros((3, 1), np.int64), "got shape"),
            ("slot_mapping", np.zeros(3), "got dtype float64"),
            ("seq_lens_tensor", np.zeros(3, np.int8), "got dtype"),
            ("seq_lens_tensor", np.zeros(2, np.int32), "got 3"),
            ("block_tables", np.zeros(3, np.int32), "got shape"),
            ("block_tables", np.zeros((2, 8), np.int32), "got shape"),
            ("block_tables", np.zeros((3, 8), np.float32), "got dtype float32"),
            ("block_tables", None, "got NoneType"),
        )
    ],
    "MLACommonState.prepare_graph_input_buffers-2": [
        ("input_buffers", None, T, "input_buffers: got None"),
        ("input_buffers", {}, V, "input_buffers: got no slot_mapping"),
        ("attn_metadata", None, T, "attn_metadata: got None"),
        ("attn_metadata.slot_mapping", np.zeros((2, 1), np.int64), V,
         r"slot_mapping: got int64 of shape \(2, 1\), expected the graph's"),
        ("attn_metadata.slot_mapping", np.zeros(2), V,
         r"slot_mapping: got float64 of shape \(2,\), expected the graph's"),
        ("attn_metadata.seq_lens_tensor", np.ones(2, bool), V, r"seq_lens_tensor: got bool of shape \(2,\)"),
        ("attn_metadata.block_tables", np.zeros(2, np.int32), V, r"block_tables: got int32 of shape \(2,\)"),
        ("attn_metadata.block_tables", np.zeros((2, 8)), V, r"block_tables: got float64 of shape \(2, 8\)"),
    ],
    "SequenceGroup": [
        ("is_prompt", "no", T, "is_prompt: got 'no'"),
        ("orig_seq_lens", None, T, "orig_seq_lens: got None"),
        *(("", With(orig_seq_lens=[wrong], query_lens=[wrong]), EITHER, f"orig_seq_lens: got {wrong}")
          for wrong in (-5, 5.5, 2**40)),
        ("seq_lens", [None], T, "seq_lens: got None"),
        ("curr_sliding_window_blocks", [-1], V, ".*blocks: got -1"),
        *(("block_tables", {0: wrong}, EITHER, f"block_tables: got {text}") for wrong, text in (
            ([2**40], r"\[1099511627776\]"), ([3, -(2**40)], r"\[3, -1099511627776\]"),
            ([3.7], r"\[3.7\], expected integers"), (None, "None"), ([[3]], ""),
        )),
    ],
    "MLACommonMetadataBuilder.add_seq_group": [("group", None, T, "group: got None")],
    "MLACommonMetadataBuilder.build_groups": [
        ("cuda_graph_pad_size", wrong, EITHER, None) for wrong in (-2, None, True, 1.5)
    ],
}  # fmt: skip
for name in ALL_BUILDERS.values():
    rows = [("common_attn_metadata", wrong, T, None) for wrong in (None, *NONSENSE)]
    WRONG[f"{name.__name__}.build"] = [*WRONG.get(f"{name.__name__}.build", []), *rows]
WRONG["MLACommonMetadataBuilder"] = [*WRONG["MLACommonMetadataBuilder"], ("config", ServingConfig(), T, None)]
