"""What clients send to the OpenAI endpoints, and what is made of it. Pure functions: bytes in, engine words out.

Null means absent for every optional field. Types are strict: true is not 1 and "2" is not 2. Fields nobody here knows
are ignored, since clients send many; fields that would change the answer's meaning and are not supported are refused.
"""

from __future__ import annotations

import re
import time
import uuid
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import msgspec
from msgspec import Meta

from kvern.sampling_params import InvalidRequest, SamplingParams

MAX_NAME_LENGTH = 1024  # characters of `user` and `cache_salt`

_Int = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
_Priority = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
_R = TypeVar("_R")

# Field -> values that mean the same as its absence. Anything else is refused, never silently ignored.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "modalities": (["text"], []),
    "functions": ([],),
    "function_call": ("none", "auto"),  # without functions there is nothing to call
    "response_format": ({"type": "text"},),
    "web_search_options": (),
    "suffix": ("",),
    "prompt_embeds": (),
    "prompt_logprobs": (),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "structured_outputs": (),
    "truncate_prompt_tokens": (),
    "logits_processors": ([],),
}


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationRequest(msgspec.Struct, kw_only=True):
    """The fields both endpoints share."""

    id_prefix: ClassVar[str] = ""
    default_max_tokens: ClassVar[int | None] = None

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: _Int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: _Int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[_Int, float] | None = None
    seed: int | None = None
    max_tokens: _Int | None = None
    max_completion_tokens: _Int | None = None
    min_tokens: _Int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[_Int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    priority: _Priority | None = None
    user: str | None = None
    cache_salt: str | None = None
    ttft_target: float | None = None
    tpot_target: float | None = None
    return_tokens_as_token_ids: bool | None = None
    use_beam_search: bool | None = None
    beam_width: _Int | None = None
    length_penalty: float | None = None
    early_stopping: bool | Literal["never"] | None = None

    # Refused unless they say the same as their absence: see _NEUTRAL.
    audio: Any = None
    modalities: Any = None
    functions: Any = None
    function_call: Any = None
    response_format: Any = None
    web_search_options: Any = None
    suffix: Any = None
    prompt_embeds: Any = None
    prompt_logprobs: Any = None
    allowed_token_ids: Any = None
    bad_words: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    structured_outputs: Any = None
    truncate_prompt_tokens: Any = None
    logits_processors: Any = None

    def check(self) -> None:
        """Refuse what cannot be honoured. Raises InvalidRequest."""
        for name, neutral in _NEUTRAL.items():
            value = getattr(self, name)
            if value is not None and value not in neutral:
                raise InvalidRequest(f"{name} is not supported", name, "unsupported_parameter")
        if len(self.user or "") > MAX_NAME_LENGTH:
            raise InvalidRequest(f"user must have at most {MAX_NAME_LENGTH} characters", "user")
        if self.cache_salt is not None and not 1 <= len(self.cache_salt) <= MAX_NAME_LENGTH:
            raise InvalidRequest(f"cache_salt must have between 1 and {MAX_NAME_LENGTH} characters", "cache_salt")

    def sampling_params(self) -> SamplingParams:
        """Raises InvalidRequest, naming the field as the client wrote it."""
        max_tokens = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        given: dict[str, Any] = {
            name: value for name in _SAMPLING_FIELDS if (value := getattr(self, name, None)) is not None
        }
        given["max_tokens"] = self.default_max_tokens if max_tokens is None else max_tokens
        given |= self.logprobs_params()
        try:
            sampling = SamplingParams(**given)
        except InvalidRequest as exc:
            param = exc.param or ""
            written = self.written_as(param)
            raise InvalidRequest(str(exc).replace(param, written, 1), written or None, exc.code) from None
        if self.stream and sampling.known_at_the_end:
            raise InvalidRequest("beam search and best_of above n cannot be streamed", "stream")
        return sampling

    def written_as(self, param: str) -> str:
        """The name under which this request gave the sampling parameter `param`."""
        return "max_completion_tokens" if param == "max_tokens" and self.max_completion_tokens is not None else param

    def logprobs_params(self) -> dict[str, int]:
        """The request's logprobs in the words of SamplingParams."""
        raise NotImplementedError

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        return self.include_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)


_SAMPLING_FIELDS = (
    "n", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "logit_bias", "seed", "min_tokens", "stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos",
    "skip_special_tokens", "best_of", "use_beam_search", "beam_width", "length_penalty", "early_stopping",
)  # fmt: skip


class CompletionRequest(GenerationRequest, kw_only=True):
    id_prefix = "cmpl-"
    default_max_tokens = 16

    prompt: str | list[str | _Int | list[_Int]] | None = None
    echo: bool | None = None
    logprobs: _Int | None = None
    best_of: _Int | None = None

    def check(self) -> None:
        super().check()
        self.prompts()

    def logprobs_params(self) -> dict[str, int]:
        if self.logprobs is None:
            return {}
        return {"logprobs": self.logprobs} | ({"prompt_logprobs": self.logprobs} if self.echo else {})

    def written_as(self, param: str) -> str:
        return "logprobs" if param == "prompt_logprobs" else super().written_as(param)

    def prompts(self) -> list[str | list[int]]:
        """The prompts, in order. A list is of texts, of token ids (one prompt), or of lists of token ids."""
        prompt = self.prompt
        if prompt is None:
            raise InvalidRequest("prompt is required", "prompt")
        if isinstance(prompt, str):
            return [prompt]
        if not prompt:
            raise InvalidRequest("prompt must not be an empty list", "prompt")
        kind = type(prompt[0])
        for i, item in enumerate(prompt):
            if type(item) is not kind:
                text = "prompt must hold only texts, only token ids or only lists of token ids"
                raise InvalidRequest(f"{text}: prompt[{i}] is of another kind than prompt[0]", "prompt")
            if kind is not int and item == []:
                raise InvalidRequest(f"prompt[{i}] has no tokens", "prompt")
        return [prompt] if kind is int else prompt  # type: ignore[list-item, return-value]


class ChatCompletionRequest(GenerationRequest, kw_only=True):
    id_prefix = "chatcmpl-"

    messages: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    logprobs: bool | None = None
    top_logprobs: _Int | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None

    def check(self) -> None:
        super().check()
        if self.tools and self.tool_choice != "none":
            raise InvalidRequest(
                'tools are not supported unless tool_choice is "none"', "tools", "unsupported_parameter"
            )
        if self.tool_choice not in (None, "none", "auto"):
            raise InvalidRequest("tool_choice needs tools, which are not supported", "tool_choice")
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs: true", "top_logprobs")
        template_options(self)

    def logprobs_params(self) -> dict[str, int]:
        return {"logprobs": self.top_logprobs or 0} if self.logprobs else {}

    def written_as(self, param: str) -> str:
        return "top_logprobs" if param == "logprobs" else super().written_as(param)


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """Either `prompt` or `messages`."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    model: str | None = None
    tokens: list[_Int] | None = None


def template_options(request: ChatCompletionRequest | TokenizeRequest) -> dict[str, Any]:
    """The keyword arguments of kvern.tokenizer.render_chat, which also checks the single messages.

    Raises InvalidRequest.
    """
    if not request.messages:
        raise InvalidRequest("messages must hold at least one message", "messages")
    if request.continue_final_message:
        if request.add_generation_prompt:
            text = "continue_final_message and add_generation_prompt exclude each other"
            raise InvalidRequest(text, "continue_final_message")
        if request.messages[-1].get("role") != "assistant":
            text = "continue_final_message needs an assistant message at the end"
            raise InvalidRequest(text, "continue_final_message")
    extra = dict(request.chat_template_kwargs or {})
    if request.reasoning_effort is not None:
        extra.setdefault("reasoning_effort", request.reasoning_effort)
    generation_prompt = request.add_generation_prompt
    return {
        "add_generation_prompt": not request.continue_final_message if generation_prompt is None else generation_prompt,
        "continue_final_message": bool(request.continue_final_message),
        "chat_template": request.chat_template,
        "chat_template_kwargs": extra or None,
    }


_PATH = re.compile(r"^(?P<what>.*?)(?: - at (?P<key>`key` in )?`\$(?P<path>.*)`)?$", re.DOTALL)


def parse(body: bytes, kind: type[_R]) -> _R:
    """The request in `body`. Raises InvalidRequest naming the field by its path, as messages[2].content."""
    try:
        body.decode()  # the decoder below skips over fields it does not know without looking at them
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as exc:
        match = _PATH.match(str(exc))
        assert match is not None
        param = (match["path"] or "").lstrip(".").replace("[...]", "") or None
        what = match["what"][:1].lower() + match["what"][1:]
        text = f"{param}: {what}" if param else f"the request is not valid: {what}"
        raise InvalidRequest(text + (" in a key" if match["key"] else ""), param) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise InvalidRequest(f"the body is not valid JSON: {exc}", code="invalid_json") from None
    except RecursionError:
        raise InvalidRequest("the body is nested too deeply", code="invalid_json") from None


def new_id(prefix: str) -> str:
    """A request id: the server's own, so that no two requests can meet under one."""
    return prefix + uuid.uuid4().hex


def unix_time() -> int:
    return int(time.time())
