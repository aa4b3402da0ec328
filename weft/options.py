"""The settings of Weft are a few frozen structs, each field with its line of documentation.

Flags, environment variables and the keys of files are generated from these fields, so a setting exists in all
three or in none.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Annotated, Any, Literal, get_args, get_type_hints

from msgspec import Meta, Struct

Device = Literal["auto", "cpu", "cuda"]
JsonWhitespace = Literal["compact", "indented"]
Dtype = Literal["auto", "float32", "float16", "bfloat16"]
FieldMode = Literal["standard", "strict", "tolerant"]


def _doc(text: str, **limits: Any) -> Meta:
    return Meta(description=text, **limits)


class ModelOptions(Struct, frozen=True, forbid_unknown_fields=True):
    """Which model is loaded, and how."""

    model: Annotated[
        str, _doc("A name from `weft models`, a GGUF file, a Hugging Face directory or hub id, or modelscope:ORG/NAME.")
    ] = "smollm2"
    served_model_name: Annotated[str, _doc("The name clients use; empty: the model's own name.")] = ""
    revision: Annotated[str, _doc("The commit of a hub model; empty: the newest, pinned when it is pulled.")] = ""
    load_format: Annotated[
        Literal["auto", "dummy"], _doc("dummy: random weights for the shape in a config.json, to measure with.")
    ] = "auto"
    image_model: Annotated[
        str,
        _doc(
            "The image model: auto (the one that comes with Weft, if it is for this language model), none, or a "
            "directory: of a model like that one, or of a pipeline of diffusers."
        ),
    ] = "auto"
    speculative_model: Annotated[
        str,
        _doc(
            "A small model with the same vocabulary, named as --model is: it drafts tokens for requests that do not "
            "say, which the model verifies in one step; no token changes. Empty: none."
        ),
    ] = ""
    adapter: Annotated[
        list[str],
        _doc(
            "A LoRA adapter that requests may name, as in legal=/loras/legal; may be repeated. A directory alone is "
            "the adapter of requests that name none."
        ),
    ] = []
    enable_lora: Annotated[
        bool, _doc("Reserve memory for adapters that are loaded later; vLLM takes none without.")
    ] = False
    device: Annotated[Device, _doc("The device: auto takes a GPU when there is one.")] = "auto"
    dtype: Annotated[
        Dtype,
        _doc(
            "The type of weights and activations; auto: bfloat16 on GPU, float32 on CPU, where quantised GGUF weights "
            "stay as they are."
        ),
    ] = "auto"
    max_model_len: Annotated[
        int, _doc("Longest prompt plus output, in tokens; 0: what the model allows and the memory holds.", ge=0)
    ] = 0
    generation_config: Annotated[
        Literal["auto", "none", "vllm"],
        _doc(
            "auto: requests that leave out temperature, top_p, top_k, min_p, repetition_penalty or max_tokens get what "
            "the model's generation_config.json or GGUF metadata says; none (or vllm, as vLLM calls it): neutral ones."
        ),
    ] = "auto"
    tool_style: Annotated[
        Literal["auto", "none", "hermes", "llama3", "mistral", "mistral-args"],
        _doc("How the model writes tool calls; auto: as its chat template shows."),
    ] = "auto"
    reasoning_style: Annotated[
        Literal["auto", "none", "think", "mistral"],
        _doc("How the model marks what it thinks before it answers; auto: as its chat template shows."),
    ] = "auto"
    threads: Annotated[int, _doc("CPU threads of the engine; 0: one for every core it may use.", ge=0)] = 0

    @property
    def wants_adapters(self) -> bool:
        return bool(self.adapter) or self.enable_lora


class BackendOptions(Struct, frozen=True, forbid_unknown_fields=True):
    """Which engine runs the model, and its settings."""

    engine: Annotated[
        str,
        _doc(
            "A name from `weft engines`, several in the order in which they are tried (a,b), or auto: the best for "
            "this machine that is installed. vllm: vLLM for this machine; cuda, nvidia, ascend, npu: the best for that "
            "hardware."
        ),
    ] = "auto"
    engine_url: Annotated[
        str, _doc("URL of a remote engine, as in http://localhost:8001/v1; for remote, cuda-trt, ascend-mindie.")
    ] = ""
    engine_api_key: Annotated[str, _doc("The key that a remote engine wants; empty: none.")] = ""
    engine_model: Annotated[str, _doc("What a remote engine calls the model; empty: the first that it lists.")] = ""
    tokenizer: Annotated[
        str,
        _doc(
            "The model (a name, a path) whose tokenizer a remote engine's model has: prompts are then counted and "
            "written here; empty: text and messages are passed on as they are."
        ),
    ] = ""
    quantization: Annotated[
        str,
        _doc(
            "How the weights are quantised: int8, or on GPUs fp8, int4 or w4a8 (int4, with the inputs of more than 64 "
            "tokens rounded to FP8); with vLLM fp8, awq, gptq, bitsandbytes and others; empty: as the model says."
        ),
    ] = ""
    tensor_parallel_size: Annotated[
        int,
        _doc("Ranks that hold the model together, each with a GPU, or all on the CPU; for native and vLLM.", ge=1),
    ] = 1
    trust_remote_code: Annotated[
        bool, _doc("Let vLLM run the code that comes with the model. Only for models that you have read.")
    ] = False
    pass_env: Annotated[
        list[str],
        _doc(
            "An environment variable to pass to vLLM's process, as in HTTPS_PROXY; may be repeated. Others are not "
            "passed: they may hold secrets."
        ),
    ] = []
    allow_auto_tuning: Annotated[
        bool, _doc("Where memory is short, try again with smaller settings; without it the load fails with the reason.")
    ] = True
    stream_chunk_size: Annotated[
        int,
        _doc(
            "Tokens in a chunk of a streamed answer; the first comes alone and at once; 0: as they are generated.",
            ge=0,
        ),
    ] = 0


class CacheOptions(Struct, frozen=True, forbid_unknown_fields=True):
    """The paged key-value cache."""

    block_size: Annotated[int, _doc("Tokens in a cache block.", ge=1, le=256)] = 16
    num_blocks: Annotated[int, _doc("Blocks in the cache; 0: as many as the memory given to it holds.", ge=0)] = 0
    kv_cache_memory_mb: Annotated[
        int, _doc("Memory for the cache, in MiB; 0: 512 on CPU, what --gpu-memory-utilization leaves on GPU.", ge=0)
    ] = 0
    kv_cache_dtype: Annotated[
        Literal["auto", "fp8", "fp16", "int8"],
        _doc(
            "The type of the cache: auto is that of the model. Others round keys and values: fp8 (e4m3) takes half "
            "the memory of bfloat16, on GPUs; fp16 takes half, and int8 a quarter, of float32, on CPUs."
        ),
    ] = "auto"
    gpu_memory_utilization: Annotated[
        float, _doc("Share of the GPU's memory for all of Weft; above 0.90 it is lowered to 0.85.", gt=0, le=1)
    ] = 0.75
    insist_gpu_memory: Annotated[bool, _doc("Allow a --gpu-memory-utilization above 0.90.")] = False
    enable_prefix_caching: Annotated[bool, _doc("Reuse the cached blocks of prompts that begin alike.")] = True


CPU_NUM_SEQS, GPU_NUM_SEQS = 32, 256
CPU_BATCHED_TOKENS, GPU_BATCHED_TOKENS = 2048, 8192


class SchedulerOptions(Struct, frozen=True, forbid_unknown_fields=True):
    """How requests share the engine's steps."""

    max_num_seqs: Annotated[
        int,
        _doc(f"Requests that run at the same time; 0: {CPU_NUM_SEQS} on CPU, {GPU_NUM_SEQS} on GPU.", ge=0),
    ] = 0
    max_num_batched_tokens: Annotated[
        int,
        _doc(f"Tokens computed in one step; 0: {CPU_BATCHED_TOKENS} on CPU, {GPU_BATCHED_TOKENS} on GPU.", ge=0),
    ] = 0
    max_prefill_chunk: Annotated[
        int,
        _doc("Prompt tokens of one request in a step; 0: 256 on CPU, 2048 on GPU, 4096 there with fp8 and w4a8.", ge=0),
    ] = 0
    max_mixed_prefill: Annotated[
        int,
        _doc(
            "Prompt tokens in a step that also decodes: fewer keep the time between tokens short, more start new "
            "answers sooner; 0: 256 on CPU, 384 on GPU.",
            ge=0,
        ),
    ] = 0
    max_step_ms: Annotated[
        int,
        _doc(
            "Time that a step with prompts should take: their chunks become shorter where steps took longer; "
            "0: 180 on CPU; on GPU 50 where requests decode beside them, else no bound.",
            ge=0,
        ),
    ] = 0
    speculative: Annotated[
        Literal["off", "ngram"],
        _doc(
            "ngram: for requests that do not say, draft tokens by looking the last ones up earlier in prompt and "
            "answer, and verify them in one step; no token changes."
        ),
    ] = "off"
    max_loras: Annotated[
        int, _doc("LoRA adapters that are in use at the same time; requests for others wait.", ge=1)
    ] = 8
    max_num_images: Annotated[
        int, _doc("Images that are generated at the same time; 0: 16 on CPU, 64 on GPU.", ge=0)
    ] = 0
    max_mixed_denoise: Annotated[
        int,
        _doc(
            "Tokens of denoise steps in a step that also decodes: fewer keep the time between tokens short, more "
            "finish images sooner; 0: 256 on CPU, 2048 on GPU.",
            ge=0,
        ),
    ] = 0
    image_checkpoint_steps: Annotated[
        int,
        _doc(
            "Denoise steps between two checkpoints of an image's latents, from which another engine goes on when this "
            "one dies; 0: none, and it starts again.",
            ge=0,
        ),
    ] = 10
    max_embedding_mb: Annotated[
        int,
        _doc(
            "MiB that images may hold in all: latents, hidden states of prompts, and tensors of clients, among them "
            "the prompt embeds of requests for text. Requests with more of them wait, up to as much again.",
            ge=1,
        ),
    ] = 1024
    max_queued_requests: Annotated[
        int,
        _doc(
            "Waiting requests; one more is answered 429. A tenant below its equal share still gets in, up to twice as "
            "many in all.",
            ge=1,
        ),
    ] = 1024
    max_queued_tokens: Annotated[
        int,
        _doc(
            "Prompt tokens of waiting requests; more are answered 429. A tenant below its equal share still gets in, "
            "up to twice as many in all.",
            ge=1,
        ),
    ] = 1_000_000
    max_preemptions: Annotated[
        int, _doc("After so many preemptions a request waits until all its blocks are free.", ge=0)
    ] = 3
    force_preempt_every: Annotated[int, _doc("For tests: preempt a request every n steps; 0: never.", ge=0)] = 0

    def num_seqs(self, *, on_cpu: bool) -> int:
        """Return how many requests run at the same time on a kind of device."""
        return self.max_num_seqs or (CPU_NUM_SEQS if on_cpu else GPU_NUM_SEQS)

    def num_batched_tokens(self, *, on_cpu: bool) -> int:
        """Return how many tokens are computed in one step on a kind of device."""
        return self.max_num_batched_tokens or (CPU_BATCHED_TOKENS if on_cpu else GPU_BATCHED_TOKENS)


class EngineOptions(Struct, frozen=True, forbid_unknown_fields=True):
    """How the engine process is supervised."""

    start_timeout_s: Annotated[float, _doc("Seconds until the engine must be ready.", gt=0)] = 600.0
    heartbeat_timeout_s: Annotated[float, _doc("An engine silent for so many seconds is replaced.", gt=0)] = 10.0
    step_timeout_s: Annotated[float, _doc("An engine whose step takes more seconds is replaced.", gt=0)] = 300.0
    max_restarts: Annotated[
        int, _doc("Engine deaths in a row, without a token in between, before Weft gives up.", ge=0)
    ] = 5


class ServerOptions(Struct, frozen=True, forbid_unknown_fields=True):
    """The HTTP server."""

    host: Annotated[str, _doc("Address to listen on; one that other machines can reach needs --api-key.")] = "127.0.0.1"
    insecure: Annotated[bool, _doc("Let other machines reach --host without a key.")] = False
    port: Annotated[int, _doc("Port to listen on; 0: any free one.", ge=0, le=65535)] = 8000
    keep_serving_without_engine: Annotated[
        bool,
        _doc(
            "When the engine has died too often (--max-restarts), keep serving errors and try again, ever less often; "
            "else the server exits with 1."
        ),
    ] = False
    ssl_certfile: Annotated[
        str, _doc("The server's certificate chain, a PEM file, read again when it changes; empty: no TLS.")
    ] = ""
    ssl_keyfile: Annotated[
        str, _doc("The private key of --ssl-certfile, a PEM file; empty: it is in the same file.")
    ] = ""
    ssl_keyfile_password: Annotated[str, _doc("The password of --ssl-keyfile, if it is encrypted.")] = ""
    drain_timeout_s: Annotated[float, _doc("Seconds that running requests may go on after SIGTERM.", ge=0)] = 30.0
    request_timeout_s: Annotated[float, _doc("A request is ended after so many seconds; 0: never.", ge=0)] = 0.0
    max_body_mb: Annotated[int, _doc("Largest request body, in MiB; a larger one is answered 413.", ge=1)] = 32
    fields: Annotated[
        FieldMode,
        _doc(
            "Published fields that Weft does not honour and that cannot make an answer wrong: standard accepts them, "
            "and names them in the header weft-fields-without-effect; strict refuses them; tolerant accepts unknown "
            "ones as well."
        ),
    ] = "standard"
    responses_store_entries: Annotated[
        int, _doc("Answers of /v1/responses kept for previous_response_id, at most a day; 0: none.", ge=0)
    ] = 1000
    responses_store_mb: Annotated[int, _doc("Memory for the kept answers, in MiB of text.", ge=0)] = 64
    max_schema_kb: Annotated[
        int, _doc("Largest JSON schema or grammar of a request, in KiB of characters.", ge=1, le=1000)
    ] = 64
    max_schema_depth: Annotated[int, _doc("Deepest nesting of schemas in a request's JSON schema.", ge=1)] = 32
    grammar_timeout_s: Annotated[float, _doc("Seconds until a schema or grammar must be compiled.", gt=0)] = 5.0
    json_whitespace: Annotated[
        JsonWhitespace,
        _doc(
            "White space in JSON that must fit a schema: compact: a space behind every comma and colon; indented: "
            "anywhere a space, or a new line and its indentation, which small models may not find the end of."
        ),
    ] = "compact"
    api_key: Annotated[
        list[str], _doc("Clients must send one of these keys; none: no key is required. WEFT_API_KEY takes a,b.")
    ] = []
    api_key_file: Annotated[
        str, _doc("More keys, one a line, with or without a name before it; read again whenever it changes.")
    ] = ""
    share_prefix_cache: Annotated[
        bool,
        _doc(
            "Share the prefix cache between tenants (names of keys): a system prompt of all is computed once, but "
            "cache hits tell each tenant what others asked."
        ),
    ] = False
    admin_key: Annotated[list[str], _doc("Keys for /admin, and for nothing else; none: there is no /admin.")] = []
    admin_key_file: Annotated[str, _doc("More admin keys, in a file like --api-key-file.")] = ""
    allowed_host: Annotated[
        list[str], _doc("Host names other than localhost that clients may use for a server without keys.")
    ] = []
    cors_origins: Annotated[
        list[str],
        _doc(
            "An origin whose pages may use the server from a browser (CORS), as in https://chat.example.org, besides "
            "those of this machine; may be repeated; *: any. Without keys, pages of other origins are refused."
        ),
    ] = []
    page: Annotated[bool, _doc("Serve the playground at / and the API reference at /docs, for browsers.")] = True
    compat_api: Annotated[
        list[str],
        _doc("Answer the interface of another local server as well: ollama or llamacpp; may be repeated, or be a,b."),
    ] = []
    keep_alive_s: Annotated[
        float, _doc("Seconds between keep-alive comments of a stream that waits for its first token; 0: none.", ge=0)
    ] = 10.0
    slow_reader_timeout_s: Annotated[
        float, _doc("A client that reads nothing of its answer for so many seconds is disconnected; 0: never.", ge=0)
    ] = 120.0
    adapter_root: Annotated[
        list[str],
        _doc(
            "A folder from below which /admin/lora/load may load adapters; may be repeated. None: WEFT_HOME. Those of "
            "--adapter may be loaded again in any case."
        ),
    ] = []
    data_dir: Annotated[
        str,
        _doc(
            "Where files, batches and background responses of clients are kept; empty: data/PORT in WEFT_HOME. Only "
            "one server may use it."
        ),
    ] = ""
    batch_concurrency: Annotated[int, _doc("Requests of batches that run at the same time.", ge=1, le=1024)] = 8
    profile_dir: Annotated[str, _doc("Where POST /admin/profile/start puts traces; empty: it is refused.")] = ""
    live: Annotated[
        bool, _doc("Answer GET /live with a stream of the engine's state, for the page and `weft top`.")
    ] = True
    log_level: Annotated[Literal["debug", "info", "warning", "error"], _doc("The lowest level that is logged.")] = (
        "info"
    )
    log_format: Annotated[Literal["text", "json"], _doc("json: every line of the log is a JSON object.")] = "text"
    log_prompts: Annotated[bool, _doc("Log the text of prompts as well.")] = False
    otlp_endpoint: Annotated[
        str, _doc("Send a trace of every request to this URL, by OTLP over HTTP (needs the extra otel); empty: none.")
    ] = ""


class LimitOptions(Struct, frozen=True, forbid_unknown_fields=True):
    """How much clients may ask for, over HTTP and gRPC alike."""

    max_requests_per_minute_per_key: Annotated[
        int, _doc("More are answered 429; without keys it holds for all clients together; 0: no limit.", ge=0)
    ] = 0
    max_tokens_per_minute_per_key: Annotated[
        int,
        _doc(
            "The same for tokens, of prompts and answers together, reserved when a request begins (prompt and "
            "max_tokens) and settled when it ends; 0: no limit.",
            ge=0,
        ),
    ] = 0
    max_concurrent_per_key: Annotated[int, _doc("The same for requests at the same time; 0: no limit.", ge=0)] = 2048
    max_inflight_body_mb_per_key: Annotated[
        int,
        _doc("The same for MiB of bodies that are being read or parsed; at least --max-body-mb; 0: no limit.", ge=0),
    ] = 256
    max_inflight_body_mb: Annotated[
        int, _doc("The same of all clients together; more are answered 503; 0: no limit.", ge=0)
    ] = 1024
    max_model_loads_per_minute_per_key: Annotated[
        int, _doc("Of several models: loads that a key's requests may cause; more are answered 429; 0: no limit.", ge=0)
    ] = 20
    max_header_kb: Annotated[
        int, _doc("A request's head (its first line and its headers), in KiB; more is answered 431.", ge=1, le=1024)
    ] = 32
    max_headers: Annotated[int, _doc("Headers of a request; more are answered 431.", ge=8)] = 128
    max_json_depth: Annotated[
        int, _doc("How deep a body's JSON may be nested; deeper is answered 400.", ge=4, le=512)
    ] = 64
    max_json_values: Annotated[
        int,
        _doc(
            "Values in a body's JSON, and escapes in its strings; a list, an object or a name in one counts as five. "
            "More are 400.",
            ge=1000,
        ),
    ] = 500_000
    max_messages: Annotated[int, _doc("Messages of one chat; more are answered 400.", ge=1)] = 2048
    max_tools: Annotated[int, _doc("Tools of one chat; more are answered 400.", ge=1)] = 128
    max_prompts: Annotated[int, _doc("Prompts of one request; more are answered 400.", ge=1)] = 128
    max_n: Annotated[int, _doc("Choices of one prompt (n); more are answered 400.", ge=1)] = 128
    max_stop: Annotated[int, _doc("Stop strings of one request; more are answered 400.", ge=1, le=16)] = 16
    max_stop_token_ids: Annotated[int, _doc("Stop token ids of one request; more are answered 400.", ge=0, le=1024)] = (
        1024
    )
    max_logprobs: Annotated[
        int, _doc("Likeliest tokens that are reported for each one; more are answered 400.", ge=0, le=20)
    ] = 20
    max_logit_bias: Annotated[int, _doc("Entries of logit_bias; more are answered 400.", ge=0, le=1024)] = 1024
    max_answer_mb: Annotated[
        int,
        _doc(
            "Memory for the log probabilities or vectors of one answer, in MiB, by an estimate before they are "
            "computed; more is answered 400.",
            ge=1,
        ),
    ] = 256
    max_file_mb: Annotated[int, _doc("Largest uploaded file, in MiB; a larger one is answered 413.", ge=1)] = 200
    max_data_mb_per_key: Annotated[
        int, _doc("Disk for the files and batches of one key, in MiB; more are answered 413.", ge=1)
    ] = 4096
    max_batches_per_key: Annotated[int, _doc("Batches of one key that have not ended.", ge=0)] = 100
    max_batch_lines: Annotated[int, _doc("Lines of one batch; each is at most as large as --max-body-mb.", ge=1)] = (
        50_000
    )
    allow_prompt_embeds: Annotated[
        bool,
        _doc("Take tensors from clients: prompt embeds, of text and images, and other conditioning of a model."),
    ] = False


class GrpcOptions(Struct, frozen=True, forbid_unknown_fields=True):
    """The gRPC server."""

    grpc: Annotated[bool, _doc("Answer gRPC as well, on the same --host.")] = True
    grpc_port: Annotated[
        int,
        _doc(
            "Port for gRPC; 0: any free one; -1: 50051, or any free one while another program has that.",
            ge=-1,
            le=65535,
        ),
    ] = -1
    grpc_socket: Annotated[str, _doc("A unix socket for gRPC in addition to the port; empty: none.")] = ""
    grpc_buffer_size: Annotated[
        int, _doc("Chunks of text joined into one message at most; 1: every chunk is a message.", ge=1)
    ] = 8
    grpc_flush_interval_ms: Annotated[
        int, _doc("Time that a chunk waits for others, in an answer that is faster than this.", ge=0)
    ] = 50
    grpc_slowest_flush_ms: Annotated[
        int, _doc("Longest time that it waits for two others, in an answer that is slower; 0: it does not.", ge=0)
    ] = 2000
    grpc_max_message_mb: Annotated[
        int, _doc("Largest message from a client, in MiB; a larger one is RESOURCE_EXHAUSTED.", ge=1, le=1024)
    ] = 4
    grpc_max_streams: Annotated[
        int, _doc("Calls of StreamPredict and GenerateImage at the same time; one more is RESOURCE_EXHAUSTED.", ge=1)
    ] = 1000
    grpc_tls_cert: Annotated[str, _doc("The server's certificate chain, a PEM file; empty: no TLS.")] = ""
    grpc_tls_key: Annotated[str, _doc("The private key of --grpc-tls-cert, a PEM file.")] = ""
    grpc_tls_client_ca: Annotated[
        str, _doc("A PEM file with authorities: clients must have a certificate from one of them.")
    ] = ""


class ModelPoolOptions(Struct, frozen=True, forbid_unknown_fields=True):
    """Several models behind one server."""

    models_file: Annotated[
        str,
        _doc(
            "A file that names the models to serve: JSON, TOML or YAML; read again whenever it changes. Or the JSON "
            "itself, which begins with {."
        ),
    ] = ""
    preload: Annotated[list[str], _doc("Models of the file to load at start; others load on their first request.")] = []
    max_loaded_models: Annotated[
        int,
        _doc("Models loaded at the same time; for one more, the least recently used is unloaded; 0: no limit.", ge=0),
    ] = 0
    max_models_memory: Annotated[
        str,
        _doc(
            "Memory of all loaded models together: GiB (24), or a share of the machine's (80%); empty: what is free.",
            pattern=r"^([0-9]+(\.[0-9]+)?%?)?$",
        ),
    ] = ""
    model_wait_s: Annotated[
        float, _doc("Seconds that a request waits for its model to load; then it is answered 503.", gt=0)
    ] = 120.0
    max_waiting_per_model: Annotated[
        int, _doc("Requests that wait for one model to be loaded; one more is answered 503.", ge=1)
    ] = 256
    check_models: Annotated[bool, _doc("Find, fetch and check all models of the file, load none, and end.")] = False


class ClusterOptions(Struct, frozen=True, forbid_unknown_fields=True):
    """Replicas of the model, on this machine or others."""

    replicas: Annotated[
        int, _doc("Replicas of the model that Ray starts and keeps; 0: none, the engine is on this machine.", ge=0)
    ] = 0
    min_replicas: Annotated[int, _doc("Replicas that are kept when there is nothing to do; 0: --replicas.", ge=0)] = 0
    max_replicas: Annotated[int, _doc("Replicas that there may be under load; 0: --replicas.", ge=0)] = 0
    replica_addresses: Annotated[
        list[str],
        _doc("The replicas to use, as in 10.0.0.7:9400 (`weft replica` starts one); may be repeated, or be a,b."),
    ] = []
    cluster_key_file: Annotated[
        str, _doc("A file with the key that edges and replicas know each other by, 32 characters or more.")
    ] = ""
    cluster_tls_cert: Annotated[
        str, _doc("This machine's certificate chain for TLS between edges and replicas, a PEM file; empty: no TLS.")
    ] = ""
    cluster_tls_key: Annotated[str, _doc("The private key of --cluster-tls-cert, a PEM file.")] = ""
    cluster_tls_ca: Annotated[
        str, _doc("A PEM file with the authority that the other side's certificate must be from.")
    ] = ""
    ray_address: Annotated[
        str, _doc("The Ray cluster for --replicas, as in 10.0.0.1:6379; empty: this machine's, or a new one.")
    ] = ""
    cluster_name: Annotated[
        str, _doc("The name under which edges of one cluster find the same replicas.", pattern=r"^[\w.-]{1,64}$")
    ] = "weft"
    replica_wait_s: Annotated[
        float, _doc("Seconds that a request waits while there is no replica; then it is answered 503.", gt=0)
    ] = 30.0

    @property
    def is_used(self) -> bool:
        """True when a server's engines are replicas."""
        return bool(self.replicas or self.min_replicas or self.max_replicas or self.replica_addresses)


class Config(Struct, frozen=True, forbid_unknown_fields=True):
    model: ModelOptions = ModelOptions()
    backend: BackendOptions = BackendOptions()
    cache: CacheOptions = CacheOptions()
    scheduler: SchedulerOptions = SchedulerOptions()
    engine: EngineOptions = EngineOptions()
    server: ServerOptions = ServerOptions()
    limits: LimitOptions = LimitOptions()
    grpc: GrpcOptions = GrpcOptions()
    model_pool: ModelPoolOptions = ModelPoolOptions()
    cluster: ClusterOptions = ClusterOptions()


LoadMode = Literal["check_only", "check_and_load", "async_load"]
"""check_only finds, fetches and checks the model and loads nothing; async_load does not wait until it is loaded."""


class ModelEntry(Struct, frozen=True, kw_only=True):
    """One of several models: the name that clients use, and all its settings."""

    name: str
    config: Config
    adapters: dict[str, str] = {}
    """LoRA directories by the names that requests give."""
    load_mode: LoadMode = "check_and_load"
    preload: bool = False
    """True to load it when the server starts, and not only when a request asks for it."""
    place: str = ""
    """The file and the line where it is written."""


class Setting(Struct, frozen=True):
    """One field of the configuration, as flags, environment and files need to know it."""

    section: str
    name: str
    type: Any
    default: Any
    doc: str
    choices: tuple[str, ...] = ()
    old_name: str = ""
    """A name that it had before, and still answers to."""

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def env(self) -> str:
        return "WEFT_" + self.name.upper()


OLD_NAMES = {"cors_origins": "allowed_origin"}


@cache
def settings(*sections: str) -> tuple[Setting, ...]:
    """Return every setting of the named sections, or of all of them."""
    return tuple(_settings(sections))


def _settings(sections: tuple[str, ...]) -> Iterator[Setting]:
    for section, options in get_type_hints(Config).items():
        if sections and section not in sections:
            continue
        for name, hint in get_type_hints(options, include_extras=True).items():
            bare, meta = get_args(hint)
            literal = getattr(bare, "__origin__", None) is Literal
            yield Setting(
                section=section,
                name=name,
                type=str if literal else bare,
                default=getattr(options(), name),
                doc=meta.description,
                choices=get_args(bare) if literal else (),
                old_name=OLD_NAMES.get(name, ""),
            )
