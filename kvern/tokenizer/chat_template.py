"""From chat messages to a prompt, by the model's own Jinja template.

Templates come with the model and are run in Jinja's sandbox: no attribute of Python's machinery can be reached, nothing
can be changed. The sandbox does not bound time or memory, so a template from a request needs more trust than its text.

What templates expect differs from what clients send, in these points, and is put right here, before rendering:
- content is a string or a list of parts. Most templates add it to strings, some loop over parts. Which kind a template
  is, is found by rendering a probe. For the first kind text parts are joined by newlines;
- an assistant's content may be null or absent: rendered as empty;
- arguments of tool calls arrive as JSON text, templates want the object;
- keys whose value is null count as absent; the role "developer" is "system" to a template that does not know it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kvern.sampling_params import InvalidRequest
from kvern.tokenizer.base import Tokenizer

_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_MARK = "\ue000kvern:end of the final message\ue000"
_PROBE = "\ue000kvern:probe\ue000"

Message = dict[str, Any]


def render_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    tools: Sequence[Mapping[str, Any]] | None = None,
    chat_template: str | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> str:
    """The prompt for `messages`. It holds the special tokens as text, BOS too where the template writes it, so encode
    it with add_special_tokens=False.

    add_generation_prompt: end with the opening of an assistant's turn.
    continue_final_message: end in the middle of the last message, so that the model goes on with it;
        add_generation_prompt then has no meaning.
    tools: in OpenAI's form; an empty list is none. A model may have a template of its own for them.
    chat_template: used instead of the model's.
    chat_template_kwargs: further variables for the template (enable_thinking and the like).
    Raises InvalidRequest if there is no template, a message is not well formed, or the template refuses.
    """
    source = chat_template or (tokenizer.chat_templates.get("tool_use") if tools else None) or tokenizer.chat_template
    if source is None:
        raise InvalidRequest(
            "this model has no chat template (it is a base model, perhaps); send a prompt to the completions API, "
            "or give a chat template",
            "messages",
        )
    template = _compile(source)
    variables = {**tokenizer.special_tokens, **(chat_template_kwargs or {})}
    prepared = _prepare(messages, source, wants_parts=_wants_parts(source))
    if continue_final_message:
        _mark_end(prepared[-1])
        add_generation_prompt = False
    variables |= {"messages": prepared, "tools": list(tools) if tools else None}
    variables |= {"add_generation_prompt": add_generation_prompt}
    text = _render(template, variables)
    if not continue_final_message:
        return text
    if _MARK not in text:
        raise InvalidRequest("the chat template does not write the final message, it cannot be continued", "messages")
    return text[: text.rindex(_MARK)]


def _prepare(messages: Sequence[Mapping[str, Any]], source: str, *, wants_parts: bool) -> list[Message]:
    if not messages:
        raise InvalidRequest("messages must hold at least one message", "messages")
    prepared = []
    for i, message in enumerate(messages):
        where = f"messages[{i}]"
        if not isinstance(message, Mapping):
            raise InvalidRequest(f"{where} must be an object", where)
        role = message.get("role")
        known = isinstance(role, str) and (role in _ROLES or f"'{role}'" in source or f'"{role}"' in source)
        if not known:
            raise InvalidRequest(f"{where}.role must be one of {', '.join(_ROLES)}, got {role!r}", f"{where}.role")
        copy = {key: value for key, value in message.items() if value is not None}
        if role == "developer" and "developer" not in source:
            copy["role"] = "system"
        if "content" not in copy and role != "assistant":
            raise InvalidRequest(f"{where}.content is required for the role {role}", f"{where}.content")
        text = _text_content(copy.get("content", ""), f"{where}.content")
        copy["content"] = [{"type": "text", "text": text}] if wants_parts else text
        calls = copy.pop("tool_calls", None)
        if calls:
            copy["tool_calls"] = _with_object_arguments(calls, f"{where}.tool_calls")
        prepared.append(copy)
    return prepared


def _text_content(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, (list, tuple)):
        raise InvalidRequest(f"{where} must be a string or a list of parts", where)
    texts = []
    for part in content:
        if isinstance(part, str):
            texts.append(part)
            continue
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind != "text":
            raise InvalidRequest(f"{where}: this model reads text only, got a part of type {kind!r}", where)
        if not isinstance(part.get("text"), str):
            raise InvalidRequest(f"{where}: a part of type 'text' needs a string 'text'", where)
        texts.append(part["text"])
    return "\n".join(texts)


def _with_object_arguments(calls: Any, where: str) -> list[Any]:
    if not isinstance(calls, (list, tuple)) or not all(isinstance(call, Mapping) for call in calls):
        raise InvalidRequest(f"{where} must be a list of objects", where)
    found = []
    for call in calls:
        function = call.get("function")
        if isinstance(function, Mapping) and isinstance(function.get("arguments"), str):
            # Models do write broken JSON; a history that holds some must still be rendered.
            with suppress(ValueError, RecursionError):
                call = {**call, "function": {**function, "arguments": json.loads(function["arguments"] or "{}")}}
        found.append(call)
    return found


def _mark_end(message: Message) -> None:
    content = message["content"]
    if isinstance(content, list):
        content[-1] = {**content[-1], "text": content[-1]["text"] + _MARK}
    else:
        message["content"] = content + _MARK


@lru_cache(maxsize=64)
def _wants_parts(source: str) -> bool:
    """Whether a template loses content that is a string and shows content that is a list of parts."""
    template = _compile(source)
    for content, answer in ((_PROBE, False), ([{"type": "text", "text": _PROBE}], True)):
        variables = {"messages": [{"role": "user", "content": content}], "tools": None, "add_generation_prompt": False}
        try:
            text = _render(template, variables)
        except InvalidRequest:
            continue
        if _PROBE in text:
            return answer
    return False


class _GenerationTag(jinja2.ext.Extension):
    """{% generation %}...{% endgeneration %} marks what an assistant wrote, for training. Here it is just its body."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes for HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@lru_cache(maxsize=1)
def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationTag]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


@lru_cache(maxsize=64)
def _compile(source: str) -> jinja2.Template:
    try:
        return _environment().from_string(source)
    except jinja2.TemplateError as exc:
        raise InvalidRequest(f"the chat template is not valid: {exc}", "chat_template") from None


def _render(template: jinja2.Template, variables: dict[str, Any]) -> str:
    try:
        return template.render(variables)
    except Exception as exc:  # whatever a template does to odd messages must end this request only
        raise InvalidRequest(f"the chat template refused the messages: {exc}", "messages") from None
