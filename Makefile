# scalelab: `make help` lists the targets.
PYTHON ?= python3
VENV   ?= .venv
BIN     = $(VENV)/bin
RUN    ?= runs/loop
STAMP   = $(VENV)/.installed
# Where else to look for torch: `make setup TORCH_INDEX=https://download.pytorch.org/whl/cpu` takes the small CPU build
# on machines where PyPI's default build would bring several GB of CUDA.
TORCH_INDEX ?=

.DEFAULT_GOAL := help
.PHONY: help setup demo test notebooks docs bench sync stale clean-outputs hooks readme lab lock clean

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | awk -F'\t' '{printf "  %-15s %s\n", $$1, $$2}'

# Installed anew only when what is asked for has changed.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "scalelab needs Python 3.11 or newer, found %d.%d; run: make PYTHON=python3.11 ..." % sys.version_info[:2])'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade 'pip>=24'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) --editable '.[dev]'
	touch $@

setup: $(STAMP) ## make .venv and install everything that the other targets need

demo: $(STAMP) ## the closed loop: raw text to an exported model, about four minutes (DATA="files or folders" for your own text)
	$(BIN)/scalelab loop --run $(RUN) --require_export true $(if $(DATA),--data $(DATA))

test: $(STAMP) ## everything that can fail: sync, clean and stale checks, all notebooks, pytest, the site
	$(BIN)/python tools/house.py sync
	$(BIN)/python tools/house.py clean --check
	$(BIN)/python tools/house.py stale
	$(BIN)/python tools/house.py readme --check
	$(BIN)/python tools/house.py test
	$(BIN)/python tools/site.py build
	$(BIN)/python -m pytest tests

notebooks: $(STAMP) ## run the notebooks whose code changed since they were run
	$(BIN)/python tools/house.py execute

docs: $(STAMP) ## build the book into _docs/index.html, no network needed
	$(BIN)/python tools/site.py build

bench: $(STAMP) ## all benchmarks, quick form
	for name in $$($(BIN)/scalelab bench --json | $(BIN)/python -c 'import json, sys; print(*[b["name"] for b in json.load(sys.stdin)["benches"]])'); do $(BIN)/scalelab bench $$name --quick || true; done

sync: $(STAMP) ## export the notebooks into scalelab/ and README.md
	$(BIN)/nbdev_export
	$(BIN)/python tools/house.py readme

stale: $(STAMP) ## list notebooks whose outputs are older than their code
	$(BIN)/python tools/house.py stale

clean-outputs: $(STAMP) ## strip volatile metadata from the notebooks
	$(BIN)/python tools/house.py clean

hooks: $(STAMP) ## install the git hook that cleans notebooks at every commit
	git config core.hooksPath tools/hooks

lab: $(STAMP) ## open the notebooks in JupyterLab
	$(BIN)/jupyter lab nbs

lock: $(STAMP) ## write the installed versions into constraints.txt
	$(BIN)/python -m pip freeze --exclude-editable | sed -E 's/\+cpu$$//' | grep -v '^-e' > constraints.txt

clean: ## remove .venv, the built site and caches (runs/ stays)
	rm -rf $(VENV) _docs docs/_staged docs/_build build *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
