"""Batch-invariant layers: a token's output has the same bits in any schedule of its request, and beside any others."""

from dataclasses import replace

import numpy as np
import pytest

import cumla
from support.family_stack import FamilyStack
from support.lab import Lab
from support.models import GoldenLayer, V4Layer, V32Layer
from support.operations import assert_same_bits
from support.v41_stack import Stack

HOST = Lab("cpu", on_device=False)
DRAFTS = 2
FP8 = {"cache_format": "fp8", "activations": "bfloat16"}


class Alone:
    """One golden layer of V4 or V3.2; all requests have the golden hidden states."""

    def __init__(self, case, batch_invariant=True, **options):
        golden = GoldenLayer(case)
        make = V4Layer if golden.record["model"] == "v4" else V32Layer
        self.made = make(golden, 2, speculative=DRAFTS, batch_invariant=batch_invariant, **options)
        self.lengths = 2 * [min(golden.tokens, 150)]

    def step(self, scheduled):
        return self.made.step(scheduled, given=False)


class Stacked:
    """The layers of a stack of GLM, Mistral Large 4, Hy4 or V4.1, each with hidden states of its own."""

    def __init__(self, make, case, batch_invariant=True, **options):
        self.made = make(case, batch_invariant=batch_invariant, **options)
        self.lengths = [min(x.shape[1], 150) for x in self.made.hidden][:3]

    def step(self, scheduled):
        return [out.transpose(1, 0, 2) for out in self.made.step(scheduled)]


MODELS = {
    "v4 ratio 4": (Alone, 8), "v4 ratio 128": (Alone, 3), "v4 window": (Alone, 2), "v32": (Alone, 13),
    "glm": (Stacked, FamilyStack, 0), "glm pooled": (Stacked, FamilyStack, 2),
    "glm more pools": (Stacked, FamilyStack, 4), "mistral": (Stacked, FamilyStack, 6), "hy4": (Stacked, FamilyStack, 8),
    "v41": (Stacked, Stack, 0), "v41 of many candidates": (Stacked, Stack, 1),
}  # fmt: skip


def made(model, **options):
    kind, *arguments = MODELS[model]
    return kind(*arguments, **options)


def scheduled(rng, lengths, most=60):
    """Steps that together have all tokens of all requests: (request, first position, count), decodes first."""
    done = [0] * len(lengths)
    while any(x < length for x, length in zip(done, lengths, strict=True)):
        step = []
        for request in rng.permutation(len(lengths)):
            left = lengths[request] - done[request]
            if left and rng.random() < 0.7:
                count = min(left, int(rng.choice([1, rng.integers(1, DRAFTS + 2), rng.integers(1, most)])))
                step.append((int(request), done[request], count))
                done[request] += count
        if step:
            yield sorted(step, key=lambda x: x[2])  # decodes first, whatever the model takes for one


def outputs(run, steps):
    """Outputs of all tokens of each request, [tokens, ..]."""
    parts = [[] for _ in run.lengths]
    for step in steps:
        for (request, _, _), out in zip(step, run.step(step), strict=True):
            parts[request].append(out)
    return [np.concatenate(each) for each in parts]


def prompts(lengths):
    """Each request's tokens in one step, alone."""
    return [[(request, 0, length)] for request, length in enumerate(lengths)]


def check(model, rng, schedules, longest=None, most=60, **options):
    """Prompts alone, then the same requests in any schedules, over other pages."""
    whole = made(model, **options)
    lengths = whole.lengths = [min(length, longest or length) for length in whole.lengths]
    want = outputs(whole, prompts(lengths))
    for seed in range(schedules):
        run = made(model, **options, seed=seed)
        run.lengths = lengths
        for got, expected in zip(outputs(run, scheduled(rng, lengths, most)), want, strict=True):
            assert_same_bits(got, expected)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("options", [{}, FP8], ids=["float32", "fp8"])
def test_any_schedule_gives_the_same_bits(rng, model, options):
    check(model, rng, 1, **options)


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("options", [{}, FP8], ids=["float32", "fp8"])
def test_many_schedules_give_the_same_bits(rng, model, options):
    check(model, rng, 6, **options)


@pytest.mark.parametrize("model", ["v4 ratio 4", "v32", "glm pooled", "v41"])
def test_any_schedule_on_the_reference(rng, model):
    check(model, rng, 1, longest=40, most=20, backend="reference")


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.thorough(when=lambda x: x.emulated and x.get("model") not in ("v4 ratio 4", "v32", "glm pooled"))
def test_any_schedule_on_a_device(device, rng, model):
    longest, schedules = (40, 1) if device.emulated else (None, 3)
    check(model, rng, schedules, longest, longest or 60, backend="cuda", lab=device, **FP8)


@pytest.mark.parametrize("model", MODELS)
def test_lists_have_their_lengths_in_any_schedule(rng, monkeypatch, model):
    """On a GPU the lengths of a token's lists decide how its keys are split."""
    seen, attend = [], cumla.sparse_mla_decode

    def recorded(q, *arguments, topk_length, extra_topk_length=None, **keywords):
        lens = [x.copy() for x in (topk_length, extra_topk_length) if x is not None]
        seen.append(np.stack(np.broadcast_arrays(*lens, np.zeros(len(q), np.int32))[: len(lens)], axis=-1))
        return attend(q, *arguments, topk_length=topk_length, extra_topk_length=extra_topk_length, **keywords)

    for module in ("sparse", "selected_attention"):
        monkeypatch.setattr(f"cumla.layers.{module}.sparse_mla_decode", recorded)
    run, found = made(model), []
    run.lengths = [min(length, 40) for length in run.lengths]
    for steps in (prompts(run.lengths), list(scheduled(rng, run.lengths, 20))):
        lens = {}
        for step in steps:
            seen.clear()
            run.step(step)
            tokens = [(request, position) for request, first, count in step for position in range(first, first + count)]
            calls = iter(seen)
            layers = []
            for part in calls:  # a layer attends in one call or several
                parts = [part]
                while sum(map(len, parts)) < len(tokens):
                    parts.append(next(calls))
                layers.append(np.concatenate(parts)[: len(tokens)])
            for i, token in enumerate(tokens):
                lens[token] = [layer[i].tolist() for layer in layers]
        found.append(lens)
    assert found[0] == found[1]
    assert any(any(any(x) for x in lists) for lists in found[0].values())


def test_layers_and_metadata_of_two_modes_are_refused():
    for model in ("v32", "v41"):
        on, off = made(model).made, made(model, batch_invariant=False).made
        batch, tables = off.paged.batch([(0, 0, 3)])
        rings = np.zeros(1, np.int32)
        for layers, builder, want in ((on, off.builder, True), (off, on.builder, False)):
            layer = layers.layer if model == "v32" else layers.layers[0]
            caches = layers.caches if model == "v32" else layers.caches[0]
            metadata = builder.build(batch) if model == "v32" else builder.build(batch, tables, rings)
            selection = None if model == "v32" else layers.selection
            message = f"metadata: got batch_invariant={not want} in the builder's config, expected {want}"
            with pytest.raises(ValueError, match=message):
                layer.step(np.zeros((3, layer.spec.hidden_size), layer.activations), caches, metadata, selection)


def test_an_indexers_metadata_of_the_other_mode_is_refused():
    """The step's other metadata has the layer's mode."""
    for in_mode in (False, True):
        ours, foreign = (made("v32", batch_invariant=mode).made for mode in (in_mode, not in_mode))
        batch, tables = ours.paged.batch([(0, 0, 3)])
        metadata, other = ours.build(batch, tables), foreign.build(batch, tables)
        rows = {ratio: replace(step, indexer=other.rows[ratio].indexer) for ratio, step in metadata.rows.items()}
        before = ours.caches.rows.tobytes(), ours.caches.indexer.tobytes()
        message = f"metadata.indexer: got batch_invariant={not in_mode} in the builder's config, expected {in_mode}"
        with pytest.raises(ValueError, match=message):
            ours.layer.step(ours.golden.hidden[:3], ours.caches, replace(metadata, rows=rows))
        assert (ours.caches.rows.tobytes(), ours.caches.indexer.tobytes()) == before


def test_activations_that_the_number_of_tokens_rounds_are_refused():
    with pytest.raises(ValueError, match="activations: got 'fp8' with batch_invariant=True, expected 'bfloat16'"):
        made("v32", activations="fp8")
