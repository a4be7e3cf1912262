"""Makes calls of an operation for a model: arguments of every size, results and workspace."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from ..kernels.cuda.device import Device, described
from ..layout import CacheLayout
from ..specs import SPECS
from ..specs.inputs import Size
from ..specs.spec import OperationSpec
from .fields import PAIRS, PLANNED, OperationFields
from .record import ExportedCall, Limit
from .unread import LEAST_PAGES, MOST_PAGES, Unread

Arguments = Callable[[Any], dict[str, Any]]
# Names of the results of operations whose results are one tuple.
RESULTS = {
    "compute_swa_indices_and_lens": ("swa_indices", "swa_lens"),
    "compute_global_topk_indices_and_lens": ("global_topk_indices", "topk_lens"),
    "combine_topk_swa_indices": ("combined_indices", "combined_lens"),
    "sparse_mla_prefill": ("out", "max_logits", "lse"),
    "fused_q_kv_rmsnorm": ("qr_normed", "kv_normed"),
    "fused_indexer_q_rope_quant": ("q_values", "q_weights"),
    "inverse_rope_and_quantize": ("values", "scales"),
}
LEAST_COLUMNS = 16  # of a block table
INVARIANT = ", batch-invariant"  # of a name
ANY = 2.0**-4  # a scale, or an epsilon
WHOLE = 1 << 62  # bytes that any scores fit into


class Model(Protocol):
    """What the calls of a model depend on (cumla/cli/served_model.py has it from a config.json)."""

    @property
    def kind(self) -> str: ...
    @property
    def heads(self) -> int: ...
    @property
    def topk(self) -> int: ...
    @property
    def window(self) -> int: ...
    @property
    def formats(self) -> tuple[CacheLayout, CacheLayout]: ...
    @property
    def has_window(self) -> bool: ...
    @property
    def index_heads(self) -> int: ...
    @property
    def index_formats(self) -> tuple[CacheLayout, ...]: ...
    @property
    def candidate_blocks(self) -> int: ...
    @property
    def decode_tokens(self) -> int: ...
    @property
    def q_rank(self) -> int: ...
    @property
    def o_groups(self) -> int: ...
    @property
    def pool(self) -> int: ...


@dataclass(frozen=True)
class Claims:
    """Sizes that a file serves.

    Attributes:
        tokens: of a step's prompts and decodes together
        decodes: requests of one step
        block_size: tokens of a page
        context: positions of the longest context
    """

    tokens: int = 4096
    decodes: int = 256
    block_size: int = 64
    context: int = 1 << 17


class Maker:
    """Calls for a model on a device, of the claimed sizes."""

    def __init__(self, model: Model, claims: Claims, device: Device) -> None:
        self.model, self.claims, self.device = model, claims, device
        self.shared: dict[Any, Any] = {}
        most = claims.tokens
        self.ranges = {
            "rows": (1, most), "tokens": (1, most), "requests": (1, claims.decodes), "pages": (LEAST_PAGES, MOST_PAGES),
            "context": (claims.block_size, claims.context), "keys": (1, claims.tokens + claims.context),
        }  # fmt: skip

    @property
    def next_n(self) -> range:
        """Numbers of tokens of a decode."""
        return range(1, self.model.decode_tokens + 1)

    def call(
        self, operation: str, kind: str, by: str, arguments: Arguments, *varying: str, limits: tuple[Limit, ...] = (),
        most: Mapping[str, tuple[int, int]] | None = None, **size: Any,
    ) -> ExportedCall:  # fmt: skip
        """A kind of call.

        Args:
            by: the size of which every value is recorded
            varying: other sizes that vary, at random
            limits: of products of the call's fields
            most: ranges that differ from the claims
            size: sizes that do not vary, other than the model's
        """
        spec, model = SPECS[operation], self.model
        base = Size(heads=model.heads, topk=model.topk, window=model.window, block_size=self.claims.block_size, pages=2)
        fields = fields_of(spec)
        ranges = {name: {**self.ranges, **(most or {})}[name] for name in (by, *varying)}
        return ExportedCall(
            fields, f"{operation} {kind}".strip(), replace(base, **size), ranges, by,
            functools.partial(self.arguments, spec, fields, arguments), limits,
        )  # fmt: skip

    def arguments(
        self, spec: OperationSpec, fields: OperationFields, arguments: Arguments, size: Size,
        inputs: Callable[[Size, dict[Any, Any]], Any] = Unread,
    ) -> dict[str, Any]:  # fmt: skip
        """inputs: a size and what calls share -> the arrays"""
        given = arguments(inputs(size, self.shared))
        results = spec.results(given)
        given = {**{x.name: ANY for x in fields.parameters if x.is_any}, **with_pairs(given)}
        for name, result in zip(fields.results, results, strict=True):
            given.setdefault(name, np.empty(result.shape, np.dtype(result.dtype)))
        if spec.scratch is not None:
            with described(self.device):
                needed = spec.scratch({**given, "max_workspace_bytes": WHOLE})  # selections in one pass
                given["workspace"] = np.empty(needed, np.uint8)
        return given


def in_mode(arguments: Arguments, batch_invariant: bool) -> Arguments:
    """Calls in the batch-invariant mode, or not."""
    return functools.partial(_in_mode, arguments, batch_invariant)


def _in_mode(arguments: Arguments, batch_invariant: bool, x: Any) -> dict[str, Any]:
    return {**arguments(x), "batch_invariant": batch_invariant}


def starts(x: Any, rows: int) -> Any:
    """Starts of the requests among these rows."""
    return x.starts(replace(x.size, tokens=rows).query_lens)


def with_plan(arguments: Arguments, x: Any) -> dict[str, Any]:
    """A call whose plan an earlier call of the step has computed."""
    return {**arguments(x), PLANNED: 1}


def with_pairs(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of two arrays as two arguments."""
    found = dict(arguments)
    for name, names in PAIRS.items():
        if isinstance(found.get(name), tuple):
            found |= dict(zip(names, found[name], strict=True))
    return found


@functools.cache
def fields_of(spec: OperationSpec) -> OperationFields:
    """The C struct of an operation."""
    results = RESULTS.get(spec.name, spec.outputs)
    return OperationFields(spec, results, spec.scratch is not None)
