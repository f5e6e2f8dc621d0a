# Each target does all its set-up. SLAB_DET_VENV and PYTHON choose the environment: see tools/venv.sh.
.PHONY: quickstart test lint clean

# The environment holds dependencies only; PYTHONPATH makes the code the one in this tree, also in subprocesses.
ACTIVATE = venv=$$(tools/venv.sh) && export PATH="$$venv/bin:$$PATH" PYTHONPATH="$(CURDIR)"

quickstart:
	@$(ACTIVATE) && python tools/quickstart.py

test:
	@$(ACTIVATE) && ruff check . && ruff format --check . && pytest -q -n 2 --dist loadfile

lint:
	@$(ACTIVATE) && ruff check . && ruff format --check .

# Caches only: trained models and environments stay.
clean:
	rm -rf .pytest_cache .ruff_cache *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
