"""Checks of `cumla.debug` for kernels of norms and RoPE."""

from __future__ import annotations

from typing import Any

from .values import check_positions, check_slots


def qnorm_rope_and_insert(arguments: Any) -> None:
    check_positions(arguments, arguments.cos_sin, arguments.slots)
    check_slots("slot_mapping", arguments.slots, arguments.pages.num_slots, arguments.positions)


def norm_rope_and_insert(arguments: Any) -> None:
    check_positions(arguments, arguments.cos_sin, arguments.slots, all_read=False)
    check_slots("slot_mapping", arguments.slots, arguments.pages.num_slots, arguments.positions)


def indexer_knorm_rope_and_insert(arguments: Any) -> None:
    if arguments.cos_sin is not None:
        check_positions(arguments, arguments.cos_sin, arguments.slots, all_read=False)
    check_slots("slot_mapping", arguments.slots, arguments.pages.num_slots, arguments.positions)


def apply_rope(arguments: Any) -> None:
    if arguments.cos_sin is not None:
        check_positions(arguments, arguments.cos_sin)


def inverse_rope_and_quantize(arguments: Any) -> None:
    check_positions(arguments, arguments.cos_sin)
