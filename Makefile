# Two commands do everything on a fresh machine: make demo, make test.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEMO := runs/demo

.PHONY: demo test lint types docs examples wheel clean

$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet -e '.[dev]'
	touch $(STAMP)

demo: $(STAMP)
	rm -rf $(DEMO)
	$(BIN)/lampq quantize --bits 3 --out $(DEMO)

test: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

# to site/, complete without a network; the variable leaves out the theme's notice of its end in 2027
docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet --strict
	! grep -rnE --include='*.html' '<(script|link|img|iframe|source)[^>]* (src|href)="?(https?:)?//' site

examples: $(STAMP)
	for script in examples/*.py; do $(BIN)/python $$script || exit 1; done

# the wheel in an environment of its own, on the packages of .venv
wheel: $(STAMP)
	rm -rf dist build
	$(BIN)/python -m build --wheel --outdir dist . >/dev/null
	$(PYTHON) -m venv build/venv
	$(BIN)/python -c 'import site; print(site.getsitepackages()[0])' \
		> $$(build/venv/bin/python -c 'import site; print(site.getsitepackages()[0])')/base.pth
	build/venv/bin/pip install --quiet --no-deps --ignore-installed dist/*.whl
	cd build && venv/bin/lampq --help >/dev/null && venv/bin/lampq version
	du -k dist/*.whl

clean:
	rm -rf $(VENV) build dist runs site
