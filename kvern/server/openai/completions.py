"""POST /v1/completions: text or token ids in, text out."""

from __future__ import annotations

import codecs
from typing import Any

from kvern.engine.output_processor import CompletionDelta
from kvern.outputs import LogprobsAt
from kvern.sampling_params import InvalidRequest, SamplingParams
from kvern.server.openai.endpoint import Shape
from kvern.server.openai.logprobs import CompletionLogprobs
from kvern.server.openai.protocol import CompletionRequest
from kvern.server.state import ServerState


class CompletionShape(Shape[CompletionRequest]):
    """A chunk has the form of a choice: its text is only what is new.

    With echo, the first text of each choice begins with its prompt, written with its special tokens: a text as it was
    given, token ids as what they say. Only a BOS token that the tokenizer put in front of a text stays unseen.
    """

    request_type = CompletionRequest
    object = chunk_object = "text_completion"

    def __init__(self, server: ServerState, request: CompletionRequest, sampling: SamplingParams) -> None:
        super().__init__(server, request, sampling)
        self._given = request.prompts()
        self._prompts: list[list[int]] = []
        self._prompt_logprobs: list[LogprobsAt | None] = []  # of the prompt at hand
        self._logprobs: dict[int, CompletionLogprobs] = {}  # per choice
        self._begun: set[int] = set()  # choices whose prompt has been echoed
        self._hidden = server.client.tokenizer.special_token_ids if sampling.skip_special_tokens else frozenset()
        if request.echo and request.logprobs is not None and request.stream and sampling.n > 1:
            # The prompt's logprobs come with the first completion only, which need not be the first to speak.
            raise InvalidRequest("echo with logprobs and n above 1 cannot be streamed", "stream")

    def num_prompts(self) -> int:
        return len(self._given)

    def length(self) -> int:
        return sum(map(len, self._given))

    def tokenize(self) -> list[list[int]]:
        for i, prompt in enumerate(self._given):
            try:
                self._prompts.append(self.server.client.input_processor.tokenize(prompt))
            except InvalidRequest as exc:
                if len(self._given) == 1:
                    raise
                raise InvalidRequest(f"prompt[{i}]: {exc}", exc.param, exc.code) from None
        return self._prompts

    def choice(self, index: int, delta: CompletionDelta) -> dict[str, Any]:
        text, logprobs = delta.text, None
        if self.sampling.logprobs is not None:
            logprobs = self._add_logprobs(index, delta)
        if self.request.echo and index not in self._begun:
            text = self._echo(index // self.sampling.n) + text
        self._begun.add(index)
        return {
            "index": index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }

    def chunks(self, index: int, delta: CompletionDelta) -> list[dict[str, Any]]:
        choice = self.choice(index, delta)
        says_something = choice["text"] or choice["logprobs"] or choice["finish_reason"]
        return [choice] if says_something else []

    def _add_logprobs(self, index: int, delta: CompletionDelta) -> dict[str, list[Any]]:
        """The logprobs of the delta's tokens, and before the first of them those of the prompt if it is echoed."""
        lists = self._logprobs.get(index)
        prompt_part: dict[str, list[Any]] = {}
        if lists is None:
            lists = CompletionLogprobs(self.server.client.tokenizer, self.names, self.sampling.logprobs or 0)
            self._logprobs[index] = lists
            if self.request.echo:
                prompt = index // self.sampling.n
                if delta.prompt_logprobs is not None:
                    self._prompt_logprobs = delta.prompt_logprobs
                prompt_part = lists.add(self._prompts[prompt], self._prompt_logprobs, self._unseen(prompt))
        part = lists.add(delta.token_ids, delta.logprobs or [], self._hidden)
        return {key: prompt_part.get(key, []) + values for key, values in part.items()}

    def _echo(self, prompt: int) -> str:
        given = self._given[prompt]
        if isinstance(given, str):
            return given
        # Half a character at the end belongs to the output that completes it.
        data = b"".join(self.server.client.tokenizer.token_bytes(token) for token in given)
        return codecs.getincrementaldecoder("utf-8")("replace").decode(data)

    def _unseen(self, prompt: int) -> tuple[int, ...]:
        """The BOS token, if the tokenizer has put it before a text that has none."""
        tokenizer, given = self.server.client.tokenizer, self._given[prompt]
        bos = tokenizer.bos_token_id
        if bos is None or not isinstance(given, str) or self._prompts[prompt][0] != bos:
            return ()
        return () if given.startswith(tokenizer.token_text(bos)) else (bos,)
