"""Reject options that do not apply."""

from __future__ import annotations

import argparse
from collections.abc import Iterable

from ..errors import InputError


def refuse(args: argparse.Namespace, options: Iterable[str], reason: str) -> None:
    """Raises InputError for the first of these options that is on the command line."""
    for option in options:
        if option in args.passed:
            raise InputError(f"{option}: does not apply {reason}")
