#!/bin/sh
# Check a device in one run: tests, sanitizers, every benchmark, replay. Prints a line for each part, and its failures;
# logs and JSON are in DIR/proof.tgz; the tests' log names each test, also of a run that was cut off. A part that fails or exceeds its
# time limit does not stop the others.
#
#     tools/with_cumla.sh tools/device_check.sh DIR [PART ...]
#
# Parts: correct (tests, sanitizers, check and small replays, in parallel: no timings, 5 to 9 minutes depending on the
# number of cores) fences decode formats prefill indexer compressor layers mla attention_backends cache
# indices metadata interop replay (all of them, in this order: about 12 minutes); only when named: tests, soak (operations
# repeated for two minutes, bitwise), trace (10 minutes, OPTIONS in TRACE), portable, page_groups, residency,
# export (10 minutes), or parallel, on a machine with several GPUs
[ $# -gt 0 ] || { sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"; exit 2; }
dir=$1
shift
logs=$(mktemp -d)
mkdir -p "$dir"

part() { # name, seconds, lines to show, command ...
    name=$1 seconds=$2 lines=$3
    shift 3
    start=$(date +%s)
    timeout "$seconds" "$@" >"$logs/$name.txt" 2>&1
    status=$?
    [ $status = 0 ] || { echo "$name" >>"$logs/failed"; lines=$((lines + 5)); }
    printf '== %s: exit %d, %d s\n' "$name" $status $(($(date +%s) - start))
    grep -E '^(FAILED|ERROR)' "$logs/$name.txt" | cut -c1-160 | head -20
    tail -n "$lines" "$logs/$name.txt" | cut -c1-150
    # After every part, so that an interrupted run leaves its results.
    tar czf "$dir/$name.part" -C "$logs" . 2>/dev/null
    mv "$dir/$name.part" "$dir/proof.tgz"
}

replay() { # name, options ...
    name=$1
    shift
    part "$name" 120 0 python3 -m cumla replay --requests 6 --cache-tokens 80000 --json "$logs/$name.json" "$@"
}

sanitize() { # name, tools, rounds, operations
    part "sanitize_$1" 240 1 env TOOLS="$2" tools/sanitize.sh --rounds "$3" --ops "$4"
}

correct() {
    part tests 540 1 python3 -m pytest -m gpu -v --tb=short -p no:cacheprovider &
    part check 240 1 python3 -m cumla check & # Numba compiles for a minute
    replay replay_numba --backend numba_cuda &
    replay replay_mla_one_head --layers mla --heads 1 &
    sanitize attention_memory "memcheck initcheck" 1 attention &
    sanitize attention_race racecheck 1 attention &
    sanitize attention_sync synccheck 1 attention &
    sanitize indexer "memcheck initcheck racecheck" 2 indexer &
    sanitize caches "memcheck initcheck racecheck" 3 caches &
    sanitize layers "memcheck racecheck" 2 layers &
    sanitize layers_sync "initcheck synccheck" 1 layers &
    part sanitize_numba 240 1 env TOOLS="memcheck racecheck" tools/sanitize.sh --backend numba_cuda --rounds 1 &
    wait
}

for name in ${*:-correct fences decode formats prefill indexer compressor layers mla attention_backends cache indices metadata interop replay}; do
    case $name in
    correct) correct ;;
    tests) part tests 480 1 python3 -m pytest -m gpu -v --tb=short -p no:cacheprovider ;;
    fences) part fences 120 24 env PYTHONPATH="$PWD/tests:$PYTHONPATH" python3 tests/fences_device.py ;;
    soak) part soak 300 32 env PYTHONPATH="$PWD/tests:$PYTHONPATH" python3 tests/soak_device.py ;;
    replay)
        replay replay128 --heads 128
        replay replay64 --heads 64
        replay replay_mla --layers mla
        replay replay_v4 --layers v4
        replay replay_v32 --layers v32
        replay replay_v41 --layers v41 --requests 12 --max-output 6 --cache-tokens 200704
        ;;
    trace) part trace 590 60 python3 -m benchmarks.trace $TRACE --json "$logs/trace.json" ;; # split into options
    export) part export 590 0 python3 benchmarks/export.py --json "$logs/export.json" ;;
    layers) part layers 240 0 python3 benchmarks/layers.py --json "$logs/layers.json" ;;
    page_groups | residency) part "$name" 240 0 python3 "benchmarks/$name.py" --json "$logs/$name.json" ;;
    interop | parallel) part "$name" 90 0 python3 "benchmarks/$name.py" --json "$logs/$name.json" ;;
    decode | formats | prefill | indexer | cache | portable)
        part "$name" 240 0 python3 benchmarks/operations.py "$name" --json "$logs/$name.json" ;;
    *) part "$name" 90 0 python3 benchmarks/operations.py "$name" --json "$logs/$name.json" ;;
    esac
done
failed=$(cat "$logs/failed" 2>/dev/null | tr '\n' ' ')
rm -rf "$logs"
[ -z "$failed" ] || { printf 'failed: %s\n' "$failed"; exit 1; }
