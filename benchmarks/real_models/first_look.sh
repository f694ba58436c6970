# What a person does first with a model of their own: bash first_look.sh MODEL RUNS, where MODEL is a name in this directory.
# make real calls it in the folder of the models; `headcount` is on the PATH.
set -euo pipefail
model=$1 runs=$2 scans=$(dirname "$(realpath "$0")")/../../jobs/scans/real

step() { printf '\n\033[1m%s\033[0m\n' "$1"; shift; printf '$ headcount %s\n' "$*"; headcount "$@"; }

step 'Where do heads rest, and what do they copy?' scan "$scans"/{text,repeats}.toml --set model="$model" --set out="$runs"
step 'Sink heads: attention to the first token' query "$runs" "
SELECT label, sink_mass, uniform_baseline, value_norm_ratio, resid_pre_norm_ratio FROM sink_heads
WHERE input_family = 'text' AND rank <= 5"
step 'Induction heads, on 25 random tokens that stand twice' query "$runs" "
SELECT label, induction_score, uniform_baseline FROM induction_heads WHERE input_family = 'repeated_random' AND rank <= 5"
step 'Which heads does the loss of text need?' scan "$scans"/effects.toml --set model="$model" --set out="$runs"
step 'Are the estimates true?' calibrate "$runs"/run_id=effects-* --heads 12
step 'How the estimates hold, by what was measured' query "$runs" "
SELECT statistic, heads, spearman, slope FROM effect_calibration WHERE layer IS NULL"
step 'Which heads must keep the whole cache?' export duo "$runs" --model "$model" -o "$runs"/duo --check --check-sequences 2
step 'All of it on one page' report "$runs" -o "$runs"/report.html
