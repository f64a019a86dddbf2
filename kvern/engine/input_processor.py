"""From what a user asks to what the engine is told: tokenization, validation, one AddRequest per completion.

All that can be wrong with a request is found here, before anything of it is admitted, and said by InvalidRequest
with the field and the limit. Nothing here changes state, except that an unseeded request uses up one seed.
"""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any, NoReturn

import msgspec

from kvern.clock import Clock, MonotonicClock
from kvern.config import ModelConfig, SchedulerConfig
from kvern.engine.messages import AddRequest
from kvern.sampling.rng import derive_seed
from kvern.sampling_params import MAX_LOGPROBS, InvalidRequest, SamplingParams
from kvern.tokenizer.base import Tokenizer, check_text

MAX_NAME_LENGTH = 1024  # characters of a cache salt or a tenant
_INT32 = 2**31


class InputProcessor:
    """Makes AddRequests for one engine.

    limits: the scheduler's final configuration. seed: of the engine; the k-th request that names no seed gets
    `derive_seed(seed, k)`, so that the same requests in the same order give the same texts.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        model_config: ModelConfig,
        limits: SchedulerConfig,
        *,
        seed: int = 0,
        clock: Clock | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.vocab_size = model_config.vocab_size
        self.max_prompt_len = limits.max_model_len - 1  # room for one output token
        self._max_model_len = limits.max_model_len
        self._limits = limits
        self._max_cached_tokens = (limits.num_blocks - 1) * limits.block_size  # block 0 is nobody's
        self._seed = seed
        self._unseeded = itertools.count()
        self._clock: Clock = clock or MonotonicClock()

    def process(
        self,
        request_id: str,
        prompt: str | list[int],
        sampling: SamplingParams,
        *,
        arrival_time: float | None = None,
        priority: int = 0,
        tenant: str | None = None,
        cache_salt: str | None = None,
        ttft_target: float | None = None,
        tpot_target: float | None = None,
    ) -> list[AddRequest]:
        """The requests for the engine, one per completion that is made: `sampling.num_candidates`. Raises
        InvalidRequest.

        Their ids are `request_id` itself when that is 1, else `{request_id}_{index}`; all but the first are forks of
        the first. max_tokens None becomes what is left of max_model_len, and a larger one is cut to it. Only the
        first completion asks for prompt logprobs. arrival_time: now, on the clock given at construction, if not given.
        """
        if arrival_time is None:
            arrival_time = self._clock.now()
        _check_priority(priority)
        check_name(tenant, "tenant")
        check_name(cache_salt, "cache_salt")
        _check_target(ttft_target, "ttft_target")
        _check_target(tpot_target, "tpot_target")
        sampling.check_vocabulary(self.vocab_size)
        token_ids = self.tokenize(prompt)
        sampling = self._resolve(sampling, len(token_ids))
        return [
            AddRequest(
                request_id=request_id if sampling.num_candidates == 1 else f"{request_id}_{index}",
                prompt_token_ids=token_ids,
                sampling=_child(sampling, index),
                arrival_time=arrival_time,
                priority=priority,
                tenant=tenant,
                cache_salt=cache_salt,
                fork_of=f"{request_id}_0" if index else None,
                ttft_target=ttft_target,
                tpot_target=tpot_target,
            )
            for index in range(sampling.num_candidates)
        ]

    def tokenize(self, prompt: str | list[int], *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a prompt that can be served: neither empty nor too long. Raises InvalidRequest.

        A text gets the tokenizer's special tokens unless told otherwise (a rendered chat has its own). Token ids
        are taken as they are. Takes long for long texts, but is safe to run in a thread.
        """
        if isinstance(prompt, str):
            self._check_text_length(prompt)
            token_ids = self.tokenizer.encode(prompt, add_special_tokens)
        else:
            token_ids = self._check_token_ids(prompt)
        if not token_ids:
            raise InvalidRequest("the prompt must hold at least one token, got none", "prompt")
        if len(token_ids) > self.max_prompt_len:
            self._refuse_length(f"has {len(token_ids)} tokens")
        if len(token_ids) > self._max_cached_tokens:
            raise InvalidRequest(
                f"the prompt has {len(token_ids)} tokens, but the whole KV cache holds only {self._max_cached_tokens}",
                "prompt",
                "context_length_exceeded",
            )
        return token_ids

    def tokenize_chat(self, messages: list[dict[str, Any]], **options: Any) -> list[int]:
        """Token ids of a conversation; `options` as for kvern.tokenizer.render_chat. Raises InvalidRequest."""
        from kvern.tokenizer import render_chat

        return self.tokenize(render_chat(self.tokenizer, messages, **options), add_special_tokens=False)

    def _check_text_length(self, text: str) -> None:
        """Refuse cheaply what is too long in any tokenization: no token is more than `_longest_token` bytes."""
        try:
            size = len(check_text(text))
        except InvalidRequest as exc:
            raise InvalidRequest(str(exc), "prompt") from None
        if size > self.max_prompt_len and size > self.max_prompt_len * self._longest_token:
            self._refuse_length(f"has {size} bytes, at least {-(-size // self._longest_token)} tokens")

    @functools.cached_property
    def _longest_token(self) -> int:
        return max(len(self.tokenizer.token_bytes(token)) for token in range(self.tokenizer.vocab_size))

    def _check_token_ids(self, prompt: Any) -> list[int]:
        if not isinstance(prompt, (list, tuple)):
            raise InvalidRequest(f"prompt must be a text or a list of token ids, got {type(prompt).__name__}", "prompt")
        if len(prompt) > self.max_prompt_len:
            self._refuse_length(f"has {len(prompt)} tokens")
        for token in prompt:
            if type(token) is not int or not 0 <= token < self.vocab_size:
                raise InvalidRequest(
                    f"prompt: token ids must be integers from 0 to {self.vocab_size - 1}, got {token!r:.100}", "prompt"
                )
        return list(prompt)

    def _refuse_length(self, what: str) -> NoReturn:
        raise InvalidRequest(
            f"the prompt {what}; the limit is {self.max_prompt_len} "
            f"(max_model_len {self._max_model_len}, less one token of output)",
            "prompt",
            "context_length_exceeded",
        )

    def _resolve(self, sampling: SamplingParams, prompt_len: int) -> SamplingParams:
        """`sampling` with max_tokens and seed filled in."""
        room = self._max_model_len - prompt_len
        if sampling.use_beam_search:
            self._check_beam_search(sampling)
        if sampling.min_tokens > room:
            raise InvalidRequest(
                f"min_tokens is {sampling.min_tokens}, but the prompt of {prompt_len} tokens leaves room for {room}",
                "min_tokens",
            )
        max_tokens = room if sampling.max_tokens is None else min(sampling.max_tokens, room)
        seed = derive_seed(self._seed, next(self._unseeded)) if sampling.seed is None else sampling.seed
        if (max_tokens, seed) == (sampling.max_tokens, sampling.seed):
            return sampling
        return msgspec.structs.replace(sampling, max_tokens=max_tokens, seed=seed)

    def _check_beam_search(self, sampling: SamplingParams) -> None:
        if sampling.width > self._limits.max_num_seqs:
            text = f"a beam of {sampling.width} does not fit into max_num_seqs = {self._limits.max_num_seqs}"
            raise InvalidRequest(text, "beam_width")
        if (sampling.logprobs or 0) > MAX_LOGPROBS:
            raise InvalidRequest(f"logprobs must be between 0 and {MAX_LOGPROBS}, got {sampling.logprobs}", "logprobs")


def _child(sampling: SamplingParams, index: int) -> SamplingParams:
    if sampling.use_beam_search or sampling.num_candidates == 1:
        return sampling
    child = sampling.child(index)
    if sampling.known_at_the_end and child.logprobs is None:
        child = msgspec.structs.replace(child, logprobs=0)  # to choose by
    return child if index == 0 else msgspec.structs.replace(child, prompt_logprobs=None)


def _check_priority(priority: Any) -> None:
    if type(priority) is not int or not -_INT32 <= priority < _INT32:
        raise InvalidRequest(f"priority must be an integer of 32 bits, got {priority!r:.100}", "priority")


def _check_target(seconds: Any, param: str) -> None:
    number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
    if seconds is not None and not (number and math.isfinite(seconds) and seconds > 0):
        raise InvalidRequest(f"{param} must be a number of seconds above 0, got {seconds!r:.100}", param)


def check_name(name: Any, param: str) -> None:
    if name is not None and not (isinstance(name, str) and 0 < len(name) <= MAX_NAME_LENGTH):
        got = f"{len(name)} characters" if isinstance(name, str) else repr(name)[:100]
        raise InvalidRequest(f"{param} must be a string of 1 to {MAX_NAME_LENGTH} characters, got {got}", param)
