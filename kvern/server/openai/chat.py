"""POST /v1/chat/completions: a conversation in, an assistant's message out."""

from __future__ import annotations

from typing import Any

from kvern.engine.output_processor import CompletionDelta
from kvern.sampling_params import InvalidRequest, SamplingParams
from kvern.server.openai.endpoint import Shape
from kvern.server.openai.logprobs import chat_logprobs
from kvern.server.openai.protocol import ChatCompletionRequest, template_options
from kvern.server.state import ServerState


class ChatShape(Shape[ChatCompletionRequest]):
    """Streamed, each choice begins with a chunk that says its role and nothing else."""

    request_type = ChatCompletionRequest
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, server: ServerState, request: ChatCompletionRequest, sampling: SamplingParams) -> None:
        super().__init__(server, request, sampling)
        server.check_template(request.chat_template)
        self._begun: set[int] = set()  # choices whose role has been said

    def length(self) -> int:
        return sum(len(str(message.get("content"))) for message in self.request.messages or ())

    def tokenize(self) -> list[list[int]]:
        try:
            options = template_options(self.request)
            return [self.server.client.input_processor.tokenize_chat(self.request.messages or [], **options)]
        except InvalidRequest as exc:
            if exc.param != "prompt":
                raise
            raise InvalidRequest(str(exc), "messages", exc.code) from None

    def choice(self, index: int, delta: CompletionDelta) -> dict[str, Any]:
        message = {"role": "assistant", "content": delta.text, "refusal": None}
        return {"index": index, "message": message, **self._rest(delta)}

    def chunks(self, index: int, delta: CompletionDelta) -> list[dict[str, Any]]:
        chunks: list[dict[str, Any]] = []
        if index not in self._begun:
            self._begun.add(index)
            role = {"role": "assistant", "content": "", "refusal": None}
            chunks.append({"index": index, "delta": role, "logprobs": None, "finish_reason": None})
        rest = self._rest(delta)
        if delta.text or rest["logprobs"] or delta.finish_reason:
            chunks.append({"index": index, "delta": {"content": delta.text} if delta.text else {}, **rest})
        return chunks

    def _rest(self, delta: CompletionDelta) -> dict[str, Any]:
        logprobs = None
        if self.sampling.logprobs is not None and delta.token_ids:
            logprobs = chat_logprobs(self.names, delta.token_ids, delta.logprobs or [], self.sampling.logprobs)
        return {"logprobs": logprobs, "finish_reason": delta.finish_reason, "stop_reason": delta.stop_reason}
