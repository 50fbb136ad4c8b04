# Everything runs in .venv, which the first target that needs it sets up.
PYTHON ?= python3
BIN := .venv/bin
export HF_HUB_OFFLINE = 1
export TOKENIZERS_PARALLELISM = false

.PHONY: demo demo-scratch test test-quick lint install ecosystem clean

install: .venv/.installed

.venv/.installed: setup.cfg constraints.txt pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[test,lint]'
	touch $@

ecosystem: .venv/.ecosystem

.venv/.ecosystem: .venv/.installed
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[ecosystem]'
	touch $@

demo: install
	$(BIN)/fratrie demo --output_dir runs/demo

demo-scratch: install
	$(BIN)/fratrie demo --from_scratch --output_dir runs/demo-scratch

test: install ecosystem
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q --numprocesses=2 --dist=worksteal --durations=15

# What takes seconds, several processes or other tools is left out, and so are the pages of the documentation and the
# presets; each other test runs once per sibling or family.
test-quick: install
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q --quick --numprocesses=2 \
		--ignore=tests/ecosystem --ignore=tests/docs/test_docs.py --ignore=tests/test_presets.py --dist=worksteal

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf .venv build dist *.egg-info runs
