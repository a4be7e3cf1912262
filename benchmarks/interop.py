"""The cost of calls with a framework's arrays: host time of a call in addition to the bare launch, and copies.

    python benchmarks/interop.py [--json benchmarks/results/h200/interop.json] [--only TEXT]

`us` is the time of one call with preallocated outputs, for each framework in turn; decodes are also run by FlashMLA
(framework_calls.py). Copies are memory copies and sets that CUPTI counts during such a call. They are
counted last, because CUPTI slows down all later launches.
"""

import common
import recorded

from cumla.bench.problem import Sizes


def copies(_):
    """Memory copies and sets of a call, by call and framework."""
    if not common.has_peer("torch"):
        return {}
    import cupy
    import torch

    found = {}
    for case in recorded.interop():
        for impl, (_, (call,)) in case.problem(Sizes("cuda")).impls.items():
            call()
            cupy.cuda.Device().synchronize()
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
                for _ in range(4):
                    call()
                cupy.cuda.Device().synchronize()
            names = [event.name for event in profiler.events()]
            counts = (sum(kind in name for name in names) / 4 for kind in ("Memcpy", "Memset"))
            found[f"{case.op} {case}, {impl}"] = dict(zip(("copies", "memsets"), counts, strict=True))
    return found


if __name__ == "__main__":
    raise SystemExit(common.run(common.case_arguments(__doc__).parse_args(), recorded.interop(), copies=copies))
