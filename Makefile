# Everything a newcomer needs: `make demo` and `make test`. Both set up what is missing.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

# LeRobot 0.6 wants an older torch than the one that all tests run on, and Python 3.12.
PYTHON312     ?= python3.12
LEROBOT_VENV  := .venv-lerobot
LEROBOT_READY := $(LEROBOT_VENV)/.ready

.PHONY: help check demo test test-lerobot mutants epochs fuzz lint docs clean ffmpeg ffmpeg-lerobot
.DEFAULT_GOAL := help
# A notebook that failed is no notebook that was run.
.DELETE_ON_ERROR:

help:  ## Show the commands
	@grep -E '^[a-z-]+: .*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/'

check: lint test  ## What CI runs: style, types and all tests

demo: $(READY) ffmpeg  ## Write a dataset, train, lose a worker, resume on others, and account for every frame
	@$(BIN)/python examples/demo.py

test: $(READY) ffmpeg  ## Run all tests
	@$(BIN)/python tests/run.py

test-lerobot: $(LEROBOT_READY) ffmpeg-lerobot  ## Run tests beside LeRobot 0.6: those without Ray, and those of its policies and trainer
	@$(LEROBOT_VENV)/bin/python -m pytest tests/unit tests/inprocess tests/test_lerobot_example.py

mutants: $(READY) ffmpeg  ## Make small wrong changes, one after the other, and see that tests find each
	@$(BIN)/python tests/mutants.py

fuzz: $(READY) ffmpeg  ## Damage files and answers at random for MINUTES=30, and see that each ends as right data or a clear error
	@$(BIN)/python tests/fuzz/fuzz.py --minutes $(or $(MINUTES),30)

epochs: $(READY) ffmpeg  ## Go through 50 epochs on Ray and in a plain process, and see that nothing grows
	@RAYPIPE_RELEASE_EPOCHS=50 $(BIN)/python -m pytest tests/contracts/test_release_ray.py tests/inprocess/test_release.py

lint: $(READY)  ## Check style, format and types
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

docs: $(READY) ffmpeg $(patsubst examples/%,build/notebooks/%,$(wildcard examples/*.ipynb))  ## Build the site to build/site
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict --config-file docs/mkdocs.yml
	@echo "Read it at build/site/index.html"

# The site shows them with what they give here; a notebook runs anew when it or the package changes.
build/notebooks/%.ipynb: examples/%.ipynb $(wildcard raypipe/*.py raypipe/*/*.py raypipe/*/*/*.py)
	@mkdir -p $(@D)
	@echo "Running $< ..."
	@$(BIN)/python tests/notebook_run.py $< $@

clean:  ## Remove the virtual environment and everything made
	rm -rf $(VENV) $(LEROBOT_VENV) demo-data demo-run build dist *.egg-info .hypothesis .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "raypipe needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version). Try: make PYTHON=python3.11 $(MAKECMDGOALS)"; exit 1; }
	@echo "Setting up $(VENV) (once; a few minutes) ..."
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[test]'
	@touch $@

$(LEROBOT_READY): pyproject.toml constraints-lerobot.txt
	@command -v $(PYTHON312) >/dev/null \
		|| { echo "LeRobot 0.6 needs Python 3.12, and there is no $(PYTHON312). Try: make PYTHON312=/path/to/python3.12 $(MAKECMDGOALS)"; exit 1; }
	@echo "Setting up $(LEROBOT_VENV) (once; some 6 GB, ten minutes) ..."
	@$(PYTHON312) -m venv $(LEROBOT_VENV)
	@$(LEROBOT_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints-lerobot.txt --editable '.[lerobot,test]' 'lerobot[diffusion]'
	@touch $@

# torchcodec loads FFmpeg's shared libraries; joining clips in test data needs the program too.
ffmpeg: $(READY)
	@$(call install_ffmpeg,$(BIN))

ffmpeg-lerobot: $(LEROBOT_READY)
	@$(call install_ffmpeg,$(LEROBOT_VENV)/bin)

define install_ffmpeg
	if command -v ffmpeg >/dev/null && $(1)/python -c 'import torchcodec.decoders' 2>/dev/null; then exit 0; fi; \
	as_root=""; [ "$$(id -u)" = 0 ] || as_root="sudo -n"; \
	if command -v apt-get >/dev/null && $$as_root true 2>/dev/null; then \
		echo "Installing FFmpeg with apt-get ..."; \
		$$as_root apt-get update -qq && DEBIAN_FRONTEND=noninteractive $$as_root apt-get install -y -qq ffmpeg >/dev/null; \
	fi; \
	$(1)/python -c 'import torchcodec.decoders' 2>/dev/null && command -v ffmpeg >/dev/null || { \
		echo "raypipe needs FFmpeg (version 4 to 8) with its shared libraries. Install it, then run this again:"; \
		echo "  Debian, Ubuntu   sudo apt-get install ffmpeg"; \
		echo "  conda            conda install -c conda-forge ffmpeg"; \
		echo "  macOS            brew install ffmpeg"; exit 1; }
endef
