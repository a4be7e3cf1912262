#!/bin/sh
# What a device has to show, in one run: the tests, then each benchmark, then the replay. Logs and the benchmarks' JSON
# go to DIR; the last lines of each are printed. Parts go on where one fails, each within its own time.
#
#     tools/with_cumla.sh tools/device_proof.sh DIR [PART ...]     parts: tests cache indices metadata decode interop mla replay
[ $# -gt 0 ] || { sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"; exit 2; }
dir=$1
shift
mkdir -p "$dir"
failed=

part() { # name, seconds, lines, command ...
    name=$1 seconds=$2 lines=$3
    shift 3
    start=$(date +%s)
    timeout "$seconds" "$@" >"$dir/$name.txt" 2>&1
    status=$?
    [ $status = 0 ] || failed="$failed $name"
    printf '\n== %s: exit %d, %d s\n' "$name" $status $(($(date +%s) - start))
    grep -E '^(FAILED|ERROR)' "$dir/$name.txt" | cut -c1-160 | head -40
    tail -n "$lines" "$dir/$name.txt" | cut -c1-150
}

for name in ${*:-tests cache indices metadata decode interop mla replay}; do
    case $name in
    tests) part tests 240 3 python3 -m pytest -m gpu -q --tb=short --durations=15 ;;
    replay)
        part replay128 60 40 python3 -m cumla replay --heads 128 --requests 6 --cache-tokens 80000 --json "$dir/replay128.json"
        part replay64 60 40 python3 -m cumla replay --heads 64 --requests 6 --cache-tokens 80000 --json "$dir/replay64.json"
        part replay_mla 60 40 python3 -m cumla replay --layers mla --requests 6 --cache-tokens 80000 --json "$dir/replay_mla.json"
        ;;
    *) part "$name" 90 60 python3 "benchmarks/$name.py" --json "$dir/$name.json" ;;
    esac
done
[ -z "$failed" ] || { printf '\nfailed:%s\n' "$failed"; exit 1; }
