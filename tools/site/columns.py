"""Docstrings as Markdown, for mkdocstrings: arguments stand in columns there, which become lists of definitions."""

from __future__ import annotations

import re
from typing import Any

import griffe

ENTRY = re.compile(r"^(\S.*?) {2,}(\S.*)$")


class Columns(griffe.Extension):
    """Rewrites every docstring that is loaded."""

    def on_object(self, *, obj: Any, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)


def as_markdown(text: str) -> str:
    """Paragraphs as they are, columns as definitions, drawings and sessions as code."""
    return "\n\n".join(_block(block) for block in re.split(r"\n\s*\n", text.strip("\n")))


def _block(block: str) -> str:
    lines = block.splitlines()
    if lines[0].lstrip().startswith(">>>"):
        return "```python\n" + "\n".join(line[len(lines[0]) - len(lines[0].lstrip()) :] for line in lines) + "\n```"
    if all(line.startswith("    ") for line in lines):
        return block
    entries: list[tuple[str, list[str]]] = []
    before: list[str] = []
    for line in lines:
        found = ENTRY.match(line)
        if found is not None:
            entries.append((found[1], [found[2]]))
        elif entries and line.startswith(" "):
            entries[-1][1].append(line.strip())
        elif entries:
            return "```text\n" + block + "\n```"  # something else in columns
        else:
            before.append(line)
    text = _escaped("\n".join(before)) if before else ""
    if not entries:
        return text
    definitions = "\n\n".join(f"`{name}`\n:   {_escaped(' '.join(words))}" for name, words in entries)
    return f"{text}\n\n{definitions}" if text else definitions


def _escaped(text: str) -> str:
    """Markdown's own characters outside of code, as they are."""
    parts = text.split("`")
    parts[::2] = [re.sub(r"([*_\[\]<>|])", r"\\\1", part).replace(r"\<", "&lt;") for part in parts[::2]]
    return "`".join(parts)
