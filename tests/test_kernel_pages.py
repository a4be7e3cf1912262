"""docs/kernels: every file that a page names exists, and every page of a kernel opens with a summary."""

import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parent.parent
PAGES = sorted((ROOT / "docs" / "kernels").glob("*.md"))
BASES = [ROOT / base for base in ("", "kernels", "kernels/cuda", "kernels/cuda/csrc")]
WITHOUT_SUMMARY = {"index.md", "one-decode-call.md"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_a_page_names_exist(page):
    for path in re.findall(r"`((?:[\w.]+/)+[\w.]*)`", page.read_text()):
        assert any((base / path).exists() for base in BASES), path


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_open_with_a_summary(page):
    if page.name not in WITHOUT_SUMMARY:
        assert page.read_text().split("## ")[0].count("**Summary.**") == 1


def test_a_decode_call_is_described_in_order():
    """From the public function to the kernels of the epilogue, each step with the file where it happens."""
    text = (ROOT / "docs" / "kernels" / "one-decode-call.md").read_text()
    steps = re.findall(r"^(\d+)\. `([\w./]+)`", text, re.MULTILINE)
    assert [int(number) for number, _ in steps] == list(range(1, len(steps) + 1))
    files = [path for _, path in steps]
    assert files[0] == "cumla/ops/sparse_attention.py"
    assert files[-1] == "kernels/cuda/csrc/common/sparse/exact_mma.cuh"
