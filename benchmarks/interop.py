"""What it costs to come from a framework: the host's time of a call over the bare launch, and copies.

    python benchmarks/interop.py [--json benchmarks/results/h200/interop.json] [--only TEXT]

`us` is of one call whose outputs are given, by framework, in turn; decodes also by FlashMLA
(cumla/bench/framework_calls.py). Copies: memory copies and sets that CUPTI sees while such a call runs; these come
last, since CUPTI slows launches down from then on.
"""

import common
import recorded

from cumla.bench.problem import Sizes


def copies(_):
    """By call and framework, memory copies and sets of a call."""
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
