#!/bin/sh
# What a device has to show, in one run: the tests, the sanitizers, each benchmark, the replay. A line a part is printed,
# and what failed; logs and JSON are in DIR/proof.tgz. Parts go on where one fails, each within its own time.
#
#     tools/with_cumla.sh tools/device_proof.sh DIR [PART ...]
#
# Parts: tests sanitize fences check decode poisoned prefill prefill_chunks indexer compressor layers mla
# attention_backends cache indices metadata interop replay (all of them, in this order: about 12 minutes); by
# name alone parallel, on a machine with several GPUs
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
    # As it goes, or a run that is cut short leaves nothing.
    tar czf "$dir/$name.part" -C "$logs" . && mv "$dir/$name.part" "$dir/proof.tgz"
}

replay() { # name, options ...
    name=$1
    shift
    part "$name" 120 0 python3 -m cumla replay --requests 6 --cache-tokens 80000 --json "$logs/$name.json" "$@"
}

for name in ${*:-tests sanitize fences check decode poisoned prefill prefill_chunks indexer compressor layers mla attention_backends cache indices metadata interop replay}; do
    case $name in
    tests) part tests 240 1 python3 -m pytest -m gpu -q --tb=short -p no:cacheprovider ;;
    sanitize)
        TOOLS="memcheck initcheck racecheck synccheck" part sanitize_attention 150 2 tools/sanitize.sh --ops attention --rounds 2
        TOOLS="memcheck initcheck racecheck" part sanitize_indexer 60 2 tools/sanitize.sh --ops indexer --rounds 3
        TOOLS="memcheck initcheck racecheck" part sanitize_caches 60 2 tools/sanitize.sh --rounds 5
        TOOLS="memcheck initcheck racecheck" part sanitize_layers 60 2 tools/sanitize.sh --ops layers --rounds 5
        TOOLS="memcheck racecheck" part sanitize_numba 60 2 tools/sanitize.sh --backend numba_cuda --rounds 1
        ;;
    fences) PYTHONPATH=$PWD/tests:$PYTHONPATH part fences 120 24 python3 tests/fences_device.py ;;
    check) # what Numba compiles takes a minute each, so side by side: these are no timings
        part check 150 1 python3 -m cumla check &
        replay replay_numba --backend numba_cuda &
        replay replay_mla_one_head --layers mla --heads 1 &
        wait
        ;;
    replay)
        replay replay128 --heads 128
        replay replay64 --heads 64
        replay replay_mla --layers mla
        replay replay_v4 --layers v4
        replay replay_v32 --layers v32
        ;;
    prefill) part prefill 150 0 python3 benchmarks/prefill.py --json "$logs/prefill.json" ;;
    *) part "$name" 90 0 python3 "benchmarks/$name.py" --json "$logs/$name.json" ;;
    esac
done
failed=$(cat "$logs/failed" 2>/dev/null | tr '\n' ' ')
rm -rf "$logs"
[ -z "$failed" ] || { printf 'failed: %s\n' "$failed"; exit 1; }
