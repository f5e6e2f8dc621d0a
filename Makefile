# Each target does all its set-up. SLAB_DET_VENV and PYTHON choose the environment: see tools/venv.sh.
.PHONY: quickstart test lint clean help

# The environment holds dependencies only; PYTHONPATH makes the code the one in this tree, also in subprocesses.
ACTIVATE = venv=$$(tools/venv.sh $(PARTS)) && export PATH="$$venv/bin:$$PATH" PYTHONPATH="$(CURDIR)"

test lint: PARTS = test

quickstart: # trains small detectors on generated images, finds the fastest form, prints AP and latency
	@$(ACTIVATE) && python tools/quickstart.py

test: # ruff and all tests, as the continuous integration runs them
	@$(ACTIVATE) && ruff check . && ruff format --check . && pytest -q -n 2 --dist loadfile --no-loadscope-reorder

lint: # ruff alone
	@$(ACTIVATE) && ruff check . && ruff format --check .

clean: # caches; trained models and environments stay
	rm -rf .pytest_cache .ruff_cache *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

help: # this list
	@sed -n 's/^\([a-z]*\): # /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 20
