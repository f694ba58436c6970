#!/bin/bash
# What a person does first with a model of their own, as `make real` has it done with public ones:
#   bash first_look.sh BIN FOLDER MODEL RUNS
# BIN has `headcount`, FOLDER the model and the texts; a second call goes on where the first was stopped.
set -euo pipefail
bin=$1 folder=$2 model=$3 runs=$4
scans=$(realpath "$(dirname "$0")/../../jobs/scans/real")
cd "$folder"
PATH=$bin:$PATH

step() { printf '\n%s\n$ headcount %s\n' "$1" "${*:2}"; headcount "${@:2}"; }
of_this=(--set "model=$model" --set "out=$runs")

step 'Where do heads rest, and what do they copy?' scan "$scans"/{text,repeats}.toml "${of_this[@]}"
step 'Sink heads: attention to the first token, and what lies there against what lies elsewhere' query "$runs" "
SELECT label, sink_mass, uniform_baseline, value_norm_ratio, resid_pre_norm_ratio FROM sink_heads
WHERE input_family = 'text' AND intervention = 'none' AND rank <= 5"
step 'Induction heads, on 25 random tokens that stand twice' query "$runs" "
SELECT label, induction_score, uniform_baseline FROM induction_heads
WHERE input_family = 'repeated_random' AND intervention = 'none' AND rank <= 5"
step 'Which heads does the loss of text need?' scan "$scans"/effects.toml "${of_this[@]}"
step 'Are the estimates true? Six heads are measured' calibrate "$(echo "$runs"/run_id=effects-????????)" --heads 6
step 'How far the estimates hold' query "$runs" "
SELECT statistic, heads, spearman, slope FROM effect_calibration WHERE layer IS NULL"
test -e "$runs"/duo ||
step 'Which KV heads must keep the whole cache?' export duo "$runs" --model "$model" -o "$runs"/duo \
	--set sequences=16 --set n_ctx=512 --check --check-sequences 2
step 'All of it on one page' report "$runs" -o "$runs"/report.html
