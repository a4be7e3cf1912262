"""What MkDocs makes of sources beside docs/: a page a part of kernels/NOTES.md, pictures of formats and results."""

from __future__ import annotations

import pathlib
import re
import sys
from typing import Any

from mkdocs.structure.files import File, Files

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parent.parent
sys.path[:0] = [str(HERE), str(ROOT)]

import drawings  # noqa: E402

from cumla.layout import LAYOUTS  # noqa: E402

NOTES = ROOT / "kernels" / "NOTES.md"
RESULTS = ROOT / "benchmarks" / "results"
PICTURE = re.compile(r"^\{\{ (layout|results) ([\w/]+) \}\}$", re.MULTILINE)


def parts_of_notes() -> tuple[str, dict[str, tuple[str, str]]]:
    """What stands before the first part, and of each part its slug, title and text, headings a level up."""
    intro, *parts = re.split(r"^## ", NOTES.read_text(), flags=re.MULTILINE)
    found = {}
    for part in parts:
        title, _, text = part.partition("\n")
        slug = re.sub(r"\W+", "-", title.lower()).strip("-")
        found[slug] = title, re.sub(r"^###", "##", text, flags=re.MULTILINE)
    return intro, found


def on_files(files: Files, config: Any) -> Files:
    intro, parts = parts_of_notes()
    intro = re.sub(r"\(#([\w-]+)\)", r"(\1.md)", intro)  # its parts are pages of their own here
    index = intro + "\n" + "\n".join(f"- [{title}]({slug}.md)" for slug, (title, _) in parts.items()) + "\n"
    files.append(File.generated(config, "kernels/index.md", content=index))
    for slug, (title, text) in parts.items():
        files.append(File.generated(config, f"kernels/{slug}.md", content=f"# {title}\n{text}"))
    return files


def on_config(config: Any) -> Any:
    _, parts = parts_of_notes()
    pages = ["kernels/index.md", *(f"kernels/{slug}.md" for slug in parts)]
    for entry in config["nav"]:
        if "How the kernels work" in entry:
            entry["How the kernels work"] = pages
    return config


def on_page_markdown(markdown: str, **kwargs: Any) -> str:
    return PICTURE.sub(lambda found: picture(found[1], found[2]), markdown)


def picture(kind: str, name: str) -> str:
    """A drawing, as one block of HTML."""
    svg = drawings.layout_svg(LAYOUTS[name]) if kind == "layout" else drawings.results_svg(RESULTS / f"{name}.json")
    return "<figure>" + re.sub(r"\n\s*", " ", svg) + "</figure>"
