"""LLM: the engine as a Python object, for scripts and notebooks.

    llm = LLM("smollm2-135m-instruct")
    for output in llm.generate(["The sky is", "Two plus two is"], SamplingParams(max_tokens=20)):
        print(output.outputs[0].text)

All prompts of a call are validated before any is admitted, run together, and come back in their order. A call that
fails, or is interrupted, takes its requests with it: the object is as before and can be used again.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import threading
from collections.abc import Generator, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from kvern.config import EngineConfig, make_config
from kvern.engine.client import InprocClient
from kvern.engine.messages import AddRequest
from kvern.engine.output_processor import CompletionDelta, OutputCollector
from kvern.outputs import RequestOutput
from kvern.sampling_params import InvalidRequest, SamplingParams

if TYPE_CHECKING:
    from rich.progress import Progress

    from kvern.tokenizer import Tokenizer

# {"prompt": text} or {"prompt_token_ids": ids} say the same as the bare text or ids.
Prompt = str | list[int] | dict[str, Any]
Message = dict[str, Any]


class LLM:
    """A model, ready to generate.

    model: a folder, a .gguf file, a hub id, a built-in name or toy:history-hash. options: those of
    kvern.config.EngineConfig, by name; an unknown or impossible one raises InvalidConfig.

    A context manager; `close` releases the model's memory. Calls from several threads wait for one another.
    """

    def __init__(self, model: str = "smollm2-135m-instruct", **options: Any) -> None:
        self.engine_config: EngineConfig = make_config(EngineConfig, {"model": model, **options})
        self._client = InprocClient(self.engine_config)
        self._ids = itertools.count()
        self._lock = threading.Lock()
        self._user: int | None = None  # the thread that has the lock

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int | Sequence[int] = 0,
        tenant: str | Sequence[str | None] | None = None,
        progress: bool = True,
    ) -> list[RequestOutput]:
        """Complete every prompt; one RequestOutput each, in the order of the prompts.

        prompts: a text, a list of token ids, a dict with "prompt" or "prompt_token_ids", or a list of any of these.
        sampling_params, priority (lower runs first, under policy "priority"), tenant (shares fairly, under policy
        "fair"): one for all, or one per prompt.
        progress: show a bar, if stderr is a terminal.

        Raises InvalidRequest, before anything is admitted, naming the prompt it is about; EngineDeadError.
        """
        several = _as_list(prompts)
        return self._run([_text_or_ids(prompt) for prompt in several], sampling_params, priority, tenant, progress)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        tools: list[dict[str, Any]] | None = None,
        priority: int | Sequence[int] = 0,
        progress: bool = True,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, each a list of {"role": ..., "content": ...}.

        continue_final_message: go on in the last message instead of beginning a new one; give it with
        add_generation_prompt=False. chat_template: a Jinja template in place of the model's. tools: functions the
        model may call, as JSON schemas. Raises as `generate` does.
        """
        conversations = [messages] if messages and isinstance(messages[0], dict) else messages
        prompts: list[str | list[int]] = [
            self.chat_token_ids(
                list(conversation),  # type: ignore[arg-type]
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                chat_template=chat_template,
                tools=tools,
            )
            for conversation in conversations
        ]
        return self._run(prompts, sampling_params, priority, None, progress)

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> Generator[CompletionDelta, None, None]:
        """Complete one prompt, giving what is new after each step. Closing the iterator ends the request; until it is
        exhausted or closed, calls from other threads wait, and from this one raise RuntimeError."""
        if sampling_params is not None and sampling_params.known_at_the_end:
            raise InvalidRequest("beam search and best_of above n cannot be streamed", "best_of")
        with self._exclusive():
            requests = self._prepare_all([_text_or_ids(prompt)], [sampling_params or SamplingParams()], [0], [None])
            try:
                for request_id, children in requests.items():
                    self._client.add(request_id, children)
                while self._client.has_unfinished():
                    yield from self._client.step()
            finally:
                self._client.abort_all()

    def chat_token_ids(self, messages: list[Message], **options: Any) -> list[int]:
        """A conversation as the model reads it; `options` as for `chat`. Raises InvalidRequest."""
        return self._client.input_processor.tokenize_chat(messages, **options)

    def set_policy(self, name: str, **options: Any) -> None:
        """Another scheduling policy, by name or module:Class, from the next step on; running requests go on. Raises
        InvalidConfig, and the policy stays as it was. May be called while a stream is open."""
        self._client.core.admin.set_policy(name, options)

    def pin_prefix(self, prompt: Prompt, ttl: float) -> str:
        """Keep the cached keys and values of `prompt` from eviction for `ttl` seconds, in full blocks; what is not
        cached yet, from the moment it is. Returns the pin's id, for unpin_prefix. Raises InvalidRequest, for instance
        if more than max_pinned_blocks would be pinned. May be called while a stream is open."""
        token_ids = self._client.input_processor.tokenize(_text_or_ids(prompt))
        pin_id: str = self._client.core.admin.pin(token_ids, ttl)["id"]
        return pin_id

    def unpin_prefix(self, pin_id: str) -> bool:
        """False if there is no such pin, or its time is over."""
        return self._client.core.admin.unpin(pin_id)

    def get_tokenizer(self) -> Tokenizer:
        return self._client.tokenizer

    def close(self) -> None:
        """Release the model. Idempotent; no other call may follow."""
        self._client.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _run(
        self,
        prompts: list[str | list[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        priority: int | Sequence[int],
        tenant: str | Sequence[str | None] | None,
        progress: bool,
    ) -> list[RequestOutput]:
        samplings = _per_prompt(sampling_params or SamplingParams(), len(prompts), "sampling_params")
        priorities = _per_prompt(priority, len(prompts), "priority")
        tenants = _per_prompt(tenant, len(prompts), "tenant")
        with self._exclusive():
            requests = self._prepare_all(prompts, samplings, priorities, tenants)
            collectors = {
                request_id: OutputCollector(
                    request_id, prompt if isinstance(prompt, str) else None, children[0].prompt_token_ids, sampling
                )
                for prompt, sampling, (request_id, children) in zip(prompts, samplings, requests.items(), strict=True)
            }
            try:
                for request_id, children in requests.items():
                    self._client.add(request_id, children)
                with _ProgressBar(len(prompts), progress) as bar:
                    while self._client.has_unfinished():
                        for delta in self._client.step():
                            collector = collectors[delta.request_id]
                            collector.put(delta)
                            bar.advance(len(delta.token_ids), delta.finish_reason is not None and collector.finished)
            finally:
                self._client.abort_all()
        return [collector.output() for collector in collectors.values()]

    def _prepare_all(
        self,
        prompts: list[str | list[int]],
        samplings: Sequence[SamplingParams],
        priorities: Sequence[int],
        tenants: Sequence[str | None],
    ) -> dict[str, list[AddRequest]]:
        """{request id: what the engine is told}, in the order of the prompts. All of them are valid, or none is."""
        requests = {}
        given = zip(prompts, samplings, priorities, tenants, strict=True)
        for place, (prompt, sampling, priority, tenant) in enumerate(given):
            request_id = str(next(self._ids))
            try:
                requests[request_id] = self._client.input_processor.process(
                    request_id, prompt, sampling, priority=priority, tenant=tenant
                )
            except InvalidRequest as exc:
                if len(prompts) == 1:
                    raise
                raise InvalidRequest(f"prompt {place}: {exc}", exc.param, exc.code) from None
        return requests

    @contextlib.contextmanager
    def _exclusive(self) -> Iterator[None]:
        if self._user == threading.get_ident():
            raise RuntimeError("a stream of this LLM is not exhausted yet; close it first")
        with self._lock:
            self._user = threading.get_ident()
            try:
                yield
            finally:
                self._user = None


class _ProgressBar:
    """Requests done and tokens a second, on stderr if it is a terminal; elsewhere nothing."""

    def __init__(self, total: int, wanted: bool) -> None:
        self._bar: Progress | None = None
        if not (wanted and total and sys.stderr.isatty()):
            return
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        self._bar = Progress(
            BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]:.0f} tokens/s"), TimeElapsedColumn(),
            console=Console(stderr=True), transient=True,
        )  # fmt: skip
        self._task = self._bar.add_task("", total=total, rate=0.0)
        self._tokens = 0

    def __enter__(self) -> _ProgressBar:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def advance(self, tokens: int, request_done: bool) -> None:
        if self._bar is None:
            return
        self._tokens += tokens
        elapsed = self._bar.tasks[0].elapsed or 1e-9
        self._bar.update(self._task, advance=int(request_done), rate=self._tokens / elapsed)


def _text_or_ids(prompt: Any) -> str | list[int]:
    """The text or the ids of a prompt in any of its forms. What they hold is checked later."""
    if isinstance(prompt, dict):
        if len(prompt) != 1 or not ({"prompt", "prompt_token_ids"} & prompt.keys()):
            keys = ", ".join(map(repr, prompt))
            raise InvalidRequest(f"a prompt dict holds either 'prompt' or 'prompt_token_ids', got {keys}", "prompt")
        (prompt,) = prompt.values()
    if not isinstance(prompt, (str, list)):
        raise InvalidRequest(
            f"a prompt is a text, a list of token ids or a dict, got {type(prompt).__name__}", "prompt"
        )
    return prompt


def _as_list(prompts: Any) -> list[Any]:
    """One prompt becomes a list of one. A flat list of integers is one prompt, of token ids."""
    if isinstance(prompts, (str, dict)) or (isinstance(prompts, list) and prompts and isinstance(prompts[0], int)):
        return [prompts]
    return list(prompts)


def _per_prompt(value: Any, count: int, name: str) -> list[Any]:
    if not isinstance(value, (list, tuple)):
        return [value] * count
    if len(value) != count:
        raise InvalidRequest(f"{name} has {len(value)} entries for {count} prompts", name)
    return list(value)
