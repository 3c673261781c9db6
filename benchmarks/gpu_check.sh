#!/usr/bin/env bash
# All of one GPU in three turns, for machines that are lent by the call.
#
#   bash benchmarks/gpu_check.sh right|fast|compared|open|tiny [WHEELS]
#
# The turn open is all that no GPU has shown yet, the most important first, in $LIMIT seconds (420). Call it again, with
# the folder of the call before as $DONE, for what was left: parts and cells of tables that were found are not repeated.
# WHEELS: a folder of wheels that the machine lacks, installed beside the repository without a network. What is found
# goes to $OUT (else the working folder) as gpu_check-TURN/gpu_check.jsonl and .md. Exit code 1: a result was wrong.
# The turn tiny runs every part on a model of nothing, without a GPU. $PYTHON: another python3.
set -euo pipefail
cd "$(dirname "$0")/.."
turn=${1:?right, fast, compared, open or tiny}
wheels=${2:-} python=${PYTHON:-python3}
if [ -n "$wheels" ]; then
  "$python" -m pip install --quiet --no-index --no-deps --no-compile --target .site "$wheels"/*.whl
fi
export PYTHONPATH=.site:src:. PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
export TORCHINDUCTOR_COMPILE_THREADS=${TORCHINDUCTOR_COMPILE_THREADS:-1}  # parts run together, each compiles little
options=()
case $turn in
  right) parts=(facts exact waits guarantees crashes quantised learns) ;;
  fast) parts=(facts decode training memory "decode without Liger" "training without Liger") ;;
  compared) parts=(step "against TRL") ;;
  open) parts=(facts kernels exact guarantees decode sharing training hybrid fits rates "fits TRL" "against TRL")
    options=(--limit "${LIMIT:-420}" ${DONE:+--done "$DONE"}) ;;
  tiny) parts=() options=(--tiny) ;;
  *) echo "right, fast, compared, open or tiny, got $turn" >&2; exit 2 ;;
esac
exec "$python" -m benchmarks.checks.gpu_check "${options[@]}" --out "${OUT:-.}/gpu_check-$turn" "${parts[@]}"
