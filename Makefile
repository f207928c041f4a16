# Two commands do everything: `make demo` and `make test`. Each sets up .venv on its first call.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test test-slow test-exhaustive test-oldest matrix lint format bench build release site clean

demo: ready  ## run the main job and write demo/report.html
	@$(BIN)/python examples/demo.py

test: ready  ## every test but the slow ones, up to ten minutes on two cores
	@$(BIN)/python -m pytest -n auto --maxprocesses 4 --dist worksteal -m "not slow and not exhaustive"

test-slow: ready  ## the slow tests, and the documentation as a site
	@$(PYTHON) tools/site.py
	@$(BIN)/python -m pytest -n auto --maxprocesses 4 --dist worksteal -m "slow and not exhaustive"

test-exhaustive: ready  ## every case in every way, up to an hour; before a release
	@$(BIN)/python -m pytest -n auto --maxprocesses 4 --dist worksteal -m exhaustive

test-oldest:  ## what shows each framework, with the oldest versions that are supported
	@$(PYTHON) tools/oldest.py

matrix: ready  ## tests with other Pythons, torches and frameworks, up to an hour; writes docs/compatibility.md
	@$(PYTHON) tools/matrix.py

lint: ready  ## ruff, and the type checker in strict mode over src
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/basedpyright

format: ready
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

bench: ready  ## ratios measured on this machine
	@for script in benchmarks/[!_]*.py; do $(BIN)/python $$script || exit 1; done

build: ready  ## wheel and sdist in dist/
	@$(BIN)/python -m build --no-isolation

release: ready  ## wheel and sdist, and the wheel tried in an empty environment
	@$(PYTHON) tools/release.py

site:  ## the documentation as a site in site/
	@$(PYTHON) tools/site.py

clean:
	rm -rf .venv build dist demo site .pytest_cache .ruff_cache .hypothesis

.PHONY: ready
ready:
	@$(PYTHON) tools/bootstrap.py
