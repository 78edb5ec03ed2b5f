#!/usr/bin/env bash
# Simulate a service, ask what a change would do to it, what it costs, which hardware to take, and how the verdicts did on
# kept runs: no engine, no GPU, nothing is sent to anybody. What it makes is left in a temporary folder.
# Every command is on a line of its own (or goes on with \): tools/golden.py compares their output with expected.txt.
set -euo pipefail
exam=$(cd "$(dirname "$0")/../../exam" && pwd)
cd "$(mktemp -d)" && ln -s "$exam" exam && echo "in $PWD" >&2

whywait simulate --machine h100 --model llama-3.1-8b --concurrency 4,32 --requests 64 \
  --prompt-tokens 'lognormal(300,0.6)' --output-tokens 'lognormal(60,0.5)' --slo ttft=1s,tpot=40ms --draws 8 --jobs 1 --out run

whywait show run --fail-if 'goodput_share<0.5'

whywait what-if run --apply max-seqs=8 --seeds 4

whywait bill run --price-per-hour 2.5 --currency EUR --price-date 2026-11-01

whywait plan --model llama-3.1-8b --machines l40s,h100 --layouts tp=1 --rate 4 --prompt-tokens 300 --output-tokens 60 \
  --slo ttft=1s,tpot=40ms --price-per-hour l40s=0.9,h100=2.5 --currency EUR --price-date 2026-11-01 --draws 2 --jobs 1 --out plan

whywait exam score exam --cases 'llama-slots-*'

whywait show exam/llama-slots-1-of-8
