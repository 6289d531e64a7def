#!/usr/bin/env bash
# Half an hour on a host with two GPUs, in calls of at most ten minutes: what docs/benchmarks.md reports, and what is to be measured next.
# gpu_session.sh says what has to be there.
#
#   bash benchmarks/gpu_pair.sh first KIT      0: install, the 7 B target, drafts and suffix, a step of each mode   1: heads, a parallel draft
#   bash benchmarks/gpu_pair.sh second         0: `specbatch tune`                1: the same modes at more loads, and a step at 16
#   bash benchmarks/gpu_pair.sh third          0: `tune` goes on, then `bench`    1: bulk: LLM.generate, then the whole system
#   bash benchmarks/gpu_pair.sh fourth         0: EAGLE-3 K by K                  1: two other drafts
#   bash benchmarks/gpu_pair.sh fifth          0: wider graphs                    1: n-grams K by K
#
# $OUT/results.tgz holds everything so far, packed again every few seconds: a call that is cut short keeps what it has.
set -uo pipefail
repository=$(cd "$(dirname "$0")/.." && pwd)
home=${GPU_HOME:-$HOME/gpu}
kept=$home/results
mkdir -p "$kept"

keep() {
    tar -C "$home" -czf "$OUT/.new.$BASHPID.tgz" results && mv "$OUT/.new.$BASHPID.tgz" "$OUT/results.tgz"
}

on() { # GPU COMMAND...: a command of gpu_session.sh
    local gpu=$1
    shift
    CUDA_VISIBLE_DEVICES=$gpu OUT=${RESULTS:-$kept} bash "$repository/benchmarks/gpu_session.sh" "$@" 2>&1 |
        while IFS= read -r line; do echo "$gpu ${SECONDS}s $line"; done
}

head_and_text() {
    TEXT_MINUTES=${TEXT_MINUTES:-2.2} TEXT_ROWS=${TEXT_ROWS:-1024} NAME=eagle3-early on 1 train 3 "${EARLY_MINUTES:-0.3}" --rows 64
    touch "$home/early"
    on 1 train parallel "${HEAD_MINUTES:-4.5}" --rows 64 &
    for lr in 1e-3 3e-3; do
        NAME=eagle3-$lr on 1 train 3 "${HEAD_MINUTES:-4.5}" --rows 64 --lr "$lr" &
    done
    wait
    python3 - "$kept" "$home" <<'P'
import json, pathlib, shutil, sys
kept, home = map(pathlib.Path, sys.argv[1:])
lines = {file: file.read_text().splitlines() for file in kept.glob("train-eagle3-*e-3.json")}
told = {file: json.loads(text[-1])["trained"] for file, text in lines.items() if text}
best = max(told, key=lambda file: sum(told[file])).stem.removeprefix("train-")
shutil.copytree(home / best, kept / "eagle3", dirs_exist_ok=True)
shutil.copytree(home / f"{best}-big", home / "eagle3-big", dirs_exist_ok=True)
print("the better head:", best, told, flush=True)
P
}

first() {
    mkdir -p "$home"
    on 0 unpack "$1" || exit 1
    head_and_text &
    local training=$!
    on 0 widen
    RESULTS=$kept/drafts KV_GIB=20 LOADS=1,4,16,64 on 0 modes plain draft-4 suffix-16
    until [ -f "$home/early" ]; do sleep 1; done
    EAGLE=$home/eagle3-early-big on 0 profile plain ngram-4 draft-4 eagle3-4
    wait $training
}

second() {
    mkdir -p "$home/runs1" "$home/cache" # with what was compiled already
    cp -r "$home"/runs0/{plain,ngram-4,eagle3-4} "$home/runs1/"
    for name in plain ngram-4 eagle3-4; do cp -rn "$home/runs0/$name/cache/." "$home/cache/"; done
    (
        KV_GIB=20 on 1 modes plain ngram-4 eagle3-4
        LOAD=16 on 1 profile plain ngram-4 eagle3-4
    ) &
    local measuring=$!
    tuned "${TUNE_MINUTES:-9.3}"
    wait $measuring
}

third() {
    RESULTS=$kept/bulk ROWS=${ROWS:-5000} on 1 bulk generate system &
    local measuring=$!
    tuned "${TUNE_MINUTES:-6}"
    wait $measuring
}

fourth() {
    RESULTS=$kept/ks KV_GIB=6 LOADS=1,4,16 on 0 modes plain eagle3-1 eagle3-2 eagle3-3 eagle3-5 &
    local measuring=$!
    DRAFT=$home/parallel RESULTS=$kept/parallel KV_GIB=6 LOADS=1,4,16 on 1 modes plain draft-4 draft-8
    DRAFT=$home/draft-half RESULTS=$kept/half KV_GIB=6 LOADS=1,4,16 on 1 modes plain draft-2 draft-4
    wait $measuring
}

fifth() {
    RESULTS=$kept/wide KV_GIB=20 LOADS=64,128,256 on 0 modes plain-wide ngram-4-wide eagle3-4-wide &
    local measuring=$!
    RESULTS=$kept/ks1 KV_GIB=6 LOADS=1,4,16 on 1 modes plain ngram-3 ngram-5 ngram-8
    wait $measuring
}

tuned() {
    SPECBATCH_MODES=plain,ngram,eagle3 on 0 tune "$1" --loads 1,4,16,64,256
    SPECBATCH_MODES=plain,ngram,eagle3 on 0 bench 0.05 --loads 1,4,16,64,256
}

(while sleep 8; do keep; done) &
keeping=$!
trap 'kill $keeping 2> /dev/null' EXIT # whoever waits for this script's output waits for that loop too
"$@"
cp "$home/tuned/specbatch.db" "$kept/tuned.db" 2> /dev/null
keep
