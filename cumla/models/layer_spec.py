"""The description of one attention layer: all that its computation, caches, metadata and weights depend on."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..dispatch.values import check_integers
from .config_validation import check_fields
from .rope import cos_sin_table

LATENT, ROPE_DIM, INDEX_DIM = 512, 64, 128
PAIRS = ("neighbours", "halves")
CHOICES: dict[str, tuple[Any, ...]] = {
    "rope_dim": (0, ROPE_DIM), "rows": ("latent", "window"), "rope_pairs": (*PAIRS, "none"),
    "ratio": (0, 1, 2, 4, 128), "states": ("none", "pages", "ring"),
    "selection": ("own", "source", "all", "none"), "keys": ("none", "tokens", "pools", "latents", "compressor"),
    "index_queries": ("latent", "hidden"), "index_pairs": (*PAIRS, "none"),
    "index_part": ("first", "last"), "cache_formats": ("mla", "v4", "v41"), "candidates": ("none", "written", "read"),
}  # fmt: skip
OTHERWISE = dict.fromkeys(("selection_source", "candidate_source"), "an earlier layer")  # in place of a list
# What the parts of a layer compute, by the kind of rows, by the formats of a layer with a window, and by its ratio.
LATENT_RULES: dict[str, tuple[Any, ...]] = {
    "window": (0,), "ratio": (1,), "selection": ("own", "source"), "norm_heads": (False,), "overlap": (False,),
    "states": ("none",), "candidates": ("none",), "o_groups": (0,), "cache_formats": ("mla",),
    "round_pooled": (False,), "round_rows": (True,),
}  # fmt: skip
WINDOW_RULES: dict[str, tuple[Any, ...]] = {
    "nope_dim": (LATENT - ROPE_DIM,), "rope_dim": (ROPE_DIM,), "v_dim": (LATENT,), "rope_pairs": ("neighbours",),
    "learned_rope": (False,), "position_scale": (False,), "sink": (True,), "gate": (False,),
    "cache_formats": ("v4", "v41"),
}  # fmt: skip
FORMAT_RULES: dict[str, dict[str, tuple[Any, ...]]] = {
    "mla": {},
    "v4": {
        "ratio": (0, 4, 128), "norm_heads": (True,), "candidates": ("none",), "round_pooled": (False,),
        "round_rows": (True,),
    },
    "v41": {"ratio": (0, 1, 2), "norm_heads": (False,)},
}  # fmt: skip
RATIO_RULES: dict[int, dict[str, tuple[Any, ...]]] = {
    0: {"selection": ("none",), "row_source": (None,), "states": ("none",), "overlap": (False,)},
    1: {"selection": ("own", "source"), "states": ("none",), "overlap": (False,)},
    2: {"selection": ("own", "source"), "states": ("ring",), "overlap": (False,)},
    4: {"selection": ("own",), "states": ("pages",), "overlap": (True,)},
    128: {"selection": ("all",), "states": ("pages",), "overlap": (False,)},
}  # fmt: skip
KEYS_OF = {1: "latents", 2: "latents", 4: "compressor"}  # by the ratio of a layer with a window
OPTIONAL = ("q_rank", "o_groups", "o_rank", "window", "index_heads", "topk", "candidate_blocks", "layer")  # may be 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """One attention layer of a model.

    Attributes:
        layer: its number in the model
        heads: query heads, each of nope_dim values and rope_dim rotated ones behind them
        v_dim: values of a head's output
        q_rank: values of the normed latent that queries are projected from; 0: they are projected from hidden states
        norm_heads: whether each head of a query has an RMSNorm without a weight
        rows: "latent": rows of a latent of 512 values and rope_dim rotated ones, from which each head projects its
            keys and values; "window": rows of 512 values, the last rope_dim rotated, which all heads share as key and
            value. The window's rows are the layer's own
        row_source: the layer whose latent rows, or compressed rows, this one reads: itself, or an earlier one; None:
            it attends to its window alone
        window: positions that a token sees in its window; 0: none
        ratio: positions of a selected row; 0: none. Pooled rows are rotated at their first position
        overlap: whether a compressed row also pools the positions of the row before
        states: where unfinished compressed rows are saved: in "pages", in a "ring" of each request, or "none"
        selection: of rows: the layer's "own", its "source"'s, "all" rows, or "none"
        selection_source: the layer whose selection this one attends to; None for "all" and "none"
        keys: index keys of the layer that selects: of "tokens"; of "pools" of tokens' keys; of compressed rows, from
            their "latents" or from a "compressor" of the indexer's own; "none" for a layer that does not select
        pool: rows of an index key, and of what a layer selects: "pools" select all rows of a key, and the rows of the
            last, incomplete pool. Their keys and queries are rotated (Hadamard)
        index_heads, topk: heads of the indexer, and rows that it selects, a multiple of pool
        index_queries: what the indexer's queries are projected from: the queries' "latent", or "hidden" states
            after a LayerNorm
        index_pairs, index_part: RoPE of the indexer: which values are pairs, and whether the first or last 64 of 128
            values are rotated
        candidates: candidate blocks: "written" by the layer, "read" by its selection, or "none"
        candidate_source: the layer that writes the candidate blocks
        candidate_blocks, candidate_block_size: how many, and rows of each
        rope_pairs: of attention's RoPE: value 2 i with 2 i + 1, or value i with i + 32
        rope_theta, rope_scaling: of both RoPEs
        learned_rope: whether learned factors multiply the frequencies of RoPE
        position_scale: whether a factor that grows with the logarithm of the position multiplies each query head
        sink: whether each head has an attention sink
        gate: whether a sigmoid multiplies the values of each head's output
        o_groups, o_rank: of an output projection in two steps; 0: in one
        q_eps, row_eps, key_eps: epsilons of the norms of the queries' latent, of rows, and of index keys
        cache_formats: the formats that its caches may have (caches.py): V3.2's, V4's or V4.1's
        round_pooled, round_rows: whether pooled rows are rounded to bfloat16 before their norm, and rotated rows
            before quantisation

    Raises TypeError or ValueError that names the field, for a value that no layer has and for fields that contradict.
    """

    layer: int
    hidden_size: int
    heads: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    softmax_scale: float
    rows: str
    row_source: int | None
    selection: str
    selection_source: int | None
    q_rank: int = 0
    norm_heads: bool = False
    window: int = 0
    ratio: int = 1
    overlap: bool = False
    states: str = "none"
    keys: str = "none"
    pool: int = 1
    index_heads: int = 0
    topk: int = 0
    index_queries: str = "latent"
    index_pairs: str = "neighbours"
    index_part: str = "last"
    candidates: str = "none"
    candidate_source: int | None = None
    candidate_blocks: int = 0
    candidate_block_size: int = 8
    rope_pairs: str = "neighbours"
    rope_theta: float = 10000.0
    rope_scaling: Mapping[str, Any] | None = None
    learned_rope: bool = False
    position_scale: bool = False
    sink: bool = False
    gate: bool = False
    o_groups: int = 0
    o_rank: int = 0
    q_eps: float = 1e-6
    row_eps: float = 1e-6
    key_eps: float = 1e-6
    cache_formats: str = "mla"
    round_pooled: bool = False
    round_rows: bool = True

    def __post_init__(self) -> None:
        check_fields(self, CHOICES, OPTIONAL)
        for name in ("row_source", "selection_source", "candidate_source"):
            if getattr(self, name) is not None:
                check_integers(0, self.layer, **{name: getattr(self, name)})
        self._check_parts()

    def _check_parts(self) -> None:
        """Raise ValueError for a field that contradicts another field."""
        latent, selects, layer, ratio = self.rows == "latent", self.selection == "own", self.layer, self.ratio
        earlier, q_rank = tuple(range(layer)), self.q_rank
        rules = [(LATENT_RULES if latent else WINDOW_RULES, f"rows are {self.rows!r}")]
        if not latent:
            rules += [
                (FORMAT_RULES[self.cache_formats], f"cache_formats is {self.cache_formats!r}"),
                (RATIO_RULES[ratio], f"ratio is {ratio}"),
                ({"row_source": (layer,)} if ratio > 2 else {}, f"ratio is {ratio}"),
                ({"index_pairs": ("neighbours",), "index_part": ("last",)} if selects else {}, "rows are 'window'"),
                ({"key_eps": (self.row_eps,)} if selects else {}, f"row_eps is {self.row_eps}"),
            ]
        own = {"own": (layer,), "source": earlier}.get(self.selection, (None,))
        keys = (("tokens", "pools") if latent else (KEYS_OF.get(ratio),)) if selects else ("none",)
        rules += [
            ({"selection_source": own, "keys": keys}, f"selection is {self.selection!r}"),
            ({} if selects else {"candidates": ("none",)}, f"selection is {self.selection!r}"),
            (
                {"candidate_source": {"written": (layer,), "read": earlier}.get(self.candidates, (None,))},
                f"candidates are {self.candidates!r}",
            ),
            ({"index_queries": ("latent" if q_rank else "hidden",)} if selects else {}, f"q_rank is {q_rank}"),
            ({"row_eps": (self.q_eps,)} if q_rank else {}, f"q_eps is {self.q_eps} and one launch has both norms"),
            ({"rope_pairs": PAIRS if self.rope_dim else ("none",)}, f"rope_dim is {self.rope_dim}"),
            ({} if self.rope_dim else {"learned_rope": (False,)}, "rope_dim is 0"),
            ({"index_pairs": ("none",)} if selects and not self.rope_dim else {}, "rope_dim is 0"),
            ({"index_pairs": ("none",)} if self.keys == "pools" and self.rope_dim else {}, "keys are of 'pools'"),
        ]
        for name, allowed, why in ((name, allowed, why) for rule, why in rules for name, allowed in rule.items()):
            if getattr(self, name) not in allowed:
                listed = " or ".join(map(str, allowed))
                expected = listed if len(allowed) == 1 else OTHERWISE.get(name, listed)
                raise ValueError(f"{name}: got {getattr(self, name)}, expected {expected}, as {why}")
        needed = {"row_source": self.ratio and self.row_source is None}
        needed |= {name: not latent and not getattr(self, name) for name in ("window", "q_rank", "o_groups", "o_rank")}
        needed |= {name: selects and not getattr(self, name) for name in ("index_heads", "topk")}
        needed |= {"candidate_blocks": self.candidates != "none" and not self.candidate_blocks}
        for name, lacks in needed.items():
            if lacks:
                raise ValueError(f"{name}: got {getattr(self, name)}, expected one for {self.rows} rows, ratio "
                                 f"{self.ratio} and selection {self.selection!r}")  # fmt: skip
        pooled = self.keys == "pools"
        if (selects and pooled != (self.pool > 1)) or self.topk % self.pool:
            expected = f"a divisor of topk = {self.topk}, above 1" if pooled else "1"
            raise ValueError(f"pool: got {self.pool}, expected {expected}, as keys are {self.keys!r}")
        if self.position_scale and self.nope_dim % 2:
            raise ValueError(f"nope_dim: got {self.nope_dim}, expected an even number, as position_scale is True")
        if self.o_groups and self.heads % self.o_groups:
            raise ValueError(f"o_groups: got {self.o_groups}, expected a divisor of {self.heads} heads")

    @property
    def head_dim(self) -> int:
        """Values of a query head as projected."""
        return self.nope_dim + self.rope_dim

    @property
    def row_dim(self) -> int:
        """Values of a row, and of a query head that is multiplied with it."""
        return LATENT + (self.rope_dim if self.rows == "latent" else 0)

    @property
    def selected_keys(self) -> int:
        """Keys that a token selects."""
        return self.topk // self.pool

    @property
    def listed_rows(self) -> int:
        """Most rows that a token attends to: the rows of the selected keys, and the rows of the incomplete pool."""
        return self.topk + self.pool - 1

    @property
    def owns_rows(self) -> bool:
        """Whether the layer writes the rows that `row_source` names."""
        return self.row_source == self.layer

    @property
    def selects(self) -> bool:
        return self.selection == "own"

    @property
    def pooling(self) -> str:
        """How the layer pools rows: by a "compressor" with states in pages, to "latents" with a ring, or "none"."""
        if self.rows == "latent" or not self.owns_rows:
            return "none"
        return "compressor" if self.states == "pages" else "latents"

    @property
    def owns_keys(self) -> bool:
        """Whether the layer writes the index keys that it scores."""
        return self.selects and (self.keys in ("tokens", "pools") or self.owns_rows)

    @property
    def mode(self) -> str:
        """The role of the layer in selected attention.

        "window": no selected rows; "full": owns rows and selects, or takes all; "reindex": selects among another
        layer's rows; "reuse": takes another layer's selection.
        """
        if not self.ratio:
            return "window"
        if self.selection == "source":
            return "reuse"
        return "full" if self.owns_rows else "reindex"

    def groups(self) -> tuple[str, ...]:
        """The groups of caches that the layer has. The caches of a group have one block table, or one ring a request.

        "rows": latent rows and their index keys; "window"; "compressed": compressed rows and their index keys;
        "states4" and "states128": unfinished rows of compressors; "rings".
        """
        if self.rows == "latent":
            return ("rows", "rings") if self.keys == "pools" else ("rows",)
        found = ("window", "compressed") if self.ratio else ("window",)
        if self.states == "pages":
            return (*found, f"states{self.ratio}")
        return (*found, "rings") if self.states == "ring" and self.owns_rows else found

    def cos_sin_table(self, max_position: int, alpha: Any = None) -> np.ndarray:
        """float32 [max_position, 64], of both RoPEs; [max_position, 2], a rotation by 0, for a layer without RoPE.

        Args:
            alpha: [32], the exponents of learned factors; None without `learned_rope`
        """
        if not self.rope_dim:
            return np.tile(np.array([1, 0], np.float32), (max_position, 1))
        return cos_sin_table(ROPE_DIM, self.rope_theta, max_position, self.rope_scaling, alpha)
