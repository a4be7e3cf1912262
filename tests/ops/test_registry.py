"""Lists of operations that cannot be derived from one another agree: a new operation fails here until it is in each."""

import pathlib
import re

import cumla
from cumla.interop.ops import OPS
from cumla.specs import SPECS, self_test

ROOT = pathlib.Path(__file__).parent.parent.parent
PUBLIC = {name for name in set(cumla.__all__) - {"debug"} if hasattr(getattr(cumla, name), "__wrapped__")}
INTERNAL = {name for name, spec in SPECS.items() if not spec.public}  # which layers call, or cumla.parallel exports
LISTS_OF_ARRAYS = {"copy_blocks", "copy_spans", "swap_blocks"}  # which compilers of frameworks do not take


def test_every_operation_is_public():
    written = {
        name
        for path in (ROOT / "cumla" / "ops").glob("*.py")
        for name in re.findall(r"^@(?:launch_cached|plain_integers)\ndef (\w+)", path.read_text(), re.MULTILINE)
    }  # fmt: skip
    assert written == PUBLIC | INTERNAL
    assert not PUBLIC & INTERNAL


def test_compilers_of_frameworks_know_every_operation():
    assert OPS.keys() == PUBLIC - LISTS_OF_ARRAYS
    assert len({*OPS.values()}) == len(OPS)  # JAX keeps what it traced by the operation


def test_every_operation_has_a_self_test():
    assert {case.op for case in self_test.CASES} == PUBLIC | INTERNAL
    assert all((ROOT / "kernels" / "reference" / f"{case.kernels}.py").exists() for case in self_test.CASES)
