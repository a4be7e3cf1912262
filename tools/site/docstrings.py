"""Docstrings as Markdown: columns of arguments become definition lists."""

import re

ENTRY = re.compile(r"^(\S.*?) {2,}(\S.*)$")


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
    column = next((found.start(2) for found in map(ENTRY.match, lines) if found), 0)
    for line in lines:
        found = ENTRY.match(line)
        if found is not None:
            entries.append((found[1], [found[2]]))
        elif column and line[:1].strip() and line[column - 1 : column] == " " and not line[: column - 1].count("  "):
            entries.append((line[: column - 1], [line[column:]]))  # the longest name is followed by a single space
        elif entries and line.startswith(" "):
            entries[-1][1].append(line.strip())
        elif entries:
            return "```text\n" + block + "\n```"  # columns without definitions
        else:
            before.append(line)
    text = _escaped("\n".join(before)) if before else ""
    if not entries:
        return text
    definitions = "\n\n".join(f"`{name}`\n:   {_escaped(' '.join(words))}" for name, words in entries)
    return f"{text}\n\n{definitions}" if text else definitions


def _escaped(text: str) -> str:
    """Escape Markdown's characters outside code."""
    parts = text.split("`")
    parts[::2] = [re.sub(r"([*_\[\]<>|])", r"\\\1", part).replace(r"\<", "&lt;") for part in parts[::2]]
    return "`".join(parts)
