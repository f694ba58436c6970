# make demo: a first look.  make test: what a pull request must pass.  make bench: how fast, on this machine.
PYTHON ?= python3
BIN := .venv/bin
RUNS ?= runs/demo

.PHONY: demo test check bench docs clean

.venv/.installed: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[dev]'
	touch $@

demo: .venv/.installed
	$(BIN)/headcount scan jobs/scans/demo/*.toml --set out=$(RUNS)
	@echo; echo '— Induction heads, on 25 tokens repeated and on 50 that are not: without anything to copy they rest on the first token'
	$(BIN)/headcount query $(RUNS) dormant_induction_heads --limit 8
	@echo; echo '— Sink heads, reading text'
	$(BIN)/headcount query $(RUNS) "FROM sink_heads WHERE input_family = 'text'" --limit 6
	@echo; echo '— Value vectors at the sink: short where attention rests'
	$(BIN)/headcount query $(RUNS) "FROM sink_values WHERE input_family = 'text'" --limit 6
	$(BIN)/headcount report $(RUNS) -o report.html

check: .venv/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

test: check
	$(BIN)/python -m pytest

bench: .venv/.installed
	$(BIN)/python -m benchmarks.bench

docs: .venv/.installed
	$(BIN)/python -m schemas.statistics.page

clean:
	rm -rf .venv runs report.html
