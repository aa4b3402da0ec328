"""The settings of the systems that users come from, under the names that they have there: what each is here, or what
to write instead. No name of theirs is passed over in silence. docs/migration.md and docs/migration-pypto.md are the
same tables for readers."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

KeyPath = tuple[str, ...]


class Refused(Struct, frozen=True):
    """A name without an equal here."""

    instead: str
    """The text that says what to write instead, or why nothing needs to be written."""
    unless: Any = None
    """The value that is accepted, because it says what happens anyway."""


_NO_COORDINATOR = Refused("There is no coordinator: the server starts its engines itself. Unset it.")
_NO_SIDECAR = Refused("There is no sidecar: /metrics counts tokens. Unset it.")
_OWN_ENVIRONMENT = Refused("Weft runs in the Python environment that it is installed in. Unset it.")
_KEYS_DECIDE = (
    "Without keys only this machine can connect. Set WEFT_API_KEY to want one, or WEFT_INSECURE=1 to let others in "
    "without."
)

VARIABLES: dict[str, str | Refused] = {
    "CY_LLM_ENGINE": "engine",
    "CY_LLM_BACKEND": "engine",
    "CY_LLM_MODEL": "model",
    "CY_LLM_DEFAULT_MODEL": "model",
    "CY_LLM_DEFAULT_ADAPTER": "adapter",
    "CY_LLM_MODEL_REGISTRY": "models_file",
    "CY_LLM_MODEL_REGISTRY_PATH": "models_file",
    "CY_LLM_API_KEY": "api_key",
    "CY_LLM_INTERNAL_TOKEN": "api_key",
    "GATEWAY_API_TOKEN": "api_key",
    "CY_LLM_GRPC_TLS_CERT": "grpc_tls_cert",
    "CY_LLM_GRPC_TLS_KEY": "grpc_tls_key",
    "CY_LLM_GRPC_TLS_CA": "grpc_tls_client_ca",
    "CY_LLM_WORKER_PORT": "grpc_port",
    "CY_LLM_LITE_PORT": "port",
    "WORKER_UDS_PATH": "grpc_socket",
    "CY_LLM_OTEL_ENDPOINT": "otlp_endpoint",
    "GATEWAY_REQUEST_TIMEOUT": "request_timeout_s",
    "VLLM_TP": "tensor_parallel_size",
    "VLLM_GPU_MEM": "gpu_memory_utilization",
    "VLLM_GPU_MEMORY_UTILIZATION": "gpu_memory_utilization",
    "CY_LLM_PORT": Refused(
        "It was the gateway's port for HTTP in one place and the worker's for gRPC in another. Set WEFT_PORT (HTTP) or "
        "WEFT_GRPC_PORT."
    ),
    "CY_LLM_HEALTH_PORT": Refused("/health and /metrics are on the port of HTTP. Set WEFT_PORT, or nothing."),
    "CY_LLM_ENV": Refused(f"There is one way to run. {_KEYS_DECIDE} WEFT_GRPC_TLS_CERT turns TLS on."),
    "CY_LLM_SECURITY_ENABLED": Refused(_KEYS_DECIDE),
    "CY_LLM_ALLOW_INSECURE_INTERNAL_TOKEN": Refused(_KEYS_DECIDE, unless=False),
    "CY_LLM_ALLOW_INSECURE_GRPC": Refused(
        "gRPC has TLS where it has a certificate. Set WEFT_GRPC_TLS_CERT and WEFT_GRPC_TLS_KEY.", unless=True
    ),
    "CY_LLM_PROMPT_CACHE_ENABLED": Refused(
        "Whole answers are not kept. WEFT_ENABLE_PREFIX_CACHING reuses what prompts share.", unless=False
    ),
    "CY_LLM_PROMPT_CACHE_TTL": Refused("Whole answers are not kept. Unset it."),
    "CY_LLM_ALLOW_PLACEHOLDER_MODEL": Refused(
        "There are no placeholders. WEFT_LOAD_FORMAT=dummy makes random weights.", unless=False
    ),
    "CY_LLM_MODEL_CACHE": Refused("Set WEFT_HOME, or link the models into $WEFT_HOME/models."),
    "CY_LLM_CHECKPOINT_DIR": Refused("Nothing is trained here. Unset it."),
    "CY_LLM_CONDA_ENV": _OWN_ENVIRONMENT,
    "CY_LLM_PYTHON_VERSION": _OWN_ENVIRONMENT,
    "CY_LLM_WORKER_HOST": _NO_COORDINATOR,
    "CY_LLM_COORDINATOR_HOST": _NO_COORDINATOR,
    "CY_LLM_COORDINATOR_PORT": _NO_COORDINATOR,
    "CY_LLM_LITE_COORDINATOR_PORT": _NO_COORDINATOR,
    "CY_LLM_LITE_WORKER_PORT": Refused("Set WEFT_GRPC_PORT."),
    "COORDINATOR_UDS_PATH": Refused("There is no coordinator. Set WEFT_GRPC_SOCKET for a unix socket of gRPC."),
    "COORDINATOR_GRPC_BIND": Refused("There is no coordinator. Set WEFT_HOST and WEFT_GRPC_PORT."),
    "COORDINATOR_GRPC_ADDR": _NO_COORDINATOR,
    "COORDINATOR_CONFIG": _NO_COORDINATOR,
    "WORKER_GRPC_ADDRS": Refused(
        "There is no coordinator. For an engine elsewhere set WEFT_ENGINE=remote and WEFT_ENGINE_URL."
    ),
    "WORKER_UDS_PATHS": Refused("There is one socket. Set WEFT_GRPC_SOCKET."),
    "GATEWAY_LITE_CONFIG": Refused("Write a --config file: `weft config init` makes one."),
    "SIDECAR_CONFIG": _NO_SIDECAR,
    "SIDECAR_BIND_ADDR": _NO_SIDECAR,
    "SIDECAR_WORKER_UDS": _NO_SIDECAR,
}
"""The variables of the CY-LLM Engine: the setting that each is, or why it is refused. The hubs' own (HF_HOME, HF_TOKEN,
HF_ENDPOINT) are read where models are pulled."""

PREFERRED_BACKEND = "preferred_backend"
"""The key of a CY-LLM configuration, beside `models`, for the engine of models that name none."""

_BY_REQUEST = "Requests say it themselves; `weft generate` has a flag for it."

CY_LLM_KEYS: dict[KeyPath, str | Refused] = {
    (PREFERRED_BACKEND,): "engine",
    ("models",): "models_file",
    ("backends",): Refused("Engines are started by the server. For one elsewhere, a model has engine and engine_url."),
    ("defaults",): Refused(_BY_REQUEST),
}
PYPTO_KEYS: dict[KeyPath, str | Refused] = {
    ("model", "model_id"): "served_model_name",
    ("model", "model_dir"): "model",
    ("model", "model_format"): Refused("The files tell their format. Leave it out.", unless="huggingface"),
    ("model", "loader_options"): Refused("There are none. Leave them out.", unless={}),
    ("runtime", "backend"): "engine",
    ("runtime", "page_size"): "block_size",
    ("runtime", "max_batch_size"): "max_num_seqs",
    ("runtime", "max_seq_len"): "max_model_len",
    ("runtime", "weight_dtype"): "dtype",
    ("runtime", "kv_dtype"): Refused("The cache has the type of the weights, runtime.weight_dtype. Leave it out."),
    ("runtime", "total_kv_pages"): "num_blocks",
    ("runtime", "device"): Refused("runtime.backend chooses the device. Leave it out.", unless="cpu"),
    ("generation", "max_new_tokens"): Refused(f"{_BY_REQUEST[:-1]}: max_tokens."),
    ("generation", "temperature"): Refused(_BY_REQUEST),
    ("generation", "top_p"): Refused(_BY_REQUEST),
    ("generation", "top_k"): Refused(_BY_REQUEST),
    ("generation", "stop"): Refused(_BY_REQUEST),
    ("generation", "stream"): Refused("Requests say it themselves."),
    ("npu", "platform"): Refused("vLLM's plugin for Ascend finds the chip. Leave it out."),
    ("npu", "device_id"): Refused("Set the environment variable ASCEND_RT_VISIBLE_DEVICES."),
    ("npu", "save_kernels_dir"): Refused("WEFT_COMPILE_CACHE is the folder of compiled kernels."),
    ("npu", "pypto_root"): Refused("PyPTO is not used. Leave it out."),
    ("npu", "l3"): Refused("PyPTO is not used. Leave it out.", unless=False),
}
"""The keys of their files: the setting that each is, or why it is refused."""
