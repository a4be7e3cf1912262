#!/usr/bin/env python3
"""Find private words for which the field has a term: `file:line: 'dealt out': write 'sharded'` for each use.

    tools/words.py [PATH ...]

WORDS maps patterns to the term to write instead. All text of tracked files is searched (code, comments, Markdown),
and the paths themselves; a phrase may continue on the next line. ALLOWED lists uses that are plain English, and old
names that still work. Exit status 1 for a use that is not allowed, or an entry of ALLOWED that matches nothing.
"""

import pathlib
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator

ROOT = pathlib.Path(__file__).resolve().parent.parent

# Regular expressions of lower-case text; " " is any white space or `_`, and words end at `_` and at capitals in names.
# The longer of two alternatives that begin alike is first.
WORDS = {
    r"deal(s|t|ing)?": "shard (to ranks), assign (to CTAs)",
    r"(shares?|shared|sharing)( work| it| them)? out": "shard (to ranks), distribute (to threads)",
    r"(in|even|larger|smaller) shares|share of (a|each|the|its) (cta|thread block|multiprocessor|sm|warp)s?|"
    r"(cta|block|multiprocessor|sm|warp)'s shares?": "split, work range",
    r"put together|puts? .{1,24} together": "combine, reduce",
    r"(what is|is|was) left to do( behind)?": "epilogue, combine",
    r"cut tiles?": "split tile",
    r"turned(?! (on|off|into|out))|turn(s|ing)?( \w+)? back|rope turns?|turns? (by|what|together)": "rotate",
    r"roads?": "path",
    r"(looked|looking|looks?) at|look of|looks? as|look alike|how .{1,24} (looked|looks?)(?! up)": "inspect, cache key",
    r"telling|tells?|told": "inferred from, publishes, reports, distinguishes",
    r"(one|page|request|row) behind (another|the other|one)|behind (one another|each other)": "packed, back to back",
    r"behind (its?|them|those|that|the|any|an|a|each(?! other)|every)": "after",
    r"amend(ment|s|ed|ing)?|(does|done|do) (it |them )?again": "correct, recompute",
    r"mend(s|ed|ing)?": "fix",
    r"proofs?|prov(en|es|ed|ing|e)|unproven|verdicts?": "self-test, result of a self-test",
    r"rehears(als?|ed|es|e)": "dry run",
    r"ghosts?": "fake array",
    r"whoever|whomever|nobody|somebody": "the warp, CTA, function or value by name",
    r"what there is|largest that there is": "the things by name",
    r"mixers?|scorers": "PV warpgroup, QK warpgroup",
    r"rooms|(the|a|each|every|which|what) room(?! for)(?! is)|house|cellar|roof": "package, module, folder",
    r"given on|handed (on|down)|hands? (it|them)? ?(on|down)": "exported, passed, injected",
    r"stands?(?!.in)(?!.for)|stood": "is stored, is",
    r"lies|(lay|lain|lie) (in|at|one|on|together|where|there|beside)": "is, is at",
    r"ever again|so much as|as nothing (beside|to)|had better": "repeatedly, negligible, should",
}

# Uses to keep: the path, and a phrase of that file which contains the use.
ALLOWED = {
    # Deprecated names, and the file that device_check.sh writes.
    ("CHANGELOG.md", "`prefill_road`"),
    ("cumla/__main__.py", "--prefill-road"),
    ("cumla/layers/prefill_road.py", "road"),
    ("cumla/layers/prefill_road.py", "chunk_roads"),
    ("cumla/layers/prefill_road.py", "ROADS"),
    ("cumla/layers/sparse.py", "prefill_road"),
    ("tests/cli/test_cli.py", "--prefill-road"),
    ("tests/dispatch/test_deprecated.py", "road"),
    ("tests/dispatch/test_deprecated.py", "chunk_roads"),
    ("tests/dispatch/test_deprecated.py", "ROADS"),
    ("tools/device_check.sh", "proof.tgz"),
    # The suffix of files that earlier versions wrote, too.
    ("kernels/cuda/compile.py", "}.verdict"),
    ("kernels/numba_common/compiled.py", '".verdict"'),
    ("tests/cli/test_warmup.py", '"kernel.verdict"'),
    ("tests/dispatch/test_self_test.py", '.verdict"'),
}

NOT_TEXT = (".json", ".npz", ".npy", ".gz", ".svg", ".bin")
NOT_SEARCHED = {"LICENSE", "tools/words.py", "tests/test_words.py"}

SPACE = r"(?:[ _]|\s+(?:(?://|#|\*|>)\s*)?)"
PATTERNS = [(re.compile(word.replace(" ", SPACE)), use) for word, use in WORDS.items()]
SENTENCE = re.compile(r'(?:(?<=["#/.]\s)|(?<="""))(Of|Those that)(?=\s)')


def found(text: str) -> Iterator[tuple[int, int, str]]:
    """(start, end, term to write instead) of each use in a text."""
    lower = text.lower()
    for pattern, use in PATTERNS:
        for match in pattern.finditer(lower):
            start, end = match.span()
            capital = text[start].isupper() and text[start - 1 : start].islower()  # as in QueryShares
            if (capital or not text[start - 1 : start].isalpha()) and not text[end : end + 1].islower():
                yield start, end, use
    for match in SENTENCE.finditer(text):
        yield *match.span(), "a sentence that begins with its subject, by name"


def uses(path: str, text: str, allowed: Iterable[tuple[str, str]]) -> tuple[list[str], set[tuple[str, str]]]:
    """A message for each use in a file that is not allowed, and the entries that match a use."""
    spans = [
        (entry, match.start(), match.end())
        for entry in allowed
        if entry[0] == path
        for match in re.finditer(re.escape(entry[1]), text)
    ]
    messages, matched = [], set()
    for start, end, use in sorted(found(text)):
        entries = {entry for entry, first, last in spans if first <= start and end <= last}
        matched |= entries
        if not entries:
            words = " ".join(text[start:end].split())
            messages.append(f"{path}:{text.count(chr(10), 0, start) + 1}: {words!r}: write {use!r}")
    return messages, matched


def main(arguments: list[str]) -> int:
    """Print a message for each use below the given paths, or anywhere. Returns the exit status."""
    if not (ROOT / ".git").exists():
        return 0
    listed = subprocess.run(["git", "ls-files", "-z", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    messages, unused = [], set(ALLOWED)
    for path in filter(None, listed.stdout.split("\0")):
        if path.endswith(NOT_TEXT) or path in NOT_SEARCHED or not (ROOT / path).is_file():
            continue
        for text in (path, (ROOT / path).read_text()):
            new, matched = uses(path, text, ALLOWED)
            messages += new
            unused -= matched
    if not arguments:
        messages += [f"tools/words.py: allowed {phrase!r} is not in {path}" for path, phrase in sorted(unused)]
    print(*messages, f"{len(messages)} private words", sep="\n")
    return bool(messages)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
