"""Every option of kvern, once: the same name in Python, on the command line and in the YAML file.

`EngineConfig` is what a user sets; `ModelConfig` is what a checkpoint says of itself; `SchedulerConfig` is what the
scheduler needs to know of both, all derived and final. Help texts and bounds stand beside each option, and the
command line, the YAML reader, `docs/configuration.md` and every error message are made from them.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_type_hints

import msgspec
from msgspec import Meta

BATCHINGS = ("mixed", "prefill_first")
PREEMPTIONS = ("recompute", "swap", "auto")
VICTIMS = ("policy", "newest", "least_computed")
KV_LOAD_FAILURES = ("recompute", "fail")
EVICTIONS = ("lru", "priority")
MAX_SPECULATIVE_TOKENS = 32
DEFAULT_SPECULATIVE_TOKENS = 4
_AtLeast2 = Annotated[int, Meta(ge=2)]


class InvalidConfig(ValueError):
    """An option that cannot be; the text names the option and the limit."""


class EngineConfig(msgspec.Struct, kw_only=True, frozen=True):
    model: Annotated[
        str,
        Meta(
            description="a folder, a .gguf file, a hub id, a built-in name (smollm2-135m-instruct) or toy:history-hash"
        ),
    ] = "smollm2-135m-instruct"
    served_model_name: Annotated[str | None, Meta(description="name in the API; default: the model's own")] = None
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16"], Meta(description="of weights, activations and KV cache")
    ] = "auto"
    kernels: Annotated[
        Literal["auto", "native", "reference"],
        Meta(description="which implementation computes the model; auto: native where it is built and can"),
    ] = "auto"
    activations: Annotated[
        Literal["auto", "int8", "bf16"],
        Meta(
            description="what is multiplied with quantised weights: int8 is faster, but for prompts and many streams "
            "on processors with tile registers (amx); bf16 is more exact; auto: bf16 with tile registers, else int8"
        ),
    ] = "auto"
    quantize: Annotated[
        Literal["none", "int8", "int4"],
        Meta(description="store the weights of a float checkpoint in fewer bits: Q8_0 or Q4_1 blocks"),
    ] = "none"
    graph: Annotated[
        Literal["full", "piecewise", "none"],
        Meta(description="record the model's operations once and replay them: all, all but attention, or never"),
    ] = "full"
    threads: Annotated[int, Meta(ge=0, description="threads that compute; 0: one per core this process may use")] = 0
    seed: Annotated[int, Meta(description="seed of requests that name none")] = 0

    max_model_len: Annotated[
        _AtLeast2 | None,
        Meta(description="longest prompt + output in tokens; default: the model's, as far as the cache allows"),
    ] = None
    max_num_seqs: Annotated[int, Meta(ge=1, le=65536, description="most requests that run at once")] = 64
    max_num_batched_tokens: Annotated[int, Meta(ge=1, description="most tokens in one step")] = 512
    long_prefill_token_threshold: Annotated[
        int, Meta(ge=0, description="most tokens of one prompt in a step while others want to run; 0: no such limit")
    ] = 0
    policy: Annotated[
        str, Meta(description="who runs first: fcfs, priority, fair, deadline, shortest, prefix, or module:Class")
    ] = "fcfs"
    policy_options: Annotated[
        dict[str, Any], Meta(description="options of the policy, as {name: value}; JSON on the command line")
    ] = {}
    victim: Annotated[
        Literal["policy", "newest", "least_computed"], Meta(description="who is preempted when blocks are short")
    ] = "policy"
    batching: Annotated[Literal["mixed", "prefill_first"], Meta(description="how prompts and decodes share a step")] = (
        "mixed"
    )
    delay_factor: Annotated[
        float,
        Meta(ge=0.0, description="prefill_first: hold prompts back for so many times the last prompt step's length"),
    ] = 0.0
    enable_chunked_prefill: Annotated[
        bool, Meta(description="let a prompt be computed in pieces; without, it must fit into one step")
    ] = True
    preemption: Annotated[
        Literal["recompute", "swap", "auto"],
        Meta(description="a preempted request's cache is computed again, kept on the host, or whichever is faster"),
    ] = "recompute"
    max_bypass: Annotated[
        int, Meta(ge=0, description="how many requests may overtake one that lacks blocks; 0: none, strict order")
    ] = 0
    watermark: Annotated[
        float, Meta(ge=0.0, lt=1.0, description="share of the cache kept free at admission while something runs")
    ] = 0.0

    block_size: Annotated[int, Meta(ge=1, description="tokens in one block of the KV cache")] = 16
    num_blocks: Annotated[
        _AtLeast2 | None,
        Meta(description="blocks of the KV cache, block 0 is never used; default: from kv_cache_memory"),
    ] = None
    kv_cache_memory: Annotated[
        str | None, Meta(description="size of the KV cache, as 2GiB or 512MiB; default: from the memory that is free")
    ] = None
    eviction: Annotated[
        Literal["lru", "priority"], Meta(description="which cached prefixes go first; priority: urgent requests' last")
    ] = "lru"
    max_pinned_blocks: Annotated[
        Annotated[int, Meta(ge=0)] | None,
        Meta(description="most blocks of pinned prefixes, which are never evicted; 0: none; default: a quarter"),
    ] = None
    kv_host_memory: Annotated[
        str | None,
        Meta(description="size of the host tier: room to swap to, and for evicted prefixes that may be hit again"),
    ] = None
    kv_disk: Annotated[
        str | None, Meta(description="folder of the disk tier: evicted prefixes, which survive a restart")
    ] = None
    kv_disk_size: Annotated[str, Meta(description="size of the disk tier")] = "4GiB"
    kv_connector: Annotated[
        str | None, Meta(description="share computed prefixes with other engines through a folder: file:FOLDER")
    ] = None
    kv_events: Annotated[
        str | None, Meta(description="ZeroMQ address to publish cache events at, as tcp://127.0.0.1:5557")
    ] = None
    kv_events_replay: Annotated[
        str | None, Meta(description="ZeroMQ address that answers who has missed cache events")
    ] = None
    kv_cache_dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "int8"],
        Meta(description="of keys and values; int8: half the memory of bfloat16, with a scale per token and head"),
    ] = "auto"
    enable_prefix_caching: Annotated[bool, Meta(description="share blocks of equal prefixes")] = True

    speculative: Annotated[
        Literal["none", "ngram"],
        Meta(description="guess tokens ahead, the text stays the same; ngram: from what the request has said before"),
    ] = "none"
    num_speculative_tokens: Annotated[
        Annotated[int, Meta(ge=1, le=MAX_SPECULATIVE_TOKENS)] | None,
        Meta(description=f"most tokens guessed in one step of a request; default: {DEFAULT_SPECULATIVE_TOKENS}"),
    ] = None
    async_scheduling: Annotated[
        Literal["auto", "on", "off"],
        Meta(description="plan a step while the one before it is computed; auto: off for kernels that use the CPU"),
    ] = "auto"

    check_invariants: Annotated[bool, Meta(description="check the scheduler's state after every step (slow)")] = False
    preempt_probability: Annotated[
        float,
        Meta(ge=0.0, le=1.0, description="for tests: preempt a random running request with this probability a step"),
    ] = 0.0
    log_level: Annotated[Literal["debug", "info", "warning", "error"], Meta(description="how much to say")] = "info"

    def __post_init__(self) -> None:
        if self.kv_cache_memory is not None:
            parse_bytes(self.kv_cache_memory, "kv_cache_memory")
        if self.kv_host_memory is not None:
            parse_bytes(self.kv_host_memory, "kv_host_memory")
        parse_bytes(self.kv_disk_size, "kv_disk_size")
        if self.kv_connector is not None and not self.kv_connector.startswith("file:"):
            raise InvalidConfig(f"kv_connector must be file:FOLDER, got {self.kv_connector!r}")


class ServerConfig(msgspec.Struct, kw_only=True, frozen=True):
    """Options of `kvern serve` beside those of the engine."""

    host: Annotated[str, Meta(description="address to listen on")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535, description="port to listen on; 0: any free one, printed at start")] = (
        8000
    )
    api_key: Annotated[str | None, Meta(description="if set, requests must carry it as a bearer token")] = None
    max_body_size: Annotated[str, Meta(description="largest request body; larger ones get 413")] = "16MiB"
    shutdown_timeout: Annotated[
        float, Meta(ge=0.0, description="seconds running requests may still take after SIGTERM")
    ] = 30.0

    def __post_init__(self) -> None:
        parse_bytes(self.max_body_size, "max_body_size")


class ModelConfig(msgspec.Struct, kw_only=True, frozen=True):
    """A decoder-only transformer as its checkpoint describes it. Sizes in elements."""

    architecture: str  # llama, qwen2, gemma3, ...: the name of a file in kvern/models
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: dict[str, Any] | None = None  # as in Hugging Face's config.json
    local_rope_theta: float | None = None  # of layers with a window, unscaled, where they have one of their own
    query_pre_attn_scalar: float | None = None  # queries are divided by its root; None: by that of head_dim
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    sliding_window: int | None = None  # how many tokens a layer sees, the present one included; None: all
    layer_windows: tuple[int | None, ...] | None = None  # the same for each layer, where they differ
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    weights_dtype: str = "float32"  # what the checkpoint stores, for dtype=auto

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The window of each layer."""
        return self.layer_windows or (self.sliding_window,) * self.num_layers

    def kv_bytes_per_token(self, bytes_per_element: float, num_layers: int | None = None) -> int:
        """Keys and values of one token in `num_layers` layers; default: in all of them."""
        layers = self.num_layers if num_layers is None else num_layers
        return round(2 * layers * self.num_kv_heads * self.head_dim * bytes_per_element)


class SchedulerConfig(msgspec.Struct, kw_only=True, frozen=True):
    """What the scheduler knows of the world. Same names and meanings as in EngineConfig, all of them final."""

    num_blocks: Annotated[int, Meta(ge=2)]
    block_size: Annotated[int, Meta(ge=1)] = 16
    max_num_seqs: Annotated[int, Meta(ge=1)] = 64
    max_num_batched_tokens: Annotated[int, Meta(ge=1)] = 1024
    max_model_len: Annotated[int, Meta(ge=2)] = 4096
    policy: str = "fcfs"
    policy_options: dict[str, Any] = {}
    victim: str = "policy"
    batching: str = "mixed"
    delay_factor: Annotated[float, Meta(ge=0.0)] = 0.0
    enable_chunked_prefill: bool = True
    preemption: str = "recompute"
    max_preemptions: Annotated[int, Meta(ge=1)] = 10_000
    host_blocks: Annotated[int, Meta(ge=0)] = 0
    encoder_budget: Annotated[int, Meta(ge=0)] = 0  # image embeddings computed in one step
    encoder_cache_size: Annotated[int, Meta(ge=0)] = 0  # image embeddings kept
    transfer_lease: Annotated[float, Meta(gt=0.0)] = 300.0  # seconds after which a transfer counts as failed
    kv_load_failure: str = "recompute"
    disk_blocks: Annotated[int, Meta(ge=0)] = 0
    record_cache_events: bool = False
    eviction: str = "lru"
    max_pinned_blocks: Annotated[int, Meta(ge=0)] | None = None  # None: a quarter of all
    kv_groups: tuple[str, ...] = ("full",)  # see kvern.cache.groups
    max_loras: Annotated[int, Meta(ge=0)] = 0  # 0: no limit
    enable_prefix_caching: bool = True
    long_prefill_token_threshold: Annotated[int, Meta(ge=0)] = 0
    watermark: Annotated[float, Meta(ge=0.0, lt=1.0)] = 0.0
    max_bypass: Annotated[int, Meta(ge=0)] = 0
    eos_token_ids: tuple[int, ...] = ()
    num_speculative_tokens: Annotated[int, Meta(ge=0)] = 0
    async_scheduling: bool = False  # steps are planned before the results of earlier ones are known
    decode_context_parallel_size: Annotated[int, Meta(ge=1)] = 1  # ranks that share the tokens of a block

    @property
    def tokens_per_block(self) -> int:
        """Of a block as the scheduler counts them: one on each rank, see kvern.cache.context_parallel."""
        return self.block_size * self.decode_context_parallel_size

    def __post_init__(self) -> None:
        for option, known in (
            ("batching", BATCHINGS),
            ("preemption", PREEMPTIONS),
            ("victim", VICTIMS),
            ("kv_load_failure", KV_LOAD_FAILURES),
            ("eviction", EVICTIONS),
        ):
            value = getattr(self, option)
            if value not in known:
                raise InvalidConfig(f"{option} must be one of {', '.join(known)}, got {value!r}")


class Option(msgspec.Struct, frozen=True):
    """One option, for whoever prints or parses it."""

    name: str
    type: Any  # int, float, str, bool or dict; None is also allowed where `optional`
    default: Any
    description: str
    choices: tuple[Any, ...] | None = None
    optional: bool = False


def options(config: type[msgspec.Struct]) -> list[Option]:
    """The options of a configuration class, in the order they are written."""
    from types import UnionType
    from typing import Union, get_args, get_origin

    hints = get_type_hints(config, include_extras=True)
    found = []
    for info in msgspec.structs.fields(config):
        inner, *metas = get_args(hints[info.name])
        optional = get_origin(inner) in (Union, UnionType)
        if optional:
            inner = next(t for t in get_args(inner) if t is not type(None))
        if get_origin(inner) is Annotated:
            inner = get_args(inner)[0]
        inner = dict if get_origin(inner) is dict else inner
        choices = get_args(inner) if get_origin(inner) is Literal else None
        text = next((m.description for m in metas if isinstance(m, Meta) and m.description), "")
        default = info.default_factory() if info.default is msgspec.NODEFAULT and not info.required else info.default
        found.append(Option(info.name, str if choices else inner, default, text, choices, optional))
    return found


def make_config(config: type[Any], values: dict[str, Any]) -> Any:
    """A configuration of class `config` from {option: value}. Raises InvalidConfig naming option and limit."""
    known = {f.name for f in msgspec.structs.fields(config)}
    for name in values:
        if name not in known:
            import difflib

            near = difflib.get_close_matches(name, known, n=1)
            raise InvalidConfig(f"unknown option {name!r}" + (f", did you mean {near[0]!r}?" if near else ""))
    choices = {option.name: option.choices for option in options(config) if option.choices}
    for name, value in values.items():
        if name in choices and value not in choices[name]:
            raise InvalidConfig(f"{name} must be one of {', '.join(map(str, choices[name]))}, got {value!r}")
        try:
            msgspec.convert({name: value} | _required(config, values), type=config)
        except msgspec.ValidationError as exc:
            raise InvalidConfig(f"{name}: {str(exc).split(' - at')[0]}, got {value!r}") from None
    return msgspec.convert(values, type=config)


def _required(config: type[Any], values: dict[str, Any]) -> dict[str, Any]:
    return {f.name: values[f.name] for f in msgspec.structs.fields(config) if f.required and f.name in values}


def parse_bytes(text: str, option: str = "size") -> int:
    """Bytes in "512MiB", "2GiB", "1.5GB", "4096". Raises InvalidConfig."""
    units = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
    units |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40, "k": 2**10, "m": 2**20, "g": 2**30}
    text = text.strip()
    digits = text.rstrip("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ").strip()
    unit = text[len(digits) :].strip().lower()
    try:
        size = float(digits) * units[unit]
    except (ValueError, KeyError):
        raise InvalidConfig(f"{option} must be a size such as 512MiB or 2GiB, got {text!r}") from None
    if not 0 < size < 2**63:
        raise InvalidConfig(f"{option} must be a positive size, got {text!r}")
    return int(size)
