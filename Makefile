# Two commands for a newcomer: `make demo` and `make test`. Each sets up all it needs by itself.
.PHONY: help demo serve browser test lint format docs bench-cpu clean
.DEFAULT_GOAL := help

PYTHON ?= python3
# uv from PATH, or our own copy in a small virtual environment.
UV := $(or $(shell command -v uv 2>/dev/null),.tools/uv/bin/uv)
READY := .venv/.ready

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(READY) ## train SimA and its softmax twin on digits (about a minute), figures under runs/demo/
	.venv/bin/sima demo

serve: $(READY) ## the page on which a photo is looked into, on 127.0.0.1:8000
	.venv/bin/sima serve

browser: ## Chromium for the tests of the pages (as root, on Debian), onnxruntime-web for the model in the browser
	scripts/get_browser.sh

test: $(READY) ## the whole test suite
	.venv/bin/pytest

lint: $(READY) ## ruff and mypy
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

format: $(READY) ## let ruff fix and format
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .

docs: $(READY) ## the documentation as web pages -> site/index.html, every link checked
	NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --strict --quiet
	@echo "site/index.html; to search in it, serve it: .venv/bin/python -m http.server --directory site"

bench-cpu: $(READY) ## CPU speed against softmax -> benchmarks/results/cpu.csv (about 3 minutes)
	.venv/bin/sima bench cpu

clean: ## remove the environment and everything runs have left
	rm -rf .venv .tools runs .pytest_cache .ruff_cache .mypy_cache .hypothesis

# The stamp is newer than pyproject.toml when the environment is up to date: then nothing is asked of uv.
$(READY): pyproject.toml | $(UV)
	$(UV) sync --extra plots --extra hf --extra onnx --extra train --extra data --extra detection --extra serve --group dev
	@touch $@

.tools/uv/bin/uv:
	$(PYTHON) -m venv .tools/uv
	.tools/uv/bin/python -m pip install --quiet --disable-pip-version-check uv
