from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class StreamPredictRequest(_message.Message):
    __slots__ = ("model_id", "prompt", "adapter", "priority", "generation", "metadata", "worker_hint", "cache_salt", "segments")
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    WORKER_HINT_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    model_id: str
    prompt: str
    adapter: str
    priority: int
    generation: GenerationParameters
    metadata: StreamMetadata
    worker_hint: str
    cache_salt: str
    segments: _containers.RepeatedCompositeFieldContainer[PromptSegment]
    def __init__(self, model_id: _Optional[str] = ..., prompt: _Optional[str] = ..., adapter: _Optional[str] = ..., priority: _Optional[int] = ..., generation: _Optional[_Union[GenerationParameters, _Mapping]] = ..., metadata: _Optional[_Union[StreamMetadata, _Mapping]] = ..., worker_hint: _Optional[str] = ..., cache_salt: _Optional[str] = ..., segments: _Optional[_Iterable[_Union[PromptSegment, _Mapping]]] = ...) -> None: ...

class PromptSegment(_message.Message):
    __slots__ = ("text", "token_ids", "prompt_embeds")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_EMBEDS_FIELD_NUMBER: _ClassVar[int]
    text: str
    token_ids: TokenIds
    prompt_embeds: ClientTensor
    def __init__(self, text: _Optional[str] = ..., token_ids: _Optional[_Union[TokenIds, _Mapping]] = ..., prompt_embeds: _Optional[_Union[ClientTensor, _Mapping]] = ...) -> None: ...

class TokenIds(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class GenerationParameters(_message.Message):
    __slots__ = ("max_new_tokens", "temperature", "top_p", "repetition_penalty")
    MAX_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    max_new_tokens: int
    temperature: float
    top_p: float
    repetition_penalty: float
    def __init__(self, max_new_tokens: _Optional[int] = ..., temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ...) -> None: ...

class StreamMetadata(_message.Message):
    __slots__ = ("trace_id", "tenant", "player_id", "locale", "extra")
    class ExtraEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    TRACE_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    PLAYER_ID_FIELD_NUMBER: _ClassVar[int]
    LOCALE_FIELD_NUMBER: _ClassVar[int]
    EXTRA_FIELD_NUMBER: _ClassVar[int]
    trace_id: str
    tenant: str
    player_id: str
    locale: str
    extra: _containers.ScalarMap[str, str]
    def __init__(self, trace_id: _Optional[str] = ..., tenant: _Optional[str] = ..., player_id: _Optional[str] = ..., locale: _Optional[str] = ..., extra: _Optional[_Mapping[str, str]] = ...) -> None: ...

class StreamPredictResponse(_message.Message):
    __slots__ = ("trace_id", "chunk", "end_of_stream", "index", "ttft_ms", "tokens_per_sec", "prompt_tokens", "completion_tokens", "fields_without_effect")
    TRACE_ID_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    END_OF_STREAM_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TTFT_MS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_SEC_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FIELDS_WITHOUT_EFFECT_FIELD_NUMBER: _ClassVar[int]
    trace_id: str
    chunk: str
    end_of_stream: bool
    index: int
    ttft_ms: float
    tokens_per_sec: float
    prompt_tokens: int
    completion_tokens: int
    fields_without_effect: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, trace_id: _Optional[str] = ..., chunk: _Optional[str] = ..., end_of_stream: _Optional[bool] = ..., index: _Optional[int] = ..., ttft_ms: _Optional[float] = ..., tokens_per_sec: _Optional[float] = ..., prompt_tokens: _Optional[int] = ..., completion_tokens: _Optional[int] = ..., fields_without_effect: _Optional[_Iterable[str]] = ...) -> None: ...

class ControlMessage(_message.Message):
    __slots__ = ("trace_id", "command", "payload")
    class PayloadEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    TRACE_ID_FIELD_NUMBER: _ClassVar[int]
    COMMAND_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    trace_id: str
    command: str
    payload: _containers.ScalarMap[str, str]
    def __init__(self, trace_id: _Optional[str] = ..., command: _Optional[str] = ..., payload: _Optional[_Mapping[str, str]] = ...) -> None: ...

class WorkerHealthRequest(_message.Message):
    __slots__ = ("trace_id",)
    TRACE_ID_FIELD_NUMBER: _ClassVar[int]
    trace_id: str
    def __init__(self, trace_id: _Optional[str] = ...) -> None: ...

class WorkerHealthResponse(_message.Message):
    __slots__ = ("healthy", "metrics")
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    HEALTHY_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    healthy: bool
    metrics: _containers.ScalarMap[str, str]
    def __init__(self, healthy: _Optional[bool] = ..., metrics: _Optional[_Mapping[str, str]] = ...) -> None: ...

class GenerateImageRequest(_message.Message):
    __slots__ = ("trace_id", "model_id", "prompt", "negative_prompt", "seed", "steps", "guidance_scale", "width", "height", "sampler", "previews", "priority", "prompt_embeds", "additional_information", "cache_salt")
    class AdditionalInformationEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: InformationEntry
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[InformationEntry, _Mapping]] = ...) -> None: ...
    TRACE_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    NEGATIVE_PROMPT_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    GUIDANCE_SCALE_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    HEIGHT_FIELD_NUMBER: _ClassVar[int]
    SAMPLER_FIELD_NUMBER: _ClassVar[int]
    PREVIEWS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    PROMPT_EMBEDS_FIELD_NUMBER: _ClassVar[int]
    ADDITIONAL_INFORMATION_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    trace_id: str
    model_id: str
    prompt: str
    negative_prompt: str
    seed: int
    steps: int
    guidance_scale: float
    width: int
    height: int
    sampler: str
    previews: int
    priority: int
    prompt_embeds: ClientTensor
    additional_information: _containers.MessageMap[str, InformationEntry]
    cache_salt: str
    def __init__(self, trace_id: _Optional[str] = ..., model_id: _Optional[str] = ..., prompt: _Optional[str] = ..., negative_prompt: _Optional[str] = ..., seed: _Optional[int] = ..., steps: _Optional[int] = ..., guidance_scale: _Optional[float] = ..., width: _Optional[int] = ..., height: _Optional[int] = ..., sampler: _Optional[str] = ..., previews: _Optional[int] = ..., priority: _Optional[int] = ..., prompt_embeds: _Optional[_Union[ClientTensor, _Mapping]] = ..., additional_information: _Optional[_Mapping[str, InformationEntry]] = ..., cache_salt: _Optional[str] = ...) -> None: ...

class ClientTensor(_message.Message):
    __slots__ = ("data", "shape", "dtype", "sha256")
    DATA_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    shape: _containers.RepeatedScalarFieldContainer[int]
    dtype: str
    sha256: str
    def __init__(self, data: _Optional[bytes] = ..., shape: _Optional[_Iterable[int]] = ..., dtype: _Optional[str] = ..., sha256: _Optional[str] = ...) -> None: ...

class InformationEntry(_message.Message):
    __slots__ = ("tensor", "values")
    TENSOR_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    tensor: ClientTensor
    values: InformationValues
    def __init__(self, tensor: _Optional[_Union[ClientTensor, _Mapping]] = ..., values: _Optional[_Union[InformationValues, _Mapping]] = ...) -> None: ...

class InformationValues(_message.Message):
    __slots__ = ("values",)
    VALUES_FIELD_NUMBER: _ClassVar[int]
    values: _containers.RepeatedCompositeFieldContainer[InformationValue]
    def __init__(self, values: _Optional[_Iterable[_Union[InformationValue, _Mapping]]] = ...) -> None: ...

class InformationValue(_message.Message):
    __slots__ = ("truth", "integer", "number", "text")
    TRUTH_FIELD_NUMBER: _ClassVar[int]
    INTEGER_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    truth: bool
    integer: int
    number: float
    text: str
    def __init__(self, truth: _Optional[bool] = ..., integer: _Optional[int] = ..., number: _Optional[float] = ..., text: _Optional[str] = ...) -> None: ...

class GenerateImageUpdate(_message.Message):
    __slots__ = ("trace_id", "index", "step", "steps", "image", "end_of_stream", "elapsed_ms", "seed")
    TRACE_ID_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    IMAGE_FIELD_NUMBER: _ClassVar[int]
    END_OF_STREAM_FIELD_NUMBER: _ClassVar[int]
    ELAPSED_MS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    trace_id: str
    index: int
    step: int
    steps: int
    image: bytes
    end_of_stream: bool
    elapsed_ms: float
    seed: int
    def __init__(self, trace_id: _Optional[str] = ..., index: _Optional[int] = ..., step: _Optional[int] = ..., steps: _Optional[int] = ..., image: _Optional[bytes] = ..., end_of_stream: _Optional[bool] = ..., elapsed_ms: _Optional[float] = ..., seed: _Optional[int] = ...) -> None: ...
