#!/usr/bin/env python3
"""Check that a built site's pages are valid HTML and load nothing from another host: fonts, scripts, styles, pictures.

Every page is parsed as browsers parse it (html5lib). Markup that a browser would have to repair, duplicate ids of a
page and missing pictures are errors. look.py opens the pages in a browser.

tools/site/check.py FOLDER
"""

import html.parser
import pathlib
import re
import sys
import urllib.parse

import html5lib

LOADED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href"}
NOT_LOADED = {"canonical", "prev", "next", "edit"}  # links that a browser does not follow by itself


class Page(html.parser.HTMLParser):
    """Collects what a browser would load from another host for a page."""

    def __init__(self) -> None:
        super().__init__()
        self.elsewhere: list[str] = []
        self.pictures: list[str] = []
        self.ids: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        target = attributes.get(LOADED.get(tag, "")) or ""
        if "id" in attributes:
            self.ids.append(attributes["id"] or "")
        if tag == "img":
            self.pictures.append(target)
        if re.match(r"(https?:)?//", target) and attributes.get("rel") not in NOT_LOADED:
            self.elsewhere.append(f"{tag} {target}")


def invalid(path: pathlib.Path, page: Page) -> list[str]:
    """The errors of a page; the parser's errors have line numbers."""
    parser = html5lib.HTMLParser()
    parser.parse(path.read_text())
    wrong = [f"line {line}: {code} {data or ''}" for (line, _), code, data in parser.errors]
    wrong += [f"id {name!r} twice" for name in sorted({name for name in page.ids if page.ids.count(name) > 1})]
    here = (picture for picture in page.pictures if not urllib.parse.urlparse(picture).scheme)
    return wrong + [f"no picture {name}" for name in here if not (path.parent / urllib.parse.unquote(name)).is_file()]


def main() -> int:
    folder = pathlib.Path(sys.argv[1])
    wrong = []
    pages = sorted(folder.rglob("*.html"))
    for path in pages:
        page = Page()
        page.feed(path.read_text())
        wrong += [f"{path.relative_to(folder)}: loads {target}" for target in page.elsewhere]
        wrong += [f"{path.relative_to(folder)}: {what}" for what in invalid(path, page)]
    for path in folder.rglob("*.css"):
        urls = re.findall(r"url\(['\"]?((?:https?:)?//[^)]*)", path.read_text())
        wrong += [f"{path.relative_to(folder)}: {url}" for url in urls]
    print(*wrong, sep="\n")
    print(f"{len(pages)} pages, {len(wrong)} of their parts invalid or loaded from elsewhere")
    return 1 if wrong or not pages else 0


if __name__ == "__main__":
    sys.exit(main())
