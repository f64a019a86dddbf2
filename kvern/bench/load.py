"""What the benchmarks give an engine to do: requests of given lengths, greedy, that run to their full length."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np

from kvern.config import EngineConfig, InvalidConfig, ModelConfig
from kvern.engine.client import InprocClient
from kvern.engine.messages import EngineDeadError
from kvern.engine.output_processor import CompletionDelta
from kvern.sampling_params import SamplingParams

Range = tuple[int, int]  # both ends belong to it
_WARM_UP_REQUESTS, _WARM_UP_TOKENS = 8, 8


class Requests(msgspec.Struct):
    """Prompts, and how many tokens to make of each. Also the file of --workload, as JSON."""

    prompts: list[list[int]]
    output_lens: list[int]

    def __len__(self) -> int:
        return len(self.prompts)

    @property
    def input_tokens(self) -> int:
        return sum(map(len, self.prompts))

    @property
    def output_tokens(self) -> int:
        return sum(self.output_lens)

    def check(self, max_model_len: int) -> None:
        """Raises InvalidConfig if one of them would be cut short."""
        for prompt, output_len in zip(self.prompts, self.output_lens, strict=True):
            if len(prompt) + output_len > max_model_len:
                raise InvalidConfig(
                    f"a prompt of {len(prompt)} tokens and {output_len} of output are above the max_model_len of "
                    f"{max_model_len}"
                )


def random_requests(
    seed: int, count: int, vocab_size: int, input_len: Range, output_len: Range, shared_prefix: int = 0
) -> Requests:
    """Lengths are uniform within their ranges; `shared_prefix` more tokens, the same ones, begin every prompt."""
    random = np.random.default_rng(seed)
    prefix = random.integers(vocab_size, size=shared_prefix).tolist()
    inputs = random.integers(*input_len, size=count, endpoint=True)
    outputs = random.integers(*output_len, size=count, endpoint=True).tolist()
    return Requests([prefix + random.integers(vocab_size, size=n).tolist() for n in inputs], outputs)


def read_requests(path: str) -> Requests:
    """Raises InvalidConfig."""
    try:
        requests = msgspec.json.decode(Path(path).read_bytes(), type=Requests)
    except OSError as exc:
        raise InvalidConfig(f"workload: {path} cannot be read: {exc.strerror}") from None
    except msgspec.DecodeError as exc:
        raise InvalidConfig(f"workload: {path}: {exc}") from None
    if not requests.prompts or len(requests.prompts) != len(requests.output_lens) or min(requests.output_lens) < 1:
        raise InvalidConfig(f"workload: {path} must hold prompts, and for each of them an output_lens of at least 1")
    return requests


def serve(client: InprocClient, requests: Requests, salt: str) -> Iterator[list[CompletionDelta]]:
    """Hand over all requests at once; what each step gave. salt: a run finds no prefix that one of another salt left.
    Raises InvalidRequest, EngineDeadError."""
    for i, (prompt, output_len) in enumerate(zip(requests.prompts, requests.output_lens, strict=True)):
        sampling = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True)
        request_id = f"{salt} {i}"
        client.add(request_id, client.input_processor.process(request_id, prompt, sampling, cache_salt=salt))
    while client.has_unfinished():
        deltas = client.step()
        for delta in deltas:
            if delta.finish_reason not in (None, "length"):
                raise EngineDeadError(f"request {delta.request_id} ended by {delta.finish_reason}: {delta.error}")
        yield deltas


def warm_up(client: InprocClient, requests: Requests) -> None:
    """Make what is made once, at first use: graphs, work memory, compiled code."""
    few = slice(_WARM_UP_REQUESTS)
    output_lens = [min(n, _WARM_UP_TOKENS) for n in requests.output_lens[few]]
    for _ in serve(client, Requests(requests.prompts[few], output_lens), "warm-up"):
        pass


def kernels_used(config: EngineConfig, model: ModelConfig) -> str:
    """Which kernels an engine of this configuration computes with."""
    from kvern.executor.backend import choose_backend

    if model.architecture == "toy":
        return "none"
    if config.kernels != "auto":
        return config.kernels
    try:
        # Asked for "auto" it would log once more what it logged when the model was loaded.
        return choose_backend(msgspec.structs.replace(config, kernels="native"), model).kernels
    except InvalidConfig:
        return "reference"
