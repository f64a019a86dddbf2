"""What one request asks of the sampler, validated once, before admission."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import msgspec

MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_N = 128
MAX_BEAM_WIDTH = 64
_MAX_BEAM_LOGPROBS = 1024  # what the search itself looks at
SEED_BITS = 64
_EPSILON = 1e-5


class InvalidRequest(ValueError):
    """A request that cannot be served as asked. `param` names the field, the text names the limit.

    Everything that is wrong with a request is said by this one exception, before the request is admitted.
    """

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class SamplingParams(msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True):
    """How to choose tokens and when to stop. Field names follow vLLM and the OpenAI API.

    n: number of completions for one prompt; child i samples with `child_seed(seed, i)`.
    best_of: make so many, return the n whose tokens have the highest sum of logprobs, the best first.
    use_beam_search: return the n best of beam_width beams (default: best_of, else n) instead of sampling, as
      transformers' `generate(num_beams=...)` does. A finished sequence scores
      (sum of logprobs) / (number of tokens)**length_penalty; the search ends when there are beam_width finished ones
      and, early_stopping=True: at once; False: no running beam scores better than the worst of them as long as it is
      now; "never": nor could it, at any length it may reach. What cuts or changes probabilities, and stop strings,
      do not go with it.
    temperature: 0 means greedy, the exact argmax, lowest id on a tie.
    top_k: 0 or -1 means all tokens. top_p, min_p: nucleus and relative-probability cuts, after temperature.
    presence_penalty, frequency_penalty: OpenAI's, over output tokens only.
    repetition_penalty: CTRL's (Keskar et al. 2019), over prompt and output tokens.
    logit_bias: token id -> added to its logit, -100..100.
    min_tokens: neither EOS nor stop ids nor stop strings end the request before so many output tokens.
    max_tokens: None means what is left of max_model_len.
    stop: the text ends before the first of these strings (with it, if include_stop_str_in_output).
    stop_token_ids: these tokens end the request; the token itself is delivered as an id, its text is not.
    logprobs: how many alternatives to report for each output token, beside the token itself (0 = only itself).
    prompt_logprobs: the same for each prompt token.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] | None = None
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    best_of: int | None = None
    use_beam_search: bool = False
    beam_width: int | None = None
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False

    def __post_init__(self) -> None:
        # A plain string or a list is what people write; inside it is always a tuple.
        for name in ("stop", "stop_token_ids"):
            value: Any = getattr(self, name)
            if value is None:
                value = ()
            elif isinstance(value, str):
                value = (value,)
            msgspec.structs.force_setattr(self, name, tuple(value))
        self._check_ranges()

    @property
    def greedy(self) -> bool:
        return self.temperature < _EPSILON

    @property
    def num_candidates(self) -> int:
        """How many completions are made for a prompt, of which n are returned."""
        return self.n if self.best_of is None or self.use_beam_search else self.best_of

    @property
    def width(self) -> int:
        """Of the beam."""
        return self.beam_width or self.best_of or self.n

    @property
    def known_at_the_end(self) -> bool:
        """Whether nothing can be delivered before all is there."""
        return self.use_beam_search or self.num_candidates > self.n

    def _check_ranges(self) -> None:
        def need(ok: bool, param: str, what: str) -> None:
            if not ok:
                raise InvalidRequest(f"{param} must be {what}, got {getattr(self, param)!r}", param)

        for param in _NUMBERS:
            value = getattr(self, param)
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            need(number and math.isfinite(value), param, "a finite number")
        for param in ("n", "top_k", "min_tokens"):
            need(_is_int(getattr(self, param)), param, "an integer")
        for param in ("seed", "max_tokens", "logprobs", "prompt_logprobs", "best_of", "beam_width"):
            need(getattr(self, param) is None or _is_int(getattr(self, param)), param, "an integer or null")
        need(1 <= self.n <= MAX_N, "n", f"between 1 and {MAX_N}")
        need(0.0 <= self.temperature <= 100.0, "temperature", "between 0 and 100")
        need(0.0 < self.top_p <= 1.0, "top_p", "above 0 and at most 1")
        need(0.0 <= self.min_p <= 1.0, "min_p", "between 0 and 1")
        need(self.top_k >= -1, "top_k", "-1 or 0 (all tokens) or a positive number")
        need(-2.0 <= self.presence_penalty <= 2.0, "presence_penalty", "between -2 and 2")
        need(-2.0 <= self.frequency_penalty <= 2.0, "frequency_penalty", "between -2 and 2")
        need(0.0 < self.repetition_penalty <= 100.0, "repetition_penalty", "above 0 and at most 100")
        need(self.seed is None or -(2 ** (SEED_BITS - 1)) <= self.seed < 2**SEED_BITS, "seed", "a 64-bit integer")
        need(self.max_tokens is None or self.max_tokens >= 1, "max_tokens", "at least 1")
        need(self.min_tokens >= 0, "min_tokens", "at least 0")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest(
                f"min_tokens ({self.min_tokens}) is above max_tokens ({self.max_tokens})", "min_tokens"
            )
        for param in ("logprobs", "prompt_logprobs"):
            value = getattr(self, param)
            most = _MAX_BEAM_LOGPROBS if self.use_beam_search else MAX_LOGPROBS
            need(value is None or 0 <= value <= most, param, f"between 0 and {most}")
        need(len(self.stop) <= MAX_STOP_STRINGS, "stop", f"at most {MAX_STOP_STRINGS} strings")
        need(all(isinstance(s, str) and s for s in self.stop), "stop", "non-empty strings")
        need(all(_is_int(t) and t >= 0 for t in self.stop_token_ids), "stop_token_ids", "token ids, 0 or above")
        if self.logit_bias:
            ok = all(_is_int(t) and t >= 0 and -100.0 <= b <= 100.0 for t, b in self.logit_bias.items())
            need(ok, "logit_bias", "token ids mapped to numbers between -100 and 100")
        need(self.best_of is None or self.n <= self.best_of <= MAX_N, "best_of", f"from n ({self.n}) to {MAX_N}")
        if self.use_beam_search:
            self._check_beam_search(need)
        else:
            for param in ("beam_width", "length_penalty", "early_stopping"):
                need(getattr(self, param) == _DEFAULTS[param], param, "left out without use_beam_search")

    def _check_beam_search(self, need: Callable[[bool, str, str], None]) -> None:
        need(self.beam_width is None or self.n <= self.beam_width <= MAX_BEAM_WIDTH, "beam_width",
             f"from n ({self.n}) to {MAX_BEAM_WIDTH}")  # fmt: skip
        if self.width > MAX_BEAM_WIDTH:
            raise InvalidRequest(f"a beam is at most {MAX_BEAM_WIDTH} wide, got {self.width}", "n")
        need(self.early_stopping in (True, False, "never"), "early_stopping", 'true, false or "never"')
        need(self.temperature in (0.0, 1.0), "temperature", "0 or 1, which mean the same, with use_beam_search")
        for param in _NOT_WITH_BEAMS:
            need(getattr(self, param) in (_DEFAULTS[param], None), param, "left out with use_beam_search")

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise InvalidRequest if a token id named here is not in a vocabulary of `vocab_size` tokens."""
        for param, ids in (("stop_token_ids", self.stop_token_ids), ("logit_bias", tuple(self.logit_bias or ()))):
            for token in ids:
                if token >= vocab_size:
                    raise InvalidRequest(f"{param}: token id {token} is outside the vocabulary of {vocab_size}", param)

    def child(self, index: int) -> SamplingParams:
        """The parameters of completion `index` of n: one completion, with a seed of its own."""
        seed = self.seed if self.seed is None else child_seed(self.seed, index)
        return msgspec.structs.replace(self, n=1, best_of=None, seed=seed)


_NUMBERS = (
    "temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "length_penalty",
)  # fmt: skip
_NOT_WITH_BEAMS = (
    "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias",
    "min_tokens", "stop", "prompt_logprobs",
)  # fmt: skip
_DEFAULTS: dict[str, Any] = {f.name: f.default for f in msgspec.structs.fields(SamplingParams)}


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def child_seed(seed: int, index: int) -> int:
    """Seed of completion `index`: the seed itself for the first, so that n=1 and n>1 agree on it, and for
    the others seed + index * an odd constant (the golden ratio in 64 bits), modulo 2**64."""
    child: int = (seed + index * 0x9E3779B97F4A7C15) % (1 << SEED_BITS)
    return child
