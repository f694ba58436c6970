# make demo: a first look.  make real: two public models, fetched once and looked at.  make check: style and types.  make test: the tests.  make bench: how fast, on this machine.
# make long: schedules of many faults and sweeps over replications, models and interventions. CI runs check, test and long.
# make precision: how far each precision drifts.  make docs: the pages that registries write.
# make controls: which figures pass for random weights, or for interventions that do nothing.
# make constraints: the versions of every install, anew, and the digests of what the image installs.
# make chaos SCHEDULES=200 DEATHS=1000 SEED=7: a thousand damages; runs on Ray under faults, and under kill -9 on a disk and in a store.  make scale: shards a second, a million shards.
PYTHON ?= python3
BIN := .venv/bin
RUNS ?= runs/demo
# Where public models lie, outside of the project; make long compares them where they are.
REAL ?= $(HOME)/.cache/headcount/real
export HEADCOUNT_REAL := $(REAL)

SCHEDULES ?= 20
DEATHS ?= 200
SEED ?= 0

.PHONY: demo real test check long vllm engines bench precision scale chaos controls docs constraints clean

# Libraries arrive without bytecode, and each command would compile them anew. The others lead to libraries outside of .venv.
unexport PYTHONDONTWRITEBYTECODE PYTHONPATH PYTHONHOME VIRTUAL_ENV

# make demo TORCH=cpu: PyTorch's build for CPUs, from download.pytorch.org, which saves gigabytes. Any word of uv's --torch-backend.
TORCH ?=

# Installs $1 in the versions of the constraints: with uv in seconds; with pip in minutes, where uv cannot be had or fails.
# uv does not read pip's settings, so it is told where pip would look.
CONSTRAINTS := deploy/constraints.txt
pip_looks = "$$(echo $${UV_$1:-$${PIP_$2:-$$($(BIN)/pip config get global.$3 2>/dev/null)}} | tr ' ' ,)"
install = $(BIN)/pip install -qq --disable-pip-version-check 'uv>=0.9,<1' && \
	UV_DEFAULT_INDEX=$(call pip_looks,DEFAULT_INDEX,INDEX_URL,index-url) \
	UV_FIND_LINKS=$(call pip_looks,FIND_LINKS,FIND_LINKS,find-links) \
	$(BIN)/uv pip install -q --python .venv $(if $(TORCH),--torch-backend $(TORCH)) -c $(CONSTRAINTS) $1 || \
	{ test -z '$(TORCH)' && echo 'pip installs instead of uv, which takes minutes' && \
	$(BIN)/pip install -qq 'pip>=25.1' && $(BIN)/pip install -qq -c $(CONSTRAINTS) $1; }

# An install that is interrupted leaves .installing behind; then the next one starts from nothing.
.venv/.installed: pyproject.toml $(CONSTRAINTS)
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("needs Python 3.11 or newer: make demo PYTHON=python3.12")'
	@echo 'installing into .venv'
	@test ! -e .venv/.installing || rm -rf .venv
	@mkdir -p .venv && touch .venv/.installing
	@$(PYTHON) -m venv .venv
	@$(call install,--editable '.[scan]')
	@mv .venv/.installing $@

# What only developers need.
.venv/.tools: .venv/.installed
	@mv .venv/.installed .venv/.installing
	@$(call install,--group dev)
	@mv .venv/.installing .venv/.installed
	@touch $@

constraints: .venv/.tools
	UV_FIND_LINKS= $(BIN)/uv pip compile -q --upgrade --universal --all-extras --group dev --no-annotate \
		--custom-compile-command 'make constraints' pyproject.toml -o $(CONSTRAINTS)
	UV_FIND_LINKS= $(BIN)/uv pip compile -q --generate-hashes --python-version 3.11 --python-platform linux --no-annotate \
		--custom-compile-command 'make constraints' deploy/requirements.txt -o deploy/requirements.lock

demo: .venv/.installed
	@$(BIN)/headcount scan jobs/scans/demo/*.toml --set out=$(RUNS)
	@echo; echo 'Induction heads: at work on 25 tokens repeated, and resting on the first token where nothing repeats'
	@$(BIN)/headcount query $(RUNS) "SELECT model, label, induction_repeated, sink_repeated, sink_unrepeated, sink_text \
		FROM dormant_induction_heads WHERE induction_repeated >= 0.4"
	@echo; echo 'Sink heads: attention to the first token against the uniform baseline, its value vector and residual stream against the others'
	@$(BIN)/headcount query $(RUNS) "SELECT model, input_family, label, sink_mass, uniform_baseline, value_norm_ratio, resid_pre_norm_ratio \
		FROM sink_heads WHERE rank <= 2 AND input_family <> 'repeated_random'"
	@echo; echo 'Previous-token heads: what the induction heads are built on'
	@$(BIN)/headcount query $(RUNS) "SELECT model, label, mean_previous_token_score, mean_entropy, mean_mean_distance \
		FROM by_head WHERE input_family = 'uniform_random' AND mean_previous_token_score > 0.9"
	@echo; $(BIN)/headcount report $(RUNS) -o report.html

# Minutes on two cores for each of them; they are fetched once, 330 MB. MODELS='first second' takes others in that folder.
MODELS ?= SmolLM2-135M-Instruct.Q4_1.gguf gemma-3-270m.Q4_K_M.gguf
real: .venv/.tools
	@$(BIN)/python -m benchmarks.real_models.fetch $(REAL)
	@for model in $(MODELS); do \
		bash benchmarks/real_models/first_look.sh $(abspath $(BIN)) $(REAL) $$model $(abspath runs)/real/$$model || exit 1; done

check: .venv/.tools
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

# Three test processes on two cores: many tests wait for Ray, a server or a browser. The tests start a hundred processes.
PYTEST := $(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder

test: .venv/.tools
	$(PYTEST)

long: .venv/.tools
	$(PYTEST) -m long

# vLLM's build for CPUs, 3.1 GB, for tests/vllm. Its PyTorch is not on PyPI.
vllm: .venv-vllm/.installed
.venv-vllm/.installed: tests/vllm/requirements.txt .venv/.tools
	$(BIN)/uv venv -q --clear --python 3.11 .venv-vllm
	$(if $(PIP_FIND_LINKS),UV_FIND_LINKS=$(PIP_FIND_LINKS),UV_TORCH_BACKEND=cpu) \
		$(BIN)/uv pip install -q --no-deps --python .venv-vllm -r $<
	@touch $@

# mlx-lm and llama.cpp, for tests/engines. The latter is compiled, which takes minutes.
engines: .venv-mlx/.installed .venv-llama_cpp/.installed
.venv-%/.installed: tests/engines/%.txt .venv/.tools
	$(BIN)/uv venv -q --clear --python 3.11 .venv-$*
	$(BIN)/uv pip install --no-deps --python .venv-$* -r $<
	@touch $@

bench: .venv/.tools
	$(BIN)/python -m benchmarks.bench

precision: .venv/.tools
	$(BIN)/python -m benchmarks.at_scale.precision_drift

scale: .venv/.tools
	$(BIN)/python -m benchmarks.at_scale.scale
	$(BIN)/python -m benchmarks.at_scale.waiting replica

chaos: .venv/.tools
	HEADCOUNT_DAMAGES=1000 $(BIN)/python -m pytest -m '' tests/schemas/test_damage.py -k no_damage_is_read
	@$(BIN)/python -m tests.tools.random_deaths --schedules $(DEATHS) --seed $(SEED)
	@$(BIN)/python -m tests.tools.random_deaths --schedules $(DEATHS) --seed $(SEED) --store
	@$(BIN)/python -c 'from tests.tools.chaos import main; main()' --schedules $(SCHEDULES) --seed $(SEED)

controls: .venv/.tools
	$(BIN)/python -m tests.reproduce.controls $(REPLICATION)

docs: .venv/.tools
	$(BIN)/python -m docs.pages
	$(BIN)/python -m benchmarks.page

clean:
	rm -rf .venv build runs report.html
