# Two commands for a newcomer: `make demo` and `make test`. Each sets up all it needs by itself.
BENCHES := $(addprefix bench-,cpu gpu call-overhead model edge paper-edge paper-gpu detect-cpu detect-cuda dino knn serve)
.PHONY: help demo serve browser test test-shuffled lint doctor check format docs tables clean $(BENCHES)
.DEFAULT_GOAL := help

PYTHON ?= python3
# uv from PATH, or our own copy in a small virtual environment.
UV := $(or $(shell command -v uv 2>/dev/null),.tools/uv/bin/uv)
READY := .venv/.ready

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(READY) ## train the same model with SimA and with softmax on digits (about a minute); figures in runs/demo/
	.venv/bin/sima demo

serve: $(READY) ## the web page: classify your photos and see heat maps, on 127.0.0.1:8000
	.venv/bin/sima serve

browser: ## install Chromium for the browser tests (Debian, as root) and onnxruntime-web for the page /browser
	scripts/get_browser.sh

test: $(READY) ## the whole test suite
	.venv/bin/pytest

test-shuffled: $(READY) ## the command-line tests file by file, in random order, with a long TMPDIR
	scripts/test_shuffled.sh

lint: $(READY) ## ruff and mypy
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

doctor: $(READY) ## versions of Python and the packages, devices, and a self-test of the operator
	.venv/bin/sima doctor
	.venv/bin/ruff --version
	.venv/bin/mypy --version
	.venv/bin/pytest --version

check: doctor lint test test-shuffled ## everything that CI runs

format: $(READY) ## fix and format with ruff
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .

docs: $(READY) ## build the documentation -> site/index.html; a broken link is an error
	NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --strict --quiet
	@echo "site/index.html; to search in it, serve it: .venv/bin/python -m http.server --directory site"

tables: $(READY) ## regenerate the tables in README and docs from the rows in benchmarks/results
	.venv/bin/pytest -n0 --update-tables tests/test_docs.py::test_the_tables_of_the_pages_are_the_rows

# Benchmarks whose rows and figures are committed. `sima bench` by itself writes to runs/bench/.
RESULTS := benchmarks/results
bench-cpu: BENCH = sima bench cpu --out $(RESULTS)/cpu.csv ## CPU speed against softmax -> benchmarks/results/ (about 5 minutes)
bench-gpu: BENCH = sima bench gpu --out $(RESULTS)/gpu.csv --figure docs/images/gpu.png
bench-call-overhead: BENCH = sima bench call-overhead --out $(RESULTS)/call_overhead.csv
bench-model: BENCH = sima bench model --out $(RESULTS)/model.csv
bench-edge: BENCH = sima bench edge --out $(RESULTS)/edge.csv --figure docs/images/edge.png
bench-paper-edge: BENCH = sima bench paper-edge --out $(RESULTS)/paper_edge.csv
bench-paper-gpu: BENCH = sima bench paper-gpu --out $(RESULTS)/paper_gpu.csv
bench-detect-cpu: BENCH = sima bench detect --device cpu --out $(RESULTS)/detect_cpu.csv
bench-detect-cuda: BENCH = sima bench detect --device cuda --out $(RESULTS)/detect_cuda.csv
bench-dino: BENCH = python benchmarks/dino_step.py --out $(RESULTS)/dino_step.csv
bench-knn: BENCH = python benchmarks/knn_search.py --out $(RESULTS)/knn_speed.csv
bench-serve: BENCH = python benchmarks/serve_load.py --out $(RESULTS)/serve.csv
$(BENCHES): $(READY)
	.venv/bin/$(BENCH)

clean: ## remove the environment, caches and runs/
	rm -rf .venv .tools runs .pytest_cache .ruff_cache .mypy_cache .hypothesis

# The stamp is newer than pyproject.toml when the environment is up to date: then nothing is asked of uv.
$(READY): pyproject.toml | $(UV)
	$(UV) sync --compile-bytecode --extra plots --extra hf --extra onnx --extra train --extra data --extra detection --extra serve --extra gigapixel --group dev
	@touch $@

.tools/uv/bin/uv:
	$(PYTHON) -m venv .tools/uv
	.tools/uv/bin/python -m pip install --quiet --disable-pip-version-check uv
