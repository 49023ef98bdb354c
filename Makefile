# Everything runs from .venv, which is made on first use and brought up to date when pyproject.toml changes.

ARGS ?=

# Hundreds of processes are started in the tests, and each would compile again all that it imports.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: serve check docs test test-long test-all explore mutants loadtest soak bench clean

serve:     ## sets up everything and serves the demo model on http://127.0.0.1:8000
	@.ci/setup
	@exec .venv/bin/penstock serve $(ARGS)

check: node_modules/.package-lock.json ## ruff, mypy --strict, import-linter; the page's types and lint
	@.ci/setup check test
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	.venv/bin/lint-imports
	node_modules/.bin/tsc
	node_modules/.bin/biome lint --error-on-warnings

# npm writes this file when it has installed all that package-lock.json names.
node_modules/.package-lock.json: package-lock.json
	@.ci/tools check
	npm ci --no-audit --no-fund

docs:      ## the documentation as a site in site/
	@.ci/setup docs
	NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --strict --quiet

test:      ## the tests but for the long ones, which its last line counts, with a real browser and a real Redis
	@.ci/setup check test
	@.ci/tools test
	@if [ -n "$(ARGS)" ]; then .venv/bin/pytest $(ARGS); else .ci/pytest -m "not long"; fi

test-long: ## the long ones alone, and the property tests with five times as many examples
	@.ci/setup check test
	@.ci/tools test
	@.venv/bin/python -m tests.published || true
	@.ci/pytest -m "long or hypothesis" --hypothesis-profile many $(ARGS)

test-all: test test-long ## all tests, as in CI

explore:   ## tries the property tests with new examples
	@.ci/setup check test
	@.ci/tools test
	.ci/pytest -m hypothesis --hypothesis-profile explore $(ARGS)

mutants:   ## which small changes of FILES="gateway/..." no test of their folder, or of ARGS="--tests ...", notices
	@.ci/setup check test
	.venv/bin/python -m tests.mutants $(FILES) $(ARGS)

loadtest:  ## one minute of mixed traffic against a server it starts; fails on any failed request
	@.ci/setup loadtest
	.venv/bin/python loadtests/run.py $(ARGS)

soak:      ## ten minutes of every client and every trouble: disconnects, Redis faults, SIGTERM, kill -9
	@.ci/setup check test
	@.ci/tools test
	.venv/bin/python -m loadtests.soak $(ARGS)

bench:     ## this server against transformers' generate
	@.ci/setup bench
	.venv/bin/penstock bench $(ARGS)

clean:
	rm -rf .venv .venv-oldest node_modules build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
