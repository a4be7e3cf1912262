#!/bin/sh
# Run fuzzed operations (tests/fuzz_device.py) under compute-sanitizer. Fails on a finding. Arguments are passed to the
# script: tools/sanitize.sh --ops attention --rounds 5; TOOLS selects compute-sanitizer's tools.
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
