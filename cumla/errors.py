"""Errors of a command. The user sees the message as one line."""

from __future__ import annotations


class InputError(ValueError):
    """A trace or an option that cannot be used."""


class RunError(Exception):
    """A run failed with valid options: a file was not written, a result is wrong, or a rank did not join."""
