"""tools/words.py finds private words in code, comments and Markdown, and no plain English."""

import importlib.util
import pathlib
import subprocess

import pytest

ROOT = pathlib.Path(__file__).parent.parent
spec = importlib.util.spec_from_file_location("words", ROOT / "tools" / "words.py")
words = importlib.util.module_from_spec(spec)
spec.loader.exec_module(words)


def of(text):
    return [text[start:end] for start, end, _ in sorted(words.found(text))]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("tokens dealt out to ranks", ["dealt"]),
        ("prefill_road = ROADS[0]", ["road", "ROADS"]),
        ("class DryRoad:", ["Road"]),
        ("rows lie one behind another", ["lie one", "one behind another"]),
        ("// Results are put\n    // together here.", ["put\n    // together"]),
        ("# rows one\n# behind another", ["one\n# behind another"]),
        ('"""Of each token, its rows."""', ["Of"]),
        ("They are kept. Of the first, all are.", ["Of"]),
        ("K is turned back", ["turned"]),
        ("what nobody has proven", ["nobody", "proven"]),
        ("def test_told_by_a_size():", ["told"]),
        ("how arguments looked", ["how arguments looked"]),
        ("which room imports which", ["which room"]),
        ("# Those that are gone", ["Those that"]),
        ("work is shared out", ["shared out"]),
    ],
)
def test_private_words_are_found(text, expected):
    assert of(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "ranks share a cache",
        "room for 64 rows",
        "look up a page",
        "finish the tile",
        "Returns out, in turn",
        "turned off",
        "broad, ideal, improve, families, stand_ins, stands for",
        "numbers of heads, left behind",
        "Offsets of rows",
        "kOf(a)",
        "rows, and those that are gone",
        "turn the score into NaN",
        "* share\n return out",
    ],
)
def test_plain_english_is_not(text):
    assert of(text) == []


@pytest.mark.parametrize(("pattern", "use"), words.PATTERNS)
def test_every_pattern_has_a_term_and_is_lower_case(pattern, use):
    """Text is searched in lower case, so a pattern with a capital would never match."""
    assert use
    assert pattern.pattern == pattern.pattern.lower()


def test_messages_name_file_line_and_term():
    messages, matched = words.uses("a.py", "x = 1\n# the other road\n", [])
    assert (messages, matched) == (["a.py:2: 'road': write 'path'"], set())


def test_an_allowed_use_is_in_its_file_and_within_its_phrase():
    entry = ("a.py", "--prefill-road")
    assert words.uses("a.py", "--prefill-road", [entry]) == ([], {entry})
    for path, text in (("b.py", "--prefill-road"), ("a.py", "--other-road")):
        messages, matched = words.uses(path, text, [entry])
        assert len(messages) == 1
        assert not matched


def test_files_are_searched_with_their_paths_and_unused_entries_fail(tmp_path, monkeypatch, capsys):
    (tmp_path / "ghost.py").write_text("# on the road\n")
    for command in (["init", "--quiet"], ["add", "ghost.py"]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    monkeypatch.setattr(words, "ROOT", tmp_path)
    monkeypatch.setattr(words, "ALLOWED", {("ghost.py", "on the road"), ("ghost.py", "amended"), ("gone.py", "road")})
    assert words.main([]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "ghost.py:1: 'ghost': write 'fake array'",
        "tools/words.py: allowed 'amended' is not in ghost.py",
        "tools/words.py: allowed 'road' is not in gone.py",
        "3 private words",
    ]
    monkeypatch.setattr(words, "ALLOWED", {("ghost.py", "on the road"), ("ghost.py", "ghost")})
    assert words.main([]) == 0
