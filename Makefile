# One command each; see README.md. Needs Python 3.11 or newer and make; Java only from what it finds.
PYTHON ?= $(shell command -v python3.11 || command -v python3.12 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.setup-done
WORKERS ?= 4

# Compiled modules are kept, even where the environment forbids it (as images of Python do): a run of
# the tests starts many hundred Pythons, and pytest rewrites 50,000 lines.
export PYTHONDONTWRITEBYTECODE :=

SPARK ?= 4.1.4
PYSPARK := $(CURDIR)/.cache/pyspark-$(SPARK)
UVICORN := $(CURDIR)/.cache/uvicorn/$(shell sed -n 's/.*"uvicorn>=\([0-9.]*\),.*/\1/p' pyproject.toml)

.PHONY: help setup demo test judges test-uvicorn test-spark soak check format s3 bench docs recording screenshots lock release clean
.DEFAULT_GOAL := help

help:
	@echo "make setup    .venv with everything, and .venv/bin/tierlog"
	@echo "make demo     the flights of 2013 through both tiers, and Spark; KEEP=1 leaves it running"
	@echo "make test     the tests, in four processes: WORKERS=2, TESTS=tests/unit"
	@echo "make test-uvicorn  the connection's tests on the oldest uvicorn that pyproject.toml admits"
	@echo "make test-spark  Spark's tests on another PySpark, the oldest: SPARK=4.1.4"
	@echo "make judges   other projects' tests and clients on our Kafka listener; fetches Go if there is none, needs a C compiler, npm, a JDK with Maven, and kcat or apt-get"
	@echo "make soak     the long tests, on a real S3 server; those without an end for MINUTES=10 each"
	@echo "make check    format, lint, types, the directions between the rooms, known vulnerabilities"
	@echo "make s3       a real S3 server on this machine, without Docker"
	@echo "make bench    the figures"
	@echo "make docs     the reference in docs/, out of the code's own tables, and the site, in .cache/site/html"
	@echo "make recording  the terminal in docs/pictures, by a run of the commands"
	@echo "make screenshots  the pictures of the console in docs/pictures; needs chromium"
	@echo "make lock     the newest versions of what the image and a release's SBOM install"
	@echo "make release  wheel, sdist, SBOM, notes and checksums in dist/; uploads nothing"
	@echo "make clean    remove .venv and what tools left behind"

setup: $(STAMP)

$(STAMP): pyproject.toml
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo "Python 3.11 or newer is needed: make setup PYTHON=/path/to/python3.11" >&2; exit 1; }
	@echo "installing into $(VENV): some minutes the first time, and nothing to be seen"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	{ command -v uv >/dev/null && uv pip install --quiet --python $(BIN)/python --editable '.[test]'; } || \
	    $(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[test]'
	@touch $(STAMP)

demo: setup
	$(BIN)/tierlog demo $(if $(KEEP),--keep)

test: setup
	$(BIN)/pytest -q -n $(WORKERS) --max-worker-restart 0 --no-loadscope-reorder \
	    -m "not soak and not judge" $(TESTS)

# The newest is what `make setup` installs.
test-uvicorn: setup $(UVICORN)
	PYTHONPATH=$(UVICORN) $(BIN)/python -c 'import uvicorn; print("uvicorn", uvicorn.__version__)'
	PYTHONPATH=$(UVICORN) $(BIN)/pytest -q -n 2 tests/unit/api/test_connection.py \
	    tests/unit/api/test_immediate_connection.py tests/integration/http/test_shutdown.py

$(UVICORN): | setup
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $@.part \
	    uvicorn==$(notdir $@)
	mv $@.part $@

# What PySpark 4.1 leaves open is no fault of ours.
test-spark: setup $(PYSPARK)
	PYTHONPATH=$(PYSPARK) $(BIN)/pytest -q -W ignore::ResourceWarning \
	    -W ignore::pytest.PytestUnraisableExceptionWarning $(or $(TESTS),tests/integration/spark)

$(PYSPARK): | setup
	@echo "fetching PySpark $(SPARK), some 400 MB, once"
	rm -rf $@.part
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $@.part pyspark==$(SPARK)
	mv $@.part $@

judges: setup
	$(BIN)/pytest -q -m judge $(or $(TESTS),tests/judges)

soak: setup
	TIERLOG_SOAK_MINUTES=$(or $(MINUTES),10) \
	    $(BIN)/python localstack/s3_server.py --exec $(BIN)/pytest -q -s \
	    -o faulthandler_timeout=0 -m soak $(or $(TESTS),tests/soak tests/simulation tests/model tests/integration tests/judges)

check: setup
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python .ci/audit.py

format: setup
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

s3: setup
	$(BIN)/python localstack/s3_server.py $(S3)

bench: setup
	$(BIN)/python -m bench $(BENCH)

docs: $(VENV)/.docs-done
	$(BIN)/python docs/generate.py
	$(BIN)/python docs/pictures.py
	$(BIN)/python docs/site.py

$(VENV)/.docs-done: pyproject.toml | setup
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[docs]'
	@touch $@

recording: setup
	$(BIN)/python docs/record.py

screenshots: setup
	$(BIN)/python -m docs.screenshots

# With hashes, for every platform: one file for the image, for the SBOM and for the test of an install.
lock: setup
	$(BIN)/uv pip compile --quiet --upgrade --universal --python-version 3.11 --generate-hashes \
	    --no-header --no-annotate --output-file deploy/docker/requirements.txt pyproject.toml

release: setup
	$(BIN)/python .ci/release.py

clean:
	rm -rf $(VENV) dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
