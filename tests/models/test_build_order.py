"""build(0, batch) and build(batch) of every builder are the same."""

import dataclasses

import numpy as np
import pytest

from cumla.metadata import (
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
    DeepseekSparseSWAMetadataBuilder,
    DeepseekV32IndexerMetadataBuilder,
    MLACommonMetadataBuilder,
    MLAConfig,
    ServingConfig,
)
from cumla.models import StepBuilder, config_from

SIZES = {"max_num_seqs": 4, "max_num_batched_tokens": 32, "max_model_len": 512}
V4 = ServingConfig(compress_ratios=(1, 4, 128), **SIZES)
V41 = ServingConfig(compress_ratios=(0, 1, 2), has_c1a=True, **SIZES)
TABLE = np.arange(4, dtype=np.int32).reshape(2, 2)
BATCH = CommonAttentionMetadata.from_lengths([1, 9], [70, 9], TABLE, 64)
COMPRESSED = {"compressed": TABLE}
V4_TABLES = {**COMPRESSED, **{f"states{ratio}": np.zeros((2, 128), np.int32) for ratio in (4, 128)}}
MODEL = {
    "hidden_size": 256, "num_attention_heads": 8, "q_lora_rank": 128, "o_groups": 2, "o_lora_rank": 64,
    "num_hidden_layers": 3,
}  # fmt: skip
SOURCES = {"compress_ratios": [0, 1, 2], "kv_source_layer_ids": [1, 2], "index_source_layer_ids": [1, 2]}
OF_V4 = config_from(MODEL | {"model_type": "deepseek_v4", "compress_ratios": [1, 4, 128]}).specs()
OF_V32 = config_from({**{n: x for n, x in MODEL.items() if n[0] != "o"}, "model_type": "deepseek_v32"}).specs()
OF_V41 = config_from(MODEL | SOURCES | {"model_type": "deepseek_v41"}).specs()
RINGS = np.array([1, 0], np.int32)

# builder, its tables by position and by name
BUILDERS = {
    "window": (DeepseekSparseSWAMetadataBuilder(ServingConfig(**SIZES), "reference"), (), {}),
    "window of C128A": (DeepseekSparseSWAMetadataBuilder(V4, "reference"), (), {"c128a_block_table": TABLE}),
    "indexer": (DeepseekV32IndexerMetadataBuilder(V4, "reference"), (), {"block_table": TABLE}),
    "dense": (MLACommonMetadataBuilder(MLAConfig(**SIZES), "reference"), (), {}),
    "V4": (StepBuilder(OF_V4, V4, "reference"), (V4_TABLES,), {"tables": V4_TABLES}),
    "V3.2": (StepBuilder(OF_V32, ServingConfig(**SIZES), "reference"), (), {}),
    "V4.1": (StepBuilder(OF_V41, V41, "reference"), (COMPRESSED, RINGS), {"tables": COMPRESSED, "rings": RINGS}),
}  # fmt: skip


@pytest.fixture(params=BUILDERS)
def made(request):
    return BUILDERS[request.param]


def arrays_of(value, path=""):
    """(path, array or number) of metadata and of its parts, but for plans and the builds' count."""
    if dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            if field.name not in ("build", "decode_plan") and not field.name.startswith(("_", "tile_sched")):
                yield from arrays_of(getattr(value, field.name), f"{path}.{field.name}")
    elif isinstance(value, (dict, list)):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from arrays_of(item, f"{path}[{key}]")
    else:
        yield path, np.array(value) if isinstance(value, np.ndarray) else value


def calls(builder, tables, by_name):
    names = {"common_prefix_len": 0, "common_attn_metadata": BATCH}
    return {
        "build(0, batch)": lambda: builder.build(0, BATCH, *tables, **({} if tables else by_name)),
        "build(batch)": lambda: builder.build(BATCH, *tables, **({} if tables else by_name)),
        "of a NumPy integer": lambda: builder.build(np.int64(7), BATCH, **by_name),
        "tables by name": lambda: builder.build(BATCH, **by_name),
        "the seed's names": lambda: builder.build(**names, **by_name),
        "fast": lambda: builder.build(**names, fast_build=True, **by_name),
        "a prefix by position": lambda: builder.build(0, common_attn_metadata=BATCH, **by_name),
    }


def test_both_orders_build_the_same(made):
    want = None
    for name, call in calls(*made).items():
        got = list(arrays_of(call()))
        want = want or got
        for (path, value), (_, expected) in zip(got, want, strict=True):
            np.testing.assert_array_equal(value, expected, err_msg=f"{name}: {path}")


def test_the_seeds_call_with_fast_build_by_position(made):
    builder, _, by_name = made
    if isinstance(builder, AttentionMetadataBuilder):
        builder.build(0, BATCH, True, **by_name)


@pytest.mark.parametrize("wrong", [None, 3, "batch", object()])
def test_what_is_no_batch_names_the_argument(made, wrong):
    builder, _, by_name = made
    name = "common_attn_metadata" if isinstance(builder, AttentionMetadataBuilder) else "batch"
    with pytest.raises(TypeError, match=f"^{name}: got "):
        builder.build(0, wrong, **by_name)
    if wrong != 3:
        with pytest.raises(TypeError, match=r"^(batch|common_attn_metadata): got "):
            builder.build(wrong, **by_name)


def test_a_prefix_that_is_none_names_the_argument(made):
    builder, _, by_name = made
    with pytest.raises(TypeError, match=r"^common_prefix_len: got 0\.5 of type float, expected an integer"):
        builder.build(0.5, BATCH, **by_name)
    with pytest.raises(ValueError, match=r"^common_prefix_len: got -1, expected at least 0"):
        builder.build(-1, BATCH, **by_name)


def test_two_batches(made):
    with pytest.raises(TypeError, match=r"^(common_attn_metadata|common_prefix_len): got "):
        made[0].build(BATCH, BATCH, **made[2])
