"""The guide's tables of page groups are those of the models."""

import importlib.util
import pathlib

ROOT = pathlib.Path(__file__).parents[2]
PAGE = ROOT / "docs" / "guide" / "page-groups.md"


def test_tables_are_current():
    """After a change of formats or groups: tools/page_tables.py docs/guide/page-groups.md."""
    spec = importlib.util.spec_from_file_location("page_tables", ROOT / "tools" / "page_tables.py")
    page_tables = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(page_tables)
    text = PAGE.read_text()
    assert page_tables.rewritten(text) == text
    assert {name for name in page_tables.MODELS if f"<!-- pages of {name} -->\n|" in text} == set(page_tables.MODELS)
