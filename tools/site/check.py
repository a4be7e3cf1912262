#!/usr/bin/env python3
"""That no page of a built site loads anything from elsewhere: fonts, scripts, styles and pictures are its own.

tools/site/check.py FOLDER
"""

from __future__ import annotations

import html.parser
import pathlib
import re
import sys

LOADED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href"}
NOT_LOADED = {"canonical", "prev", "next", "edit"}  # links that a browser does not follow by itself


class Page(html.parser.HTMLParser):
    """Collects what a page makes a browser load from another place."""

    def __init__(self) -> None:
        super().__init__()
        self.elsewhere: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        target = attributes.get(LOADED.get(tag, "")) or ""
        if re.match(r"(https?:)?//", target) and attributes.get("rel") not in NOT_LOADED:
            self.elsewhere.append(f"{tag} {target}")


def main() -> int:
    folder = pathlib.Path(sys.argv[1])
    wrong = []
    pages = sorted(folder.rglob("*.html"))
    for path in pages:
        page = Page()
        page.feed(path.read_text())
        wrong += [f"{path.relative_to(folder)}: {target}" for target in page.elsewhere]
    for path in folder.rglob("*.css"):
        urls = re.findall(r"url\(['\"]?((?:https?:)?//[^)]*)", path.read_text())
        wrong += [f"{path.relative_to(folder)}: {url}" for url in urls]
    print(*wrong, sep="\n")
    print(f"{len(pages)} pages, {len(wrong)} loads from elsewhere")
    return 1 if wrong or not pages else 0


if __name__ == "__main__":
    sys.exit(main())
