# Two commands do everything on a fresh machine: `make demo` and `make test`. Each target prepares what it needs.

.PHONY: help demo test lint format bench soak errors reference docs venv dev system clients clean

help:
	@echo "make demo    run the example tasks on the embedded sandbox (no Docker, no key)"
	@echo "make test    lint and run every test, as root and as a plain user"
	@echo "make lint    ruff, pyright, import-linter, plain words"
	@echo "make bench   run the benchmarks"
	@echo "make soak    run the property tests with new examples each time, for MINUTES=10"
	@echo "make bump    raise the agents' pinned versions to the newest ones that pass their tests"
	@echo "make errors  write docs/reference/errors.md from the source"
	@echo "make reference  write docs/reference/commands.md, settings.md and python.md from the source"
	@echo "make docs    build the documentation as a site and check its links"

venv: .venv/.ready

.venv/.ready: requirements.lock pyproject.toml
	@.ci/bootstrap venv
	@touch $@

dev: .venv/.dev

.venv/.dev: .venv/.ready requirements-dev.lock
	@.ci/bootstrap dev
	@touch $@

system:
	@.ci/bootstrap system

demo: venv
	@.venv/bin/pier run examples/tasks -a oracle -n 4 --image host --job-name "demo-$$(date +%Y%m%d-%H%M%S)"

clients: dev
	@.ci/clients || echo "the official model clients could not be installed, so their tests are skipped" >&2

test:
	@$(MAKE) --no-print-directory -j2 dev system
	@.ci/test

lint: dev
	@.ci/lint

format: dev
	@.venv/bin/ruff check --fix --quiet . ; .venv/bin/ruff format --quiet .

bench: dev system
	@for benchmark in benchmarks/[a-z]*.py; do .venv/bin/python "$$benchmark" || exit 1; done

soak: dev
	@.ci/soak $(or $(MINUTES),10)

bump: dev system
	@.venv/bin/python .ci/bump

errors: dev
	@.venv/bin/python .ci/errors

reference: dev
	@.venv/bin/python .ci/reference
	@.venv/bin/python .ci/settings > docs/reference/settings.md

docs: dev
	@.ci/docs

clean:
	rm -rf .venv .cache dist build
