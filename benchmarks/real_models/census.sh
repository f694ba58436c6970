#!/bin/bash
# Measures what docs/census/README.md publishes of two public models, and writes its Parquet files:
#   bash census.sh BIN FOLDER RUNS FILES
# BIN has `headcount`, FOLDER the models and the texts. A second call goes on where the first was stopped.
set -euo pipefail
bin=$1 folder=$2 runs=$3 files=$4
scans=$(realpath "$(dirname "$0")/../../jobs/scans/real")
mkdir -p "$files"
runs=$(realpath -m "$runs") files=$(realpath "$files")
cd "$folder"
PATH=$bin:$PATH

for model in SmolLM2-135M-Instruct.Q4_1.gguf gemma-3-270m.Q4_K_M.gguf; do
	of_this=(--set "model=$model" --set "out=$runs")
	headcount scan "$scans"/text.toml "${of_this[@]}" --set n_ctx=512 \
		--set 'statistics=["standard","sink_resid_post_massive","sink_resid_post_top3"]'
	headcount scan "$scans"/repeats.toml "${of_this[@]}"
	run=$(headcount scan "$scans"/effects.toml "${of_this[@]}")
	headcount calibrate "$run" --heads 8 --sequences 16
done
# Calibrations measure heads under interventions, which no head of the census is.
headcount query "$runs" "FROM head_summaries WHERE run_id NOT LIKE '%-calibration-%'" -o "$files/head_summaries.parquet"
for query in layer_norms calibrated_effects effect_calibration; do
	headcount query "$runs" $query -o "$files/$query.parquet"
done
