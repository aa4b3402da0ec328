# Everything Weft needs is installed into .venv, from the versions in constraints.txt.
#   make serve   serve the default model at 127.0.0.1:8000
#   make test    run every test
#   make check   lint, format, types and tests: what a change must pass
#   make bench   measure this machine
#   make proto   write the Python of the gRPC door's messages from its .proto file

PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
INSTALL := $(PIP) install --constraint constraints.txt --only-binary :all: --no-build-isolation
ARGS ?=

.PHONY: serve test check lint bench proto clean
.DEFAULT_GOAL := serve

serve: .venv/installed
	@$(BIN)/weft serve $(ARGS)

test: .venv/installed-dev
	@$(BIN)/weft pull smollm2
	$(BIN)/python -m pytest $(ARGS)

lint: .venv/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

check: lint test

bench: .venv/installed
	@$(BIN)/weft bench offline $(ARGS)

proto: .venv/installed-dev
	$(BIN)/python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. weft/frontend/rpc/ai_service.proto

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

clean:
	rm -rf .venv build dist *.egg-info
