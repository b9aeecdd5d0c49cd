# Every target makes what it needs and is enough on a fresh clone.
VENV := .venv
# Much of a test's time is waiting: several run at a time. The fault matrix sees to that itself.
# tests/progress.py prints what has ended, in place of pytest's letters and percentages.
AT_ONCE := -n auto --dist worksteal -o console_output_style=classic
# Optimized code is wasted on what runs once; on a newer JAX than 0.10 the suite compiles as users do.
QUICKLY := --compile-quickly
# A quarter of the examples of each property; make test-newest tries all.
FEWER := --hypothesis-profile=quick
NEWEST := .venv-newest
# What requirements/ does not pin is looked up in every run.
LATEST := .venv-latest
NIGHTLY := .venv-nightly
# Where a container forbids bytecode, each worker would rewrite the asserts of all tests anew.
unexport PYTHONDONTWRITEBYTECODE
FORMS_CONFIG := .github/ISSUE_TEMPLATE/config.yml
FORMS := $(filter-out $(FORMS_CONFIG),$(wildcard .github/ISSUE_TEMPLATE/*.yml))
# .ci/run adds torch, which is gigabytes where there is no CPU build.
EXTRAS := demo,test,lint
INPUTS := pyproject.toml .ci/install $(wildcard requirements/*.txt)

.DEFAULT_GOAL := help
.PHONY: demo test test-faults test-buckets pages lint test-newest test-faults-newest test-latest test-nightly dist release site site-check pictures bench house lock clean help

demo: $(VENV)/.demo ## Train a digit classifier, preempt it, resume it on another mesh
	$(VENV)/bin/python examples/preempted.py

test: $(VENV)/.installed ## Run the test suite (Python 3.11 where there is one)
	$(VENV)/bin/python -m pytest $(AT_ONCE) $(QUICKLY) $(FEWER)

test-faults: $(VENV)/.installed ## Kill, freeze, cut off and fail processes, in all ways (minutes)
	$(VENV)/bin/python -m pytest $(QUICKLY) -m "faults and not buckets"

pages: $(VENV)/.installed ## Run the commands of all pages, and the files for clusters (minutes)
	$(VENV)/bin/python -m pytest $(AT_ONCE) $(QUICKLY) -m pages tests/processes

lint: $(VENV)/.installed ## Check style, formatting, types, CITATION.cff and the files in .github
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/mypy
	$(VENV)/bin/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(VENV)/bin/check-jsonschema --builtin-schema vendor.github-issue-forms $(FORMS)
	$(VENV)/bin/check-jsonschema --builtin-schema vendor.github-issue-config $(FORMS_CONFIG)
	$(VENV)/bin/check-jsonschema --builtin-schema vendor.dependabot .github/dependabot.yml
	$(VENV)/bin/check-jsonschema --builtin-schema vendor.citation-file-format CITATION.cff
	$(VENV)/bin/zizmor --offline --quiet --pedantic .github

test-buckets: $(VENV)/.bucketed ## Checkpoints in buckets: on more servers, each request failing in all ways
	$(VENV)/bin/python -m pytest $(AT_ONCE) -m buckets tests/checkpoint tests/processes

test-newest: $(NEWEST)/.installed ## Run the test suite on the newest Python >= 3.12 and JAX
	$(NEWEST)/bin/python -m pytest $(AT_ONCE)

test-faults-newest: $(NEWEST)/.installed ## The same on the newest Python and JAX
	$(NEWEST)/bin/python -m pytest -m "faults and not buckets"

test-latest: ## Run the test suite on the newest release of every package, pinned or not
	.ci/install $(LATEST) "$$(.ci/find-python newest)" demo,test,ecosystem latest
	$(LATEST)/bin/python -m pytest $(AT_ONCE)

test-nightly: ## The same on JAX's nightly build
	.ci/install $(NIGHTLY) "$$(.ci/find-python newest)" demo,test nightly
	$(NIGHTLY)/bin/python -m pytest $(AT_ONCE)

dist: $(VENV)/.publishing ## Build sdist and wheel in dist/; use the wheel in empty environments
	.ci/dist $(VENV)

release: $(VENV)/.publishing ## Prepare a release: make release VERSION=X.Y.Z (see RELEASE.md)
	.ci/release $(VENV) $(VERSION)

site: $(VENV)/.publishing ## Build the site in build/site; no network, every warning an error
	rm -rf build/site
	https_proxy=http://127.0.0.1:9 $(VENV)/bin/python -m sphinx -b html --fail-on-warning --keep-going --quiet docs build/site
	$(VENV)/bin/python -m pytest -q -m site tests/site

site-check: site ## Read the site in headless Chromium, as a telephone and as a desktop show it
	$(VENV)/bin/python tests/site/read_site.py build/site build/pictures

pictures: $(VENV)/.installed ## Draw the pictures of docs/ again
	PYTHONPATH=tests $(VENV)/bin/python tests/draw/gallery.py

bench: $(VENV)/.benched ## Run every benchmark beside its peers; one JSON line per row
	@for program in $$(grep -l __main__ benchmarks/*.py); do echo "== $$program"; $(VENV)/bin/python $$program || exit 1; done

house: $(VENV)/.installed ## Print sizes by folder, the largest files and those with one importer
	$(VENV)/bin/python tests/meta/sizes.py

lock: ## Pin the newest versions of everything in requirements/
	.ci/lock

clean: ## Remove the environments and caches
	rm -rf $(VENV) $(NEWEST) $(LATEST) $(NIGHTLY) build dist .hypothesis .pytest_cache .ruff_cache .mypy_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

help: ## Show this list
	@sed -n 's/^\([a-z-]*\):.*## /\1|/p' $(MAKEFILE_LIST) | \
	  while IFS='|' read -r target words; do printf '  make %-18s %s\n' "$$target" "$$words"; done

$(VENV)/.demo: $(INPUTS)
	@echo "preparing $(VENV)"
	@python=; if [ ! -e $(VENV) ]; then python=$$(.ci/find-python default) || exit 1; fi; \
	.ci/install $(VENV) "$$python" demo
	@touch $@

$(VENV)/.installed: $(VENV)/.demo
	@.ci/install $(VENV) $(VENV)/bin/python $(EXTRAS)
	@touch $@

$(VENV)/.benched: $(VENV)/.installed
	@.ci/install $(VENV) $(VENV)/bin/python demo,test,lint,bench
	@touch $@

$(VENV)/.bucketed: $(VENV)/.installed
	@.ci/install $(VENV) $(VENV)/bin/python demo,test,lint,buckets
	@touch $@

$(VENV)/.publishing: $(VENV)/.installed
	@.ci/install $(VENV) $(VENV)/bin/python demo,test,lint,docs,release
	@touch $@

$(NEWEST)/.installed: $(INPUTS)
	@python=$$(.ci/find-python newest) || \
	  { echo "no Python >= 3.12 found; set NEWEST_PYTHON to one" >&2; exit 1; }; \
	.ci/install $(NEWEST) "$$python" demo,test,ecosystem
	@touch $@
