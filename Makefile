# On a fresh machine with Python 3.11 or newer, `make report` or `make test` does all the set-up, into .venv.
#   PYTHON=python3.12   the interpreter to set up with         VENV=path   where the environment lies
#   WORKERS=2           test processes                         ARGS=...    more arguments for pytest or JupyterLab
PYTHON  ?= python3
VENV    ?= .venv
WORKERS ?= 2
ARGS    ?=

BIN   := $(VENV)/bin
READY := $(VENV)/.ddlab-ready

# The embedded models are so small that a second thread gains nothing, and waiting for one on busy cores costs much.
# Offline: what would fetch something here is a mistake.
EMBEDDED := OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1

.PHONY: report test lab notebooks lint format clean help
.DEFAULT_GOAL := help

help:
	@echo "make report      decode one prompt with ar, dflash and ddtree on the embedded pair, audit it, write report.html"
	@echo "make test        lint, type check, tests"
	@echo "make lab         JupyterLab on notebooks/"
	@echo "make notebooks   run every notebook, write build/notebooks/*.html"
	@echo "make lint        ruff and mypy only"
	@echo "make format      let ruff format and fix"
	@echo "make clean       remove what these commands wrote, but not $(VENV)"

# pip older than 25.1 knows no dependency groups, and a new venv has whatever pip its Python came with, so pip goes first.
# The build backend is held by the same constraints file.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("ddlab needs Python 3.11 or newer: make PYTHON=python3.11 ..." if sys.version_info < (3, 11) else 0)'
	@echo "Setting up $(VENV); torch is large, so this takes some minutes."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install $(if $(CI),-q) -c constraints.txt "pip>=25.3"
	$(BIN)/python -m pip install $(if $(CI),-q) -c constraints.txt --build-constraint constraints.txt --group dev -e ".[lab,draw,gguf,graph]"
	@touch $@

report: $(READY)
	$(EMBEDDED) $(BIN)/ddlab report --out report.html

test: lint
	$(EMBEDDED) $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(ARGS)

lint: $(READY)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

lab: $(READY)
	$(BIN)/jupyter-lab notebooks $(ARGS)

# Pages that need no network: see notebooks/offline_html. No page can show a widget: progress bars stay out, and without
# widget state an inspector shows its static form.
notebooks: $(READY)
	$(EMBEDDED) HF_HUB_DISABLE_PROGRESS_BARS=1 TRANSFORMERS_VERBOSITY=error \
		$(BIN)/jupyter-nbconvert --to html --execute --output-dir build/notebooks \
		--ExecutePreprocessor.store_widget_state=False \
		--TemplateExporter.extra_template_basedirs=notebooks --template offline_html notebooks/*.ipynb

clean:
	rm -rf build dist report.html .mypy_cache .pytest_cache .ruff_cache .hypothesis
