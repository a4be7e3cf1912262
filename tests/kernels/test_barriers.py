"""The table of barriers in the header of each Hopper kernel lists exactly the barriers of the kernel."""

import re

import pytest

from cumla.kernels.cuda.compile import CSRC

KERNELS = {str(path.relative_to(CSRC / "sm90")): path for path in sorted((CSRC / "sm90").rglob("*.cu"))}
HEADER = re.compile(r"^//     barrier +arrivals of a phase +waits +guards$")
DECLARED = re.compile(r"^constexpr (?:Barrier|Barriers<[^;{}]*>) (\w+\{.*);", re.MULTILINE)
INITIALISED = re.compile(r"\b(\w+)(?:\[[^;]*?\])*(?:\.in\(window\))?\.init\(")
WAITED = re.compile(r"\b(\w+)(?:\[[^;]*?\])*(?:\.in\(window\))?\.wait(?:_for_cluster)?\(")
NAMED = re.compile(r"(?:warpgroup_(?:sync|any)\(|bar\.sync |bar\.red[\w.]* q, )(\d+)( \+ \w+)?")


def files_of(kernel):
    """The files of a kernel: all of its folder, unless others are in it or below; and a shared base."""
    others = [path for path in kernel.parent.rglob("*.cu") if path != kernel]
    files = [kernel] if others else sorted(kernel.parent.iterdir())
    shared = CSRC / "sm90" / "prefill_consumer.cuh"
    is_included = any(f'#include "{shared.relative_to(CSRC)}"' in path.read_text() for path in files)
    return [*files, shared] if is_included else files


def names_in_table(source):
    """The entries of the table's first column, without subscripts."""
    lines = source.splitlines()
    (start,) = (i for i, line in enumerate(lines) if HEADER.match(line))
    names = []
    for line in lines[start + 1 :]:
        if not line.startswith("//     "):
            break
        entry = re.match(r"//     (named \d+(?:, \d+)*|\w+)", line)
        if entry:
            names.append(entry[1])
    return names


@pytest.mark.parametrize("name", KERNELS)
def test_every_barrier_is_listed(name):
    source = "\n".join(path.read_text() for path in files_of(KERNELS[name]))
    code = re.sub(r"//.*", "", source)
    names = names_in_table(source) if re.search(r"\.wait\(|bar\.sync|warpgroup_(sync|any)\(", code) else []
    assert len(names) == len(set(names))
    mbarriers = {x for x in names if x != "cluster" and not x.startswith("named")}
    declared = {name for line in DECLARED.findall(code) for name in re.findall(r"(\w+)\{", line)}
    if declared:  # the others have functions with the names of the table
        assert mbarriers == declared == set(INITIALISED.findall(code))
    assert set(WAITED.findall(code)) <= mbarriers
    assert ("cluster" in names) == ("cluster_arrive()" in code)
    listed = {int(number) for x in names if x.startswith("named") for number in re.findall(r"\d+", x)}
    # An id computed by a sum belongs to one of two consumers.
    used = [(int(first), bool(rest)) for first, rest in NAMED.findall(code)]
    assert listed == {first + i for first, of_two in used for i in range(1 + of_two)}
