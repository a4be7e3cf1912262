"""Errors of a command, of which the message is the one line that its user sees."""

from __future__ import annotations


class InputError(ValueError):
    """A trace or an option that cannot be used."""


class RunError(Exception):
    """What ended a run though its options are right: a file not written, a wrong result, a rank that did not come."""
