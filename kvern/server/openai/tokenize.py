"""POST /tokenize and /detokenize: what the model would see, and back. Nothing reaches the engine."""

from __future__ import annotations

from typing import Any

from kvern.sampling_params import InvalidRequest
from kvern.server.openai.protocol import DetokenizeRequest, TokenizeRequest, template_options
from kvern.server.state import ServerState
from kvern.tokenizer import render_chat


def tokenize(server: ServerState, request: TokenizeRequest) -> dict[str, Any]:
    """The token ids of a prompt or of a conversation, whatever their number. Raises InvalidRequest."""
    server.check_model(request.model)
    tokenizer = server.client.tokenizer
    if (request.prompt is None) == (request.messages is None):
        raise InvalidRequest("give either prompt or messages", "prompt")
    add_special = request.add_special_tokens
    if request.messages is None:
        text = request.prompt or ""
        tokens = tokenizer.encode(text, True if add_special is None else add_special)
    else:
        server.check_template(request.chat_template)
        text = render_chat(tokenizer, request.messages, **template_options(request))
        tokens = tokenizer.encode(text, bool(add_special))  # the template writes its own
    strings = [tokenizer.token_text(token) for token in tokens] if request.return_token_strs else None
    return {
        "count": len(tokens),
        "max_model_len": server.client.limits.max_model_len,
        "tokens": tokens,
        "token_strs": strings,
    }


def detokenize(server: ServerState, request: DetokenizeRequest) -> dict[str, Any]:
    """The text of token ids, special tokens included. Raises InvalidRequest."""
    server.check_model(request.model)
    if request.tokens is None:
        raise InvalidRequest("tokens is required", "tokens")
    tokenizer = server.client.tokenizer
    for i, token in enumerate(request.tokens):
        if not 0 <= token < tokenizer.vocab_size:
            text = f"tokens[{i}] must be from 0 to {tokenizer.vocab_size - 1}, got {token}"
            raise InvalidRequest(text, f"tokens[{i}]")
    return {"prompt": tokenizer.decode(request.tokens, skip_special_tokens=False)}
