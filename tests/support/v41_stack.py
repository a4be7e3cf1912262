"""Golden stacks of V4.1's attention layers: paged requests run through them, their outputs and choices compared."""

import functools
import json

import ml_dtypes
import numpy as np
from seeded_weights import seeded_weights

import oracles
from cumla.models import (
    DeepseekV41Attention,
    DeepseekV41Config,
    LayerCaches,
    Scratch,
    SharedSelection,
    StepBuilder,
    serving_of,
)

from .golden import DATA
from .models import PagedRequests, relative_rms
from .stack_steps import Steps

GOLDEN = json.loads((DATA / "v41.json").read_text())
AMBIGUOUS = 1e-5  # `gap` below which float32 may choose other rows than float64
SPECULATIVE = 5


@functools.cache
def golden_arrays():
    with np.load(DATA / "v41.npz") as archive:
        return dict(archive)


def hidden_states(case, request):
    config, count = GOLDEN["cases"][case]["config"], sum(GOLDEN["cases"][case]["requests"][request])
    generator = np.random.Generator(np.random.PCG64(GOLDEN["cases"][case]["seed"] + 7 + request))
    return generator.standard_normal((config["num_hidden_layers"], count, config["hidden_size"]), dtype=np.float32)


@functools.cache
def weights_of(case):
    """Parameters of a case by name, float32."""
    return seeded_weights(GOLDEN["cases"][case]["parameters"], GOLDEN["cases"][case]["seed"])


def oracle_of(case, number, longest=2048):
    """A layer of a case in float64."""
    prefix, config = f"layers.{number}.attn.", DeepseekV41Config.from_dict(GOLDEN["cases"][case]["config"])
    within = {name.removeprefix(prefix): x for name, x in weights_of(case).items() if name.startswith(prefix)}
    return oracles.layer_of(config, number, within, longest)


class Stack(Steps):
    """The layers of a golden case with their caches, for all of its requests."""

    def __init__(
        self, case, cache_format="float32", backend="cpu", activations="float32", lab=None, seed=0, pages=(64, 128),
        key_format=None, batch_invariant=False, **options,
    ):  # fmt: skip
        record = GOLDEN["cases"][case]
        self.record, self.config = record, DeepseekV41Config.from_dict(record["config"])
        self.hidden = [hidden_states(case, request) for request in range(len(record["requests"]))]
        longest = max(map(sum, record["requests"]))
        self.put, self.xp = (np.asarray, np) if lab is None else (lab.put, lab.xp)
        weights, scratch = weights_of(case), Scratch()
        self.serving = serving_of(
            self.config, num_speculative_tokens=SPECULATIVE, max_num_batched_tokens=1024, max_num_seqs=4,
            max_model_len=1024, block_size=pages[0], compressed_block_size=pages[1], num_heads=8,
            batch_invariant=batch_invariant,
        )  # fmt: skip
        self.layers = [
            DeepseekV41Attention(
                self.config, layer, weights, activations=activations, cache_format=cache_format, key_format=key_format,
                max_position=longest, scratch=scratch, batch_invariant=batch_invariant, xp=self.xp, backend=backend,
                **options,
            )
            for layer in range(self.config.num_hidden_layers)
        ]  # fmt: skip
        self.paged = PagedRequests(
            len(self.hidden), longest, dict(zip(("window", "compressed"), pages, strict=True)), seed, put=self.put
        )
        blocks, self.caches = self.paged.num_blocks, []
        for layer in range(len(self.layers)):
            source = self.config.kv_source(layer)
            owner = None if source in (None, layer) else self.caches[source]
            self.caches.append(
                LayerCaches.allocate(
                    self.config.spec(layer), self.serving, {**blocks, "rings": len(self.hidden)}, owner=owner,
                    cache_format=cache_format, key_format=key_format, xp=self.xp,
                )
            )  # fmt: skip
        self.builder = StepBuilder(self.config.specs(), self.serving, backend)
        self.selection = SharedSelection(self.config.specs(), self.serving, self.xp)
        self.picks = {layer: [{} for _ in self.hidden] for layer in self.config.index_source_layer_ids}

    def step(self, scheduled):
        """Outputs [layers, count, hidden] of each (request, first position, count)."""
        batch, tables = self.paged.batch(scheduled)
        rings = self.put(np.array([request for request, _, _ in scheduled], np.int32))
        metadata = self.builder.build(batch, tables, rings)
        outputs = []
        for number, (layer, caches) in enumerate(zip(self.layers, self.caches, strict=True)):
            x = np.concatenate([self.hidden[r][number, first : first + count] for r, first, count in scheduled])
            out = layer.step(self.put(x.astype(layer.activations)), caches, metadata, self.selection)
            outputs.append(out if isinstance(out, np.ndarray) else out.get())
            if number in self.picks:
                self.keep_picks(number, scheduled)
        splits = batch.query_start_loc_cpu[1:-1]
        return [np.stack(parts) for parts in zip(*(np.split(out, splits) for out in outputs), strict=True)]


def ambiguous(config, prefix, layer):
    """Tokens whose choice depends on rounding in the layer that selects for this one, or on its candidates."""
    source = config.index_source(layer)
    if source is None:
        return False
    gap = golden_arrays()[f"{prefix}/gap{source}"] < AMBIGUOUS
    if config.reads_candidates(source):
        gap = gap | (golden_arrays()[f"{prefix}/gap{config.candidate_source_layer_id}"] < AMBIGUOUS)
    return gap


def check_outputs(stack, case, request, got, bound):
    prefix = f"{case}/{request}"
    want, rows = golden_arrays()[f"{prefix}/out"].astype(np.float64), golden_arrays()[f"{prefix}/rows"]
    compared = 0
    for layer in range(len(got)):
        unclear = ambiguous(stack.config, prefix, layer)
        kept = ~unclear[rows] if unclear is not False else np.ones(len(rows), bool)
        error = relative_rms(got[layer][rows[kept]], want[layer][kept])
        assert error < bound, f"layer {layer} of {stack.layers[layer].mode}: {error}"
        compared += kept.sum()
    assert compared > 0.8 * len(rows) * len(got)


def check_picks(stack, case, request):
    prefix = f"{case}/{request}"
    for layer, picks in stack.picks.items():
        unclear, compared = ambiguous(stack.config, prefix, layer), 0
        rows = golden_arrays()[f"{prefix}/pick_rows"]
        for row, want in zip(rows, golden_arrays()[f"{prefix}/picks{layer}"], strict=True):
            if unclear[row]:
                continue
            got = picks[request][int(row)]
            np.testing.assert_array_equal(got[got >= 0], want[want >= 0], f"layer {layer}, token {row}")
            compared += 1
        assert compared > 0.8 * len(rows)


class StartedStack:
    """A step of a golden stack, of which the layers before `number` have run."""

    TOKENS = 20

    def __init__(self, number):
        self.stack, self.number = Stack(0, "fp8", activations="bfloat16"), number
        self.stack.step([(1, 0, 5), (0, 0, 9)])
        self.steps = [(1, 5, 1), (0, 9, self.TOKENS - 1)]
        self.given = {
            "hidden_states": self.hidden(number), "layer_caches": self.stack.caches[number],
            "metadata": self.metadata(), "selection": self.stack.selection,
        }  # fmt: skip
        for before in range(number):
            self.run(before, hidden_states=self.hidden(before), layer_caches=self.stack.caches[before])

    def hidden(self, number):
        spans = [self.stack.hidden[r][number, first : first + count] for r, first, count in self.steps]
        return np.concatenate(spans).astype(ml_dtypes.bfloat16)

    def metadata(self, builder=None):
        batch, tables = self.stack.paged.batch(self.steps)
        rings = np.array([request for request, _, _ in self.steps], np.int32)
        return (builder or self.stack.builder).build(batch, tables, rings)

    def run(self, number, **changes):
        return self.stack.layers[number].step(**(self.given | changes))

    def held(self):
        arrays = [x for caches in self.stack.caches for x in vars(caches).values() if x is not None]
        return [x.tobytes() for x in (*arrays, self.stack.selection.topk_indices)]
