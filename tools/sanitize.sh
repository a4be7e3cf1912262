#!/bin/sh
# compute-sanitizer over cache and index operations with arguments of any value (tests/fuzz_device.py). Fails on a
# finding. Arguments go to the script: tools/sanitize.sh --backend numba_cuda --rounds 5
set -e
PYTHONPATH=$PWD/tests${PYTHONPATH:+:$PYTHONPATH}
export PYTHONPATH
for tool in memcheck initcheck racecheck; do
    echo "== $tool"
    compute-sanitizer --tool "$tool" --error-exitcode 1 python3 tests/fuzz_device.py "$@"
done
