"""`cumla replay --html`: one page that needs no other file, with the numbers of the run on linear axes."""

import html.parser
import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cumla.__main__ import main
from cumla.replay import page
from cumla.replay.summary import ATTENTION_OPS

VOID = {"meta", "line", "path", "br"}
REQUESTS = [(0, 600, [0, 1]), (50_000, 1100, [2, 3, 4]), (90_000, 690, [0, 5])]


class Parsed(html.parser.HTMLParser):
    """Tags, texts, and the elements that are open."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.texts, self.open = [], [], []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.texts.append(data)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    lines = (
        {"timestamp": time, "input_length": length, "output_length": 3, "hash_ids": ids}
        for time, length, ids in REQUESTS
    )
    (folder / "trace").write_text("\n".join(map(json.dumps, lines)))
    sizes = ["--layers", "swa,c4a", "--heads", "2", "--max-len", "1200", "--cache-tokens", "1280", "--backend", "cpu"]
    files = ["--html", str(folder / "page.html"), "--json", str(folder / "numbers")]
    assert main(["replay", str(folder / "trace"), *sizes, "--host-pages", "8", *files]) == 0
    return json.loads((folder / "numbers").read_text()), (folder / "page.html").read_text()


def heights(text, title):
    """The upper edges of the areas of a chart, by step, and the numbers of its axis with their places."""
    chart = re.search(f"<h2>{re.escape(title)}</h2>.*?</figure>", text, re.DOTALL)[0]
    marks = [
        (float(number.replace(",", "")), float(place))
        for place, number in re.findall(r'bottom:([\d.]+)%">([\d,.e-]+)', chart)
    ]
    edges = []
    for path in re.findall(r' d="([^"]+)"', chart):
        edge = [int(y) for y in re.findall(r"V(\d+)H", path)]
        edges.append(edge[: len(edge) // 2])
    return edges, marks


def test_a_page_needs_no_other_file_and_fits_telephones_and_dark_screens(run):
    parsed = Parsed(run[1])
    assert not any({"src", "href"} & attributes.keys() for _, attributes in parsed.tags)
    assert "url(" not in run[1]
    assert "@import" not in run[1]
    assert ("meta", {"name": "viewport", "content": "width=device-width, initial-scale=1"}) in parsed.tags
    assert "prefers-color-scheme: dark" in run[1]
    assert run[1].isascii()


@pytest.mark.parametrize(
    ("title", "areas"),
    [
        ("Prefill tokens of a step", [lambda step, _: step["prefill_tokens"]]),
        ("Decode tokens of a step", [lambda step, _: step["decode_tokens"]]),
        (
            "Occupancy of the cache, %",
            [
                lambda step, blocks: 100 * step["blocks_held"] / blocks,
                lambda step, blocks: 100 * (step["blocks_held"] + step["blocks_idle"]) / blocks,
            ],
        ),
        (
            "Prompt tokens of the requests that began by a step",
            [lambda step, _: step["hit_tokens"], lambda step, _: step["admitted_tokens"]],
        ),
        ("Prefixes in host memory", [lambda step, _: step["prefixes_on_host"]]),
    ],
)
def test_charts_have_the_steps_on_linear_axes(run, title, areas):
    summary, text = run
    edges, marks = heights(text, title)
    top = marks[-1][0]
    assert [place for _, place in marks] == pytest.approx([100 * mark / top for mark, _ in marks], abs=0.01)
    for edge, area in zip(edges, areas, strict=True):
        want = [1000 * (1 - area(step, summary["cache"]["blocks"]) / top) for step in summary["steps"]]
        assert edge == pytest.approx(want, abs=0.51)


def test_attention_of_each_step_is_drawn(run):
    summary, text = run
    edges, marks = heights(text, "Attention of a step, ms in all layers")
    for number, step in enumerate(summary["steps"]):
        ops = (seconds for key, seconds in step["seconds"].items() if key.split("/")[1] in (*ATTENTION_OPS, "metadata"))
        assert edges[-1][number] == pytest.approx(1000 * (1 - 1e3 * sum(ops) / marks[-1][0]), abs=0.51)


def test_tables_have_the_time_of_operations_and_the_hits_of_groups(run):
    summary, text = run
    cells = [re.findall(r"<td[^>]*>([^<]*)<", row) for row in re.findall("<tr>.*</tr>", text)]
    times = {row["op"]: 0.0 for row in summary["ops"]}
    for row in summary["ops"]:
        times[row["op"]] += row["seconds"]
    for op, seconds in times.items():
        assert [op, f"{1e3 * seconds:,.1f}"] in [row[:2] for row in cells]
    for row in summary["prefix"]["groups"]:
        name = f"{row['layers']} {row['group']}"
        assert [name, f"{row['positions']:,}", f"{row['pages']:,}", f"{row['bytes'] / 2**20:,.2f}"] in cells
    texts = Parsed(text).texts
    assert "Prefixes that came back from host memory unchanged: 1 of 1." in " ".join(texts)
    assert f"{summary['prefix']['shared_share']:.1%}" in texts


def test_failures_and_names_are_shown_as_text(run):
    summary = json.loads(json.dumps(run[0]))
    summary["verification"]["failures"] = ["layer <swa> & [red]"]
    text = page.page_of(summary, "a <title> & [b]")
    texts = Parsed(text).texts
    assert "a <title> & [b]" in texts
    assert "layer <swa> & [red]" in texts
    assert any("Results are wrong on backend cpu" in line for line in texts)


@pytest.mark.parametrize("count", [1, 2, 1000, 1001, 2500])
def test_runs_of_any_length(run, count):
    """More than a thousand steps are averaged."""
    summary = json.loads(json.dumps(run[0]))
    step, width = summary["steps"][0], -(-count // 1000)
    tokens = [number // width % 2 for number in range(count)]
    summary["steps"] = [step | {"prefill_tokens": its} for its in tokens]
    text = page.page_of(summary, "title")
    Parsed(text)
    (edge,), marks = heights(text, "Prefill tokens of a step")
    assert edge == [round(1000 * (1 - its / marks[-1][0])) for its in tokens[::width]]
    assert (f"Each point is the mean of {width} steps." in text) == (width > 1)


@given(st.floats(1e-9, 1e12))
def test_ticks_reach_the_largest_value_in_equal_distances(largest):
    marks = page.ticks(largest)
    assert marks[0] == 0
    assert 3 <= len(marks) <= 7
    assert marks[-1] >= largest * (1 - 1e-8)
    assert marks[-2] < largest
    assert page.ticks(0) == [0, 1]
