#!/bin/sh
# compute-sanitizer over operations with arguments of any value (tests/fuzz_device.py). Fails on a finding. Arguments go
# to the script: tools/sanitize.sh --ops attention --rounds 5; TOOLS says which of its tools.
set -e
PYTHONPATH=$PWD/tests${PYTHONPATH:+:$PYTHONPATH}
export PYTHONPATH
for tool in ${TOOLS:-memcheck initcheck racecheck synccheck}; do
    echo "== $tool"
    options=
    [ "$tool" != racecheck ] || options="--define EVERY_LANE_ARRIVES" # see sm90/hopper.cuh
    # shellcheck disable=SC2086
    compute-sanitizer --tool "$tool" --report-api-errors no --error-exitcode 1 python3 tests/fuzz_device.py $options "$@"
done
