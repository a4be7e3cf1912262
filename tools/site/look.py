#!/usr/bin/env python3
"""Open a built site in Chromium: a light window of 1280 pixels and a dark one of 400, or with --all four windows.

A page must not scroll sideways as a whole, load anything from another host, log an error or lack a picture; its colours
follow the system's. With --pictures FOLDER each page's picture is written there.

tools/site/look.py SITE [--all] [--pictures FOLDER]

Needs playwright and a Chromium: the one on PATH, or else its own. Without either it says so and ends with status 0.
"""

import argparse
import pathlib
import shutil
import sys

WINDOWS = [(1280, "light"), (400, "dark"), (1280, "dark"), (400, "light")]
SCHEMES = {"light": "default", "dark": "slate"}
FOUND = """() => ({
    wide: document.documentElement.scrollWidth - document.documentElement.clientWidth,
    broken: [...document.images].filter(image => !image.naturalWidth).map(image => image.src),
    scheme: document.body.dataset.mdColorScheme,
})"""


def faults(page, path, scheme):
    """What is wrong with a page."""
    wrong = []
    page.on("request", lambda request: request.url.startswith("http") and wrong.append(f"loads {request.url}"))
    page.on("console", lambda message: message.type == "error" and wrong.append(message.text))
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.goto(path.resolve().as_uri())
    found = page.evaluate(FOUND)
    if found["wide"] > 0:
        wrong.append(f"{found['wide']} pixels wider than the window")
    if found["scheme"] not in (None, SCHEMES[scheme]):
        wrong.append(f"colours {found['scheme']}, expected {SCHEMES[scheme]}")
    return wrong + [f"no picture {name}" for name in found["broken"]]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("site", type=pathlib.Path)
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--pictures", type=pathlib.Path)
    options = parser.parse_args()
    try:
        from playwright.sync_api import Error, sync_playwright
    except ImportError:
        print("pages not opened: playwright is not installed")
        return 0
    windows = WINDOWS if options.all else WINDOWS[:2]
    wrong, pages = (
        [],
        sorted(set(options.site.rglob("*.html")) - {options.site / "404.html"}),
    )  # whose links are a server's
    with sync_playwright() as playwright:
        try:
            browser = playwright.chromium.launch(executable_path=shutil.which("chromium"))
        except Error as error:
            print(f"pages not opened: no Chromium starts here ({str(error).splitlines()[0]})")
            return 0
        for width, scheme in windows:
            context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
            for path in pages:
                page, name = context.new_page(), path.relative_to(options.site)
                wrong += [f"{name}, {width} pixels, {scheme}: {what}" for what in faults(page, path, scheme)]
                if options.pictures:
                    file = options.pictures / f"{str(name).replace('/', '-')}-{width}-{scheme}.png"
                    page.screenshot(path=file, full_page=True)
                page.close()
    print(*wrong, f"{len(pages)} pages opened in {len(windows)} windows, {len(wrong)} faults", sep="\n")
    return 1 if wrong or not pages else 0


if __name__ == "__main__":
    sys.exit(main())
