"""Products of batch-invariant layers: a token's bits do not depend on the number of tokens, nor on the others."""

import numpy as np
import pytest

from cumla.kernels.cuda import projection
from cumla.kernels.cuda.launch import recorded_launches
from cumla.models.products import in_groups, multiply, multiply_groups, stacked
from cumla.models.scratch import Scratch
from support.lab import BF16
from support.operations import assert_same_bits

from .test_fp8_weights import one

MOST = 300


def counts_of(lab):
    """Every number of tokens on the host; on devices numbers around the sizes of tiles and blocks."""
    if lab.backend == "cpu":
        return range(1, MOST + 1)
    return [1, 9] if lab.tiny else [1, 7, 16, 17, 127, 128, 129, 255, 257]


def check(lab, rng, call, x):
    """call(x) gives rows of results; x [tokens, ..] in host memory, garbage where a padded row may be read."""
    everything = call(x)
    for count in counts_of(lab):
        some = rng.permutation(len(x))[:count]
        assert_same_bits(call(x[some]), everything[some])


def weight_of(kind, lab, rng, rows, columns, scratch):
    dense = rng.standard_normal((rows, columns), np.float32)
    if kind == "fp8":
        return stacked([one(dense)], BF16, lab.xp, scratch)
    if kind == "parts":
        first = rows // 2
        return stacked([one(dense[:first]), lab.put(dense[first:].astype(BF16))], BF16, lab.xp, scratch)
    return lab.put(dense.astype(np.float32 if lab.backend in ("cpu", "reference") else BF16))


@pytest.mark.parametrize("kind", ["plain", "fp8", "parts"])
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.thorough(when=lambda x: x.emulated and x.get("wide"))
def test_any_number_of_tokens(lab, rng, kind, wide):
    """wide: results are float32."""
    rows, columns, scratch = (*((16, 64) if lab.tiny else (136, 384)), Scratch())
    weight = weight_of(kind, lab, rng, rows, columns, scratch)
    x = rng.standard_normal((20 if lab.tiny else MOST, columns)).astype(BF16)

    def call(x):
        out = lab.put(np.zeros((len(x), rows), np.float32 if wide else BF16))
        multiply(lab.put(x), weight, out, lab.backend, scratch)
        return lab.get(out)

    check(lab, rng, call, x)


@pytest.mark.parametrize("kind", ["plain", "fp8"])
def test_any_number_of_tokens_of_groups(lab, rng, kind):
    """Columns of a wider array, as heads are."""
    groups, rows, columns, scratch = (*((2, 16, 64) if lab.tiny else (3, 32, 128)), Scratch())
    weight = in_groups(weight_of(kind, lab, rng, groups * rows, columns, scratch), groups)
    x = rng.standard_normal((20 if lab.tiny else MOST, groups, columns + 32)).astype(BF16)

    def call(x):
        out = lab.put(np.zeros((len(x), groups, rows), BF16))
        given = lab.put(x)[..., :columns].transpose(1, 0, 2)
        multiply_groups(given, weight, out.transpose(1, 0, 2), lab.backend, scratch)
        return lab.get(out)

    check(lab, rng, call, x)


@pytest.mark.parametrize("kind", ["plain", "fp8"])
def test_neighbours_that_are_not_finite(lab, rng, kind):
    rows, columns, scratch = (*((16, 64) if lab.tiny else (136, 384)), Scratch())
    weight = weight_of(kind, lab, rng, rows, columns, scratch)
    x = rng.standard_normal((20, columns)).astype(BF16)

    def call(x):
        out = lab.put(np.zeros((len(x), rows), np.float32))
        multiply(lab.put(x), weight, out, lab.backend, scratch)
        return lab.get(out)

    want = call(x)
    x[1::2] = np.array([np.nan, 1e6, np.inf, -np.inf], BF16)[np.arange(columns) % 4]
    with np.errstate(invalid="ignore"):
        assert_same_bits(call(x)[::2], want[::2])
    assert_same_bits(call(x[:3])[::2], want[:3:2])  # the block's other rows hold the neighbours of before


@pytest.mark.parametrize("tokens", [1, 40])
def test_any_number_of_multiprocessors(here, rng, monkeypatch, tokens):
    """cumla's kernels divide a product's work by the device's SMs; a token's sums are the same."""
    x = rng.standard_normal((tokens, 1024)).astype(BF16)
    dense, found = rng.standard_normal((200, 1024), np.float32), []
    scratch, weight = Scratch(), stacked([one(dense)], BF16, here.xp, Scratch())
    for sms in (78, 114, 132):
        monkeypatch.setattr(projection, "device_sms", lambda device, sms=sms: sms)
        projection.division.cache_clear()
        with recorded_launches():  # no call is replayed from the launch cache
            results = [here.put(np.zeros((tokens, 200), np.float32)) for _ in range(2)]
            for out, blocks in zip(results, (scratch, None), strict=True):
                multiply(here.put(x), weight, out, "cuda", blocks)
        found.append([here.get(out) for out in results])
    projection.division.cache_clear()
    for invariant, _ in found[1:]:
        assert_same_bits(invariant, found[0][0])
    assert any((default != found[0][0]).any() for _, default in found)
