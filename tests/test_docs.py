"""The site's pages are correct: their code runs, and every public name and environment variable is in them."""

import contextlib
import json
import pathlib
import re

import pytest

import cumla
import cumla.layers
import cumla.metadata
import cumla.models
import cumla.pages
from cumla.__main__ import main

ROOT = pathlib.Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))
FORMATS = {layout.name for layout in cumla.layout.BUILT_IN}
WALKTHROUGH = "adding-an-op.md"  # tests/test_walkthrough.py runs it in a copy of the repository
BLOCK = re.compile(r"^(?:<!-- needs (\w+) -->\n)?```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def programs(page):
    """The Python of each chapter (##) of a page, with its requirements."""
    for chapter in re.split(r"^## ", (DOCS / page).read_text(), flags=re.MULTILINE):
        title = chapter.partition("\n")[0]
        blocks = [(needs, code) for needs, language, code in BLOCK.findall(chapter) if language == "python"]
        if blocks:
            yield title, {needs for needs, _ in blocks if needs}, "\n".join(code for _, code in blocks)


PROGRAMS = [(page, *program) for page in PAGES if page != WALKTHROUGH for program in programs(page)]


@pytest.mark.parametrize(
    ("page", "needs", "code"),
    [
        pytest.param(page, needs, code, id=f"{page}-{title}", marks=[pytest.mark.gpu] if "cupy" in needs else [])
        for page, title, needs, code in PROGRAMS
    ],
)
def test_code_runs(page, needs, code, tmp_path, monkeypatch):
    for module in needs:
        pytest.importorskip(module)
    monkeypatch.chdir(tmp_path)
    exec(compile(code, page, "exec"), {"__name__": page})


def test_no_block_of_code_is_left_out():
    for page in PAGES:
        written = len(re.findall(r"^ *```", (DOCS / page).read_text(), re.MULTILINE)) // 2
        assert len(BLOCK.findall((DOCS / page).read_text())) == written, page
        languages = {language for _, language, _ in BLOCK.findall((DOCS / page).read_text())}
        assert languages <= ({"python", "cpp", "md"} if page == WALKTHROUGH else {"python", "sh", "text", "c"})
    assert len(PROGRAMS) > 7


def commands(text):
    """The command lines of cumla in a page's shell blocks, in order, without their comments and neighbours in pipes."""
    for _, language, code in BLOCK.findall(text):
        for line in code.splitlines() if language == "sh" else ():
            parts = [part.strip() for part in re.split(r"&&|\|", line.partition("#")[0])]
            yield from (part.split()[1:] for part in parts if part.startswith("cumla "))


@pytest.mark.parametrize(
    "path", [ROOT / "README.md", *(DOCS / page for page in PAGES if "```sh" in (DOCS / page).read_text())],
    ids=lambda path: path.name,
)  # fmt: skip
def test_commands_run(path, tmp_path, monkeypatch, capsys):
    """Commands run without their long parts: options are parsed, files read and written."""
    monkeypatch.chdir(tmp_path)
    row = {"op": "decode", "config": "b1", "impl": "cumla", "us": 3.0}
    record = {"environment": {"device": "a device"}, "rows": [row]}
    pathlib.Path("before.json").write_text(json.dumps(record))
    config = {"compress_ratios": [4], "num_hidden_layers": 1, "hidden_size": 512, "num_attention_heads": 64}
    config |= {"q_lora_rank": 128, "o_groups": 8, "o_lora_rank": 64}
    pathlib.Path("config.json").write_text(json.dumps(config))
    monkeypatch.setattr("cumla.cli.bench.measure", lambda console, args, suites: record)
    for name in ("cli.replay", "cli.check", "cli.warmup", "cli.export"):
        monkeypatch.setattr(f"cumla.{name}.run", lambda *args: 0)
    lines = list(commands(path.read_text()))
    for line in lines:
        assert main(line) == 0, (line, capsys.readouterr().err)
    assert lines or path.name == "README.md"


def references():
    text = "".join(path.read_text() for path in (DOCS / "reference").glob("*.md"))
    return set(re.findall(r"^::: ([\w.]+)$", text, re.MULTILINE))


@pytest.mark.parametrize(
    "module", [cumla, cumla.layers, cumla.metadata, cumla.models, cumla.pages], ids=lambda module: module.__name__
)
def test_every_public_name_is_in_the_reference(module):
    modules = {"layers", "metadata"}
    names = {f"{module.__name__}.{name}" for name in module.__all__ if name not in modules}
    assert names <= references() | {f"cumla.{name}" for name in FORMATS}


def test_every_format_is_in_the_reference():
    assert set(re.findall(r"^\{\{ layout (\w+) \}\}$", (DOCS / "layouts.md").read_text(), re.MULTILINE)) == FORMATS


def test_every_public_name_has_a_docstring():
    for name in cumla.__all__:
        if name not in FORMATS:
            assert getattr(cumla, name).__doc__, name


def test_every_environment_variable_is_in_the_table():
    table = (DOCS / "guide" / "environment.md").read_text()
    sources = [path for folder in ("cumla", "kernels", "interop") for path in (ROOT / folder).rglob("*.py")]
    text = "".join(path.read_text() for path in sources)
    named = set(re.findall(r"\"((?:CUMLA|NUMBA|CUPY|XDG)_[A-Z_]+)\"", text))
    assert {"CUMLA_TEST_KERNELS", "CUMLA_KV_CACHE_LAYOUT", "CUPY_CACHE_DIR", "XDG_CACHE_HOME"} <= named
    for name in named:
        assert f"`{name}`" in table, name


def test_pages_are_in_the_navigation():
    navigation = (ROOT / "mkdocs.yml").read_text()
    for page in PAGES:
        assert f": {page}\n" in navigation, page


def test_links_of_pages_exist():
    for page in PAGES:
        for link in re.findall(r"\]\((?!https?:)([\w./-]+\.md)", (DOCS / page).read_text()):
            with contextlib.suppress(ValueError):
                target = (DOCS / page).parent / link
                assert target.exists() or "kernels/" in link, f"{page}: {link}"
