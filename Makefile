# make demo: a first look.  make check: style and types.  make test: the tests.  make bench: how fast, on this machine.
# make long: schedules of many faults and sweeps over systems, models and edits. CI runs check, test and long.
# make precision: how far each precision drifts.  make docs: the pages that registries write.
# make controls: which figures pass for random weights, or for edits that do nothing.
# make chaos SCHEDULES=200 SEED=7: a thousand damages; runs under random faults, rows lost and doubled.  make scale: shards a second, a million shards.
PYTHON ?= python3
BIN := .venv/bin
RUNS ?= runs/demo

SCHEDULES ?= 20
SEED ?= 0

.PHONY: demo test check long bench precision scale chaos controls docs clean

.venv/.installed: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -qq --disable-pip-version-check --editable '.[scan,dev]'
	touch $@

demo: .venv/.installed
	@$(BIN)/headcount scan jobs/scans/demo/*.toml --set out=$(RUNS)
	@echo; echo 'Induction heads: at work on 25 tokens repeated, and resting on the first token where nothing repeats'
	@$(BIN)/headcount query $(RUNS) "SELECT model, label, induction_repeated, sink_repeated, sink_unrepeated, sink_text \
		FROM dormant_induction_heads WHERE induction_repeated >= 0.4"
	@echo; echo 'Sink heads: attention to the first token against chance, its value vector and residual stream against the others'
	@$(BIN)/headcount query $(RUNS) "SELECT model, input_family, label, sink_mass, chance, value_norm_ratio, resid_pre_norm_ratio \
		FROM sink_heads WHERE rank <= 2 AND input_family <> 'repeated_random'"
	@echo; echo 'Previous-token heads: what the induction heads are built on'
	@$(BIN)/headcount query $(RUNS) "SELECT model, label, mean_previous_token_score, mean_entropy, mean_mean_distance \
		FROM by_head WHERE input_family = 'uniform_random' AND mean_previous_token_score > 0.9"
	@echo; $(BIN)/headcount report $(RUNS) -o report.html

check: .venv/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

# Three test processes on two cores: many tests wait for Ray, a server or a browser. The tests start a hundred processes.
# Bytecode is written even where PYTHONDONTWRITEBYTECODE is set, or each of them would compile the project again.
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder

test: .venv/.installed
	$(PYTEST)

long: .venv/.installed
	$(PYTEST) -m long

bench: .venv/.installed
	$(BIN)/python -m benchmarks.bench

precision: .venv/.installed
	$(BIN)/python -m benchmarks.precision_drift

scale: .venv/.installed
	$(BIN)/python -m benchmarks.scale
	$(BIN)/python -m benchmarks.fast_replica

chaos: .venv/.installed
	HEADCOUNT_DAMAGES=1000 $(BIN)/python -m pytest -q tests/test_damage.py -k no_damage_is_returned
	@$(BIN)/python -m tests.chaos --schedules $(SCHEDULES) --seed $(SEED)

controls: .venv/.installed
	$(BIN)/python -m reproduce.controls $(SYSTEM)

docs: .venv/.installed
	$(BIN)/python -m schemas.formula_pages
	$(BIN)/python -m workers.edit_and_input_pages
	$(BIN)/python -m reproduce.systems_page
	$(BIN)/python -m reproduce.coverage
	$(BIN)/python -m exports.exports_page
	$(BIN)/python -m tests.reference_pages
	$(BIN)/python -m benchmarks.page

clean:
	rm -rf .venv build runs report.html
