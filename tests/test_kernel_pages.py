"""docs/kernels: pages have the form of a kernel page, name existing files, and have the figures of their records."""

import importlib.util
import pathlib
import re

import pytest

from cumla.kernels.cuda import indexer_topk

ROOT = pathlib.Path(__file__).parent.parent
PAGES = sorted((ROOT / "docs" / "kernels").glob("*.md"))
BASES = [ROOT, ROOT / "kernels" / "cuda"]
OF_A_KERNEL = [page for page in PAGES if page.name not in {"index.md", "one-decode-call.md", "compiler.md"}]

every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


@every_page
def test_files_that_a_page_names_exist(page):
    names = re.findall(r"`((?:[\w.]+/)+[\w.]*|[\w.]+\.(?:cuh?|py|json))`", page.read_text())
    for path in names:
        assert any((base / path).exists() for base in BASES), path


@every_page
def test_a_page_is_short(page):
    assert len(page.read_text().splitlines()) <= 80


@pytest.mark.parametrize("page", OF_A_KERNEL, ids=lambda page: page.name)
def test_a_page_has_idea_figure_result_limits_and_what_lost(page):
    text = page.read_text()
    headings = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert headings == ["Idea", "Result", "Limits", "Tried and lost"]
    introduction, idea, _, _, lost = re.split(r"^## .*$", text, flags=re.MULTILINE)
    assert re.search(r"`(?:cumla\.\w+|backend=)|cumla ", introduction), "the page says which operation it is about"
    assert "\nSource" in introduction
    pictures = re.findall(r"!\[.+\]\((.+)\)", idea)
    assert "```text\n" in idea or pictures
    assert all((page.parent / picture).exists() for picture in pictures)
    assert re.search(r"^\| idea.* \|.* \| why \|$", lost, re.MULTILINE)


@every_page
def test_tables_have_the_figures_of_their_records(page):
    """After a record has changed: tools/record_tables.py docs/kernels/*.md."""
    spec = importlib.util.spec_from_file_location("record_tables", ROOT / "tools" / "record_tables.py")
    record_tables = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(record_tables)
    assert record_tables.rewritten(page.read_text()) == page.read_text()


def top_k_kernel(rows, columns):
    """The kernel that top_k_per_row takes on an H200 for aligned rows and k 512, as in the page."""
    name, size = indexer_topk.kernel_for_rows(rows, columns, 512, 132, 8, True, False)
    return name if size.blocks == 1 else f"{name} x {size.blocks}"


def test_the_table_of_top_k_kernels_is_what_launchers_choose():
    text = (ROOT / "docs" / "kernels" / "topk.md").read_text()
    heading, *rows = re.search(r"^(\| columns \|.*\n)(?:\|-.*\n)((?:\|.*\n)+)", text, re.MULTILINE)[0].splitlines()
    bounds = [[int(n) for n in re.findall(r"\d+", cell)] for cell in heading.split("|")[2:-1]]
    bounds[-1] = [bounds[-2][1] + 1, 4096]
    for row in rows[1:]:
        columns, *kernels = (cell.strip() for cell in row.strip("|").split("|"))
        for ends, kernel in zip(bounds, kernels, strict=True):
            assert {top_k_kernel(n, int(columns.replace(",", ""))) for n in ends} == {kernel}, (columns, ends)


def test_a_decode_call_is_described_in_order():
    """From the public function to the kernels of the epilogue, each step with the file where it happens."""
    text = (ROOT / "docs" / "kernels" / "one-decode-call.md").read_text()
    steps = re.findall(r"^(\d+)\. `([\w./]+)`", text, re.MULTILINE)
    assert [int(number) for number, _ in steps] == list(range(1, len(steps) + 1))
    files = [path for _, path in steps]
    assert files[0] == "cumla/ops/sparse_attention.py"
    assert files[-1] == "kernels/cuda/csrc/common/sparse/exact_mma.cuh"
