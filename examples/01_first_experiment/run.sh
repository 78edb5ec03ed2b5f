#!/usr/bin/env bash
# The classic first experiment: 32 requests at concurrency 8, then 1, 4, 16, 32; 256 output tokens, temperature 0.
#
#   ./run.sh                     on the embedded engine, full size
#   ./run.sh --quick             32 output tokens and fewer requests (about two minutes)
#   ./run.sh URL                 on a service that runs already
#   ./run.sh --launch 'vllm serve MODEL'    start that engine, measure it, stop it
set -euo pipefail

whywait=${WHYWAIT:-whywait}
out=${OUT:-whywait-runs/first-experiment-$(date +%Y%m%d-%H%M%S)}
tokens=256 prompt=64 requests=32 note="about 15 minutes on one CPU thread"
service=()
while [ $# -gt 0 ]; do
  case $1 in
    --quick) tokens=32 prompt=32 requests=16 note="about two minutes on one CPU thread" ;;
    --launch) service=(--launch "$2"); shift ;;
    *) service=("$1") ;;
  esac
  shift
done
echo "first experiment: $requests requests a point, $tokens output tokens; $note" >&2

if [ ${#service[@]} -eq 0 ]; then
  name=first-experiment-$$
  trap '"$whywait" engine stop "$name" > /dev/null' EXIT
  url=$("$whywait" engine start "$name" --slots 8 --json | python3 -c 'import json, sys; print(json.load(sys.stdin)["url"])')
  service=("$url")
fi

"$whywait" run "${service[@]}" --concurrency 8 --requests "$requests" --out "$out/concurrency-8" \
  --prompt-tokens "$prompt" --output-tokens "$tokens" --slo ttft=2s,tpot=200ms
"$whywait" sweep "${service[@]}" --concurrency 1,4,16,32 --requests "$requests" --out "$out/sweep" \
  --prompt-tokens "$prompt" --output-tokens "$tokens" --slo ttft=2s,tpot=200ms
