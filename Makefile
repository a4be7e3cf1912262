# Targets that CI runs. PYTHON is any interpreter with `pip install -e '.[dev]'`.
PYTHON ?= python
FAMILIES = decode formats prefill indexer candidates compressor mla attention_backends cache indices metadata
CSRC = $(shell find kernels/cuda/csrc/ -name "*.cu" -o -name "*.cuh")

.PHONY: lint types test test-gpu bench

lint:
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -c "import clang_format; clang_format.clang_format()" --dry-run --Werror $(CSRC)
	$(PYTHON) tools/imports.py
	$(PYTHON) tools/chart.py --check

# Checked as installed: an editable install maps kernels/ and interop/ by an import hook that mypy does not follow.
types:
	rm -rf build
	$(PYTHON) -m pip install --quiet --no-deps --target build/types .
	cd build/types && PYTHONPATH=. $(PYTHON) ../../tools/seam.py > seam.py
	cd build/types && $(PYTHON) -m mypy --config-file ../../pyproject.toml -p cumla -m seam
	cd build/types && MYPYPATH=../../benchmarks $(PYTHON) -m mypy --config-file ../../pyproject.toml --explicit-package-bases \
		$(patsubst %,../../%,$(filter-out %/__init__.py,$(wildcard benchmarks/*.py)))

test:
	$(PYTHON) -m pytest

test-gpu:
	$(PYTHON) -m pytest -m gpu

bench:
	for family in $(FAMILIES); do $(PYTHON) benchmarks/operations.py $$family || exit 1; done
	for script in interop layers parallel; do $(PYTHON) benchmarks/$$script.py || exit 1; done
