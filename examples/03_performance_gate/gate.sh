#!/usr/bin/env bash
# Measure, compare with baseline.json, fail where it became worse. --save makes the baseline of three runs.
#
#   URL            the service (default: the embedded engine, started and stopped here)
#   REQUESTS       of a run (default 40)
set -euo pipefail

cd "$(dirname "$0")"
whywait=${WHYWAIT:-whywait}
out=${OUT:-$(mktemp -d)}
baseline=${BASELINE:-baseline.json}
load=(--concurrency 4 --requests "${REQUESTS:-40}" --prompt-tokens 32 --output-tokens 16 --slo ttft=2s,tpot=200ms)

if [ -z "${URL:-}" ]; then
  name=performance-gate-$$
  trap '"$whywait" engine stop "$name" > /dev/null' EXIT
  URL=$("$whywait" engine start "$name" --slots 4 --json | python3 -c 'import json, sys; print(json.load(sys.stdin)["url"])')
fi

if [ "${1:-}" = --save ]; then
  for i in 1 2 3; do "$whywait" run "$URL" "${load[@]}" --out "$out/run-$i" > /dev/null; done
  "$whywait" compare --save-baseline "$baseline" "$out/run-1" "$out/run-2" "$out/run-3"
else
  "$whywait" run "$URL" "${load[@]}" --out "$out/new" > /dev/null
  "$whywait" compare "$baseline" "$out/new" --html "$out/compare.html" --fail-if 'goodput<-20%' --fail-if 'tpot_ms.p50>+20%'
fi
