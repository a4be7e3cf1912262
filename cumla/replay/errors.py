"""Errors that are the user's to mend. The message is the one line they see."""

from __future__ import annotations


class InputError(ValueError):
    """A trace or an option that cannot be used."""


class OutputError(Exception):
    """A file that could not be written."""
