"""Any operation, at any size, with the inputs of its spec (cumla/specs/); without peers.

    python benchmarks/any_operation.py combine_topk_swa_indices tokens=4096 topk=512 context=32768 [--json FILE]

Sizes are fields of cumla.specs.inputs.Size, which says what each is. GB/s count every array but the caches, once.
"""

import sys
from dataclasses import dataclass, fields
from typing import Any

import common
import numpy as np

from cumla.arrays.memory import to_host
from cumla.bench.problem import Problem, Sizes, calls_of, error_within, on_host, problem_of
from cumla.specs import SPECS
from cumla.specs.inputs import Size
from cumla.specs.spec import CACHE, Variant, flat


@dataclass(frozen=True)
class AnyOperation:
    """A variant of an operation. size: fields of Size."""

    op: str
    variant: Variant
    size: tuple[tuple[str, int], ...]

    def __str__(self) -> str:
        return ", ".join([self.variant.name, *(f"{name} {value}" for name, value in self.size)]).removeprefix(", ")

    def problem(self, sizes: Sizes) -> Problem:
        spec, x = SPECS[self.op], sizes.inputs(**dict(self.size))
        sets = [self.variant.arguments(x) for _ in range(sizes.sets(0))]
        first, wanted = sets[0], spec.run(on_host(sets[0]), "cpu")
        bounds = spec.bounds_of(self.variant, first)
        before = {name: np.copy(to_host(first[name])) for name in spec.writes if hasattr(first.get(name), "shape")}
        caches = {name for name, array in spec.arrays.items() if array.dtypes == CACHE}
        arrays = flat([*(value for name, value in first.items() if name not in caches), *wanted])
        moved = sum(getattr(array, "nbytes", 0) for array in arrays)

        def check(result: Any) -> float:
            found = [*flat([result]), *flat(first.get(name) for name in spec.writes)]
            compared = zip(found, wanted, bounds, strict=True)
            return max((error_within(to_host(x), y, bound) for x, y, bound in compared if bound is not None), default=0)

        def clear() -> None:
            for name, array in before.items():
                first[name][...] = sizes.xp.asarray(array)

        sets = [{**arguments, **spec.new_results(x, arguments)} for arguments in sets]
        return problem_of(self, sizes, calls_of(spec.function, sets), moved, check, clear)


def cases(op: str, size: dict[str, int]) -> list[AnyOperation]:
    """Every variant of an operation."""
    return [AnyOperation(op, variant, tuple(size.items())) for variant in SPECS[op].variants]


if __name__ == "__main__":
    parser = common.case_arguments(__doc__)
    parser.add_argument("op", choices=SPECS)
    parser.add_argument("size", nargs="*", metavar="NAME=NUMBER", help=", ".join(x.name for x in fields(Size)))
    args = parser.parse_args()
    size = {name: int(value) for name, _, value in (text.partition("=") for text in args.size)}
    sys.exit(common.run(args, cases(args.op, size)))
