"""Golden stacks of attention layers of GLM and its relatives: requests run through them, results compared."""

import functools
import json

import numpy as np
from seeded_weights import seeded_weights

from cumla.models import LayerCaches, Scratch, SharedSelection, StepBuilder, serving_of
from cumla.models.registry import MODELS, config_from

from .golden import DATA
from .models import PagedRequests
from .stack_steps import Steps

GOLDEN = json.loads((DATA / "family.json").read_text())
AMBIGUOUS = 1e-5  # `gap` below which float32 may choose other tokens than float64
BOUND = 1e-4  # of the largest magnitude


@functools.cache
def golden_arrays():
    with np.load(DATA / "family.npz") as archive:
        return dict(archive)


def hidden_states(case, request):
    record = GOLDEN["stacks"][case]
    shape = len(record["attention_layers"]), sum(record["requests"][request]), record["config"]["hidden_size"]
    generator = np.random.Generator(np.random.PCG64(record["seed"] + 7 + request))
    return generator.standard_normal(shape, dtype=np.float32)


@functools.cache
def weights_of(case):
    """Parameters of a case by name, float32."""
    return seeded_weights(GOLDEN["stacks"][case]["parameters"], GOLDEN["stacks"][case]["seed"])


def weights_of_module(case, number):
    """Weights of a layer's attention by their names within it, and weights that all layers share."""
    prefix = f"model.layers.{number}.self_attn."
    return {
        name.removeprefix(prefix).removeprefix("model."): weight
        for name, weight in weights_of(case).items() if name.startswith(prefix) or "layers" not in name
    }  # fmt: skip


class FamilyStack(Steps):
    """The layers of a golden case with their caches, for all of its requests.

    Attributes:
        picks: by layer that selects, by request: {position: selected tokens}

    `change` has functions of weights by the ends of their names.
    """

    def __init__(
        self, case, cache_format="float32", backend="cpu", activations="float32", seed=0, lab=None, change=None,
        batch_invariant=False,
    ):  # fmt: skip
        record = GOLDEN["stacks"][case]
        self.case, self.numbers = case, record["attention_layers"]
        self.config = config_from(record["config"])
        self.hidden = [hidden_states(case, request) for request in range(len(record["requests"]))]
        longest = max(map(sum, record["requests"]))
        self.put, xp = (np.asarray, np) if lab is None else (lab.put, lab.xp)
        self.serving = serving_of(
            self.config, num_speculative_tokens=3, max_num_batched_tokens=512, max_num_seqs=4, max_model_len=1024,
            num_heads=8, batch_invariant=batch_invariant,
        )  # fmt: skip
        specs, scratch = [self.config.spec(number) for number in self.numbers], Scratch()
        weights = dict(weights_of(case))
        for name, function in (change or {}).items():
            weights |= {whole: function(x) for whole, x in weights.items() if whole.endswith(name)}
        attention = MODELS[record["config"]["model_type"]]
        self.layers = [
            attention(
                self.config, number, weights, activations=activations, cache_format=cache_format,
                max_position=longest, scratch=scratch, batch_invariant=batch_invariant, xp=xp, backend=backend,
            )
            for number in self.numbers
        ]  # fmt: skip
        self.paged = PagedRequests(len(self.hidden), longest, {"window": 64}, seed, put=self.put)
        self.has_rings = any("rings" in spec.groups() for spec in specs)
        self.caches = {}
        for spec in specs:
            owner = None if spec.owns_rows else self.caches[spec.row_source]
            self.caches[spec.layer] = LayerCaches.allocate(
                spec, self.serving, {"rows": self.paged.num_blocks["window"], "rings": len(self.hidden)}, owner=owner,
                cache_format=cache_format, xp=xp,
            )  # fmt: skip
        self.builder = StepBuilder(specs, self.serving, backend)
        self.selection = SharedSelection(specs, self.serving, xp)
        self.picks = {spec.layer: [{} for _ in self.hidden] for spec in specs if spec.selects}

    def step(self, scheduled):
        """Outputs [layers, count, hidden] of each (request, first position, count)."""
        batch, _ = self.paged.batch(scheduled)
        rings = self.put(np.array([r for r, _, _ in scheduled], np.int32)) if self.has_rings else None
        metadata, outputs = self.builder.build(batch, rings=rings), []
        for index, (layer, number) in enumerate(zip(self.layers, self.numbers, strict=True)):
            x = np.concatenate([self.hidden[r][index, first : first + count] for r, first, count in scheduled])
            out = layer.step(self.put(x.astype(layer.activations)), self.caches[number], metadata, self.selection)
            outputs.append(out if isinstance(out, np.ndarray) else out.get())
            if number in self.picks:
                self.keep_picks(number, scheduled)
        splits = batch.query_start_loc_cpu[1:-1]
        return [np.stack(parts) for parts in zip(*(np.split(out, splits) for out in outputs), strict=True)]

    def check(self, request, got):
        """Assert that outputs [layers, tokens, hidden] and selections are transformers'."""
        prefix, arrays = f"{self.case}/{request}", golden_arrays()
        want, rows = arrays[f"{prefix}/out"].astype(np.float64), arrays[f"{prefix}/rows"]
        for index, layer in enumerate(self.layers):
            unclear = np.zeros(got.shape[1], bool)
            if layer.spec.selection_source is not None:
                unclear = arrays[f"{prefix}/gap{layer.spec.selection_source}"] < AMBIGUOUS
            clear = ~unclear[rows]
            assert clear.mean() > 0.9
            error = np.abs(got[index][rows[clear]] - want[index][clear]).max() / np.abs(want[index]).max()
            assert error < BOUND, f"layer {layer.layer}: {error}"
            if layer.layer in self.picks:
                self._check_picks(prefix, layer.layer, self.picks[layer.layer][request], unclear)

    def _check_picks(self, prefix, layer, picks, unclear):
        arrays = golden_arrays()
        for row, want in zip(arrays[f"{prefix}/pick_rows"], arrays[f"{prefix}/picks{layer}"], strict=True):
            if not unclear[row]:
                got = picks[int(row)]
                np.testing.assert_array_equal(got[got >= 0], want[want >= 0], f"layer {layer}, token {row}")


def check_tiny_model(case, kind):
    """Logits and greedy tokens of a tiny whole model are transformers': a prompt in two chunks, then token by token.

    kind: a class of models as in examples/glm.py
    """
    record, arrays = GOLDEN["models"][case], golden_arrays()
    weights, first = seeded_weights(record["parameters"], record["seed"]), record["n_prompt"]
    layers = range(record["config"]["num_hidden_layers"])
    kinds = ["moe" if f"model.layers.{layer}.mlp.gate.weight" in weights else "dense" for layer in layers]
    model = kind(record["config"] | {"mlp_layer_types": kinds}, weights, cache_format="float32")
    tokens = arrays[f"m{case}/tokens"]
    splits = [first // 2, first - first // 2, *[1] * (len(tokens) - first)]
    ends = np.cumsum(splits)
    got = np.concatenate([model.logits(tokens[end - n : end], end - n) for n, end in zip(splits, ends, strict=True)])
    for found, want in (
        (got[first - 1 :], arrays[f"m{case}/logits"]), (got[:first:16], arrays[f"m{case}/prompt_logits"])
    ):  # fmt: skip
        error = found - want.astype(np.float64)
        assert np.sqrt(np.square(error).mean() / np.square(want).mean()) < 1e-4
    np.testing.assert_array_equal(got[first - 1 : -1].argmax(axis=1), tokens[first:])
