# All of it happens in .venv and in the asset cache. A second run needs no network.

VENV := .venv
BIN := $(VENV)/bin
SOURCES := pyproject.toml constraints.txt requirements-nodeps.txt
INSTALLED := $(VENV)/.installed-$(firstword $(shell cat $(SOURCES) | cksum))
PIP_VERSION := 26.3
EXTRAS := all,sweep,hub,test,bench
# two at a time, one thread each
PYTEST := OMP_NUM_THREADS=1 $(BIN)/pytest -n 2

.PHONY: lab test test-all check notebooks pins

lab: $(INSTALLED)
	$(BIN)/labkit assets fetch
	$(BIN)/labkit lab

test: $(INSTALLED)
	$(BIN)/labkit assets fetch
	$(PYTEST)

test-all: $(INSTALLED)
	$(BIN)/labkit assets fetch
	-$(BIN)/labkit assets fetch --all
	$(PYTEST) -m ""

check: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

notebooks: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m labkit.run notebooks/*.ipynb

pins: $(INSTALLED)
	$(BIN)/python binder/pins.py

$(INSTALLED):
	@python=""; \
	for candidate in python3 python3.11 python3.12; do \
	  if $$candidate -c 'import sys; sys.exit(sys.version_info[:2] not in [(3, 11), (3, 12)])' 2>/dev/null; then \
	    python=$$candidate; break; \
	  fi; \
	done; \
	if [ -z "$$python" ]; then echo "labkit needs Python 3.11 or 3.12 on the PATH" >&2; exit 1; fi; \
	$$python -m venv $(VENV)
	$(BIN)/python -m pip install --quiet "pip==$(PIP_VERSION)"
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[$(EXTRAS)]"
	$(BIN)/python -m pip install --quiet --no-deps -r requirements-nodeps.txt
	touch $@
