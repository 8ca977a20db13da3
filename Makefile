# Two commands do everything on a fresh machine: make demo, make test.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEMO := runs/demo

.PHONY: demo test lint types wheel clean

$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet -e '.[dev]'
	touch $(STAMP)

demo: $(STAMP)
	rm -rf $(DEMO)
	$(BIN)/lampq quantize --bits 3 --out $(DEMO)

test: $(STAMP)
	$(BIN)/python -m pytest -q -n 2 --dist loadgroup

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

wheel: $(STAMP)
	rm -rf dist build/wheel-check
	$(BIN)/python -m build --wheel --outdir dist . >/dev/null
	$(PYTHON) -m venv --system-site-packages build/wheel-check
	PYTHONPATH=$$($(BIN)/python -c 'import site; print(site.getsitepackages()[0])') \
		build/wheel-check/bin/pip install --quiet --no-deps --force-reinstall dist/*.whl
	cd build && PYTHONPATH=$$(../$(BIN)/python -c 'import site; print(site.getsitepackages()[0])') \
		wheel-check/bin/python -m lampq --help >/dev/null

clean:
	rm -rf $(VENV) build dist runs
