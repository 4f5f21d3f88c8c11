# Every target sets the environment up by itself: on a fresh machine `make demo` is all there is to type.
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.setup-stamp
WIDGETS := nnsight_lab/widgets/static/heatmap.js
TYPESCRIPT := $(shell find labextension \( -name node_modules -o -name build.log \) -prune -o -type f -print)
# make lab-dev leaves a development build and this mark: it is built again before anything else uses it.
DEVELOPMENT := labextension/node_modules/.cache/nnsight-lab/development
# JupyterLab refuses to run as root unless told that it may.
ROOT := $(if $(filter 0,$(shell id -u)),--allow-root)

.DEFAULT_GOAL := help
.PHONY: help setup demo lab lab-dev test check format clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## */make \1\t/' | expand -t 14

$(STAMP): pyproject.toml scripts/setup.sh
	@scripts/setup.sh

ifneq ($(wildcard $(DEVELOPMENT)),)
.PHONY: $(WIDGETS)
endif

$(WIDGETS): $(TYPESCRIPT) | $(STAMP)
	@scripts/setup.sh widgets

setup: $(STAMP) $(WIDGETS)  ## make .venv (quick once it is there)

demo: $(STAMP)  ## run the quickstart notebook without a browser, on a small model
	@$(BIN)/nnsight-lab demo

lab-dev: $(STAMP) $(WIDGETS)  ## JupyterLab, with the TypeScript built again at every change: then reload the page
	@(cd labextension && exec node build.mjs --watch) & trap "kill $$!" EXIT; \
	$(BIN)/jupyter lab $(ROOT) notebooks/00_quickstart.ipynb

lab: $(STAMP) $(WIDGETS)  ## open the quickstart notebook in JupyterLab
	$(BIN)/jupyter lab $(ROOT) notebooks/00_quickstart.ipynb

test: $(STAMP) $(WIDGETS)  ## run every test (ARGS='-k name' chooses)
	@if grep -rqs 'mark\.browser' tests; then scripts/setup.sh browser; fi
	@scripts/setup.sh hub
	$(BIN)/python $(if $(ARGS),-m pytest $(ARGS),scripts/run_tests.py)

check: $(STAMP) $(WIDGETS)  ## format, lint, types, room order, house rules
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	@if [ -x labextension/node_modules/.bin/tsc ]; then npm --prefix labextension run --silent check; \
	else echo 'no node, so the TypeScript is not checked'; fi
	$(BIN)/python -m pytest -q tests/test_house.py

format: $(STAMP)  ## format and mend what can be mended
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:  ## remove .venv and every cache in this directory
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	rm -rf tests/widgets/vscode/node_modules tests/server/hub/node_modules labextension/node_modules labextension/build.log nnsight_lab/widgets/static nnsight_lab/labextension
	find . -name __pycache__ -type d -not -path './node_modules/*' -prune -exec rm -rf {} +
