"""Everything a request can have wrong is found before admission; what is right becomes AddRequests."""

import subprocess
import sys

import pytest

from kvern.clock import VirtualClock
from kvern.config import ModelConfig, SchedulerConfig
from kvern.engine.input_processor import InputProcessor
from kvern.sampling_params import InvalidRequest, SamplingParams
from kvern.tokenizer.byte_tokenizer import ByteTokenizer

VOCAB = 300  # larger than the tokenizer's 259, as padded models have it


class BosTokenizer(ByteTokenizer):
    def encode(self, text, add_special_tokens=True):
        return [self.BOS] * add_special_tokens + super().encode(text)


def make(tokenizer=None, max_model_len=64, num_blocks=101, seed=0):
    model = ModelConfig(
        architecture="llama",
        vocab_size=VOCAB,
        hidden_size=8,
        intermediate_size=8,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=8,
        max_position_embeddings=max_model_len,
    )
    limits = SchedulerConfig(num_blocks=num_blocks, block_size=4, max_model_len=max_model_len)
    return InputProcessor(tokenizer or ByteTokenizer(), model, limits, seed=seed, clock=VirtualClock(5.0))


def one(prompt, processor=None, sampling=None, **options):
    children = (processor or make()).process("r", prompt, sampling or SamplingParams(), **options)
    assert len(children) == 1
    return children[0]


def refused(prompt, processor=None, sampling=None, **options):
    with pytest.raises(InvalidRequest) as caught:
        (processor or make()).process("r", prompt, sampling or SamplingParams(), **options)
    return caught.value


def test_a_text_becomes_a_request():
    add = one("Hi", priority=-3, tenant="t", cache_salt="s")
    assert add.request_id == "r" and add.prompt_token_ids == ByteTokenizer().encode("Hi")
    assert (add.arrival_time, add.priority, add.tenant, add.cache_salt) == (5.0, -3, "t", "s")
    assert one("Hi", arrival_time=2.5).arrival_time == 2.5
    assert one("Hi", make(BosTokenizer())).prompt_token_ids[0] == ByteTokenizer.BOS


def test_token_ids_stay_as_they_are():
    assert one([0, 1, 299]).prompt_token_ids == [0, 1, 299]
    assert one([5], make(BosTokenizer())).prompt_token_ids == [5]


def test_the_empty_prompt():
    """B106, K08."""
    assert one("", make(BosTokenizer())).prompt_token_ids == [ByteTokenizer.BOS]
    assert refused("").param == "prompt"
    assert "at least one token" in str(refused([]))
    assert refused([], make(BosTokenizer())).param == "prompt"


@pytest.mark.parametrize("bad", [-1, VOCAB, VOCAB + 1_000_000, 2**40, 1.5, 1.0, True, "1", None, [1]])
def test_token_ids_that_are_none(bad):
    """B066, K09."""
    error = refused([1, bad, 2])
    assert error.param == "prompt" and str(VOCAB - 1) in str(error)


@pytest.mark.parametrize("bad", [None, 5, {"a": 1}, b"bytes"])
def test_prompts_of_the_wrong_kind(bad):
    assert refused(bad).param == "prompt"


def test_half_a_surrogate_pair():
    """K22."""
    error = refused("a\ud83d")
    assert error.param == "prompt" and "surrogate" in str(error)


@pytest.mark.parametrize("params", [{"stop_token_ids": [VOCAB]}, {"logit_bias": {VOCAB + 10**6: 1.0}}])
def test_ids_in_parameters_are_in_the_vocabulary(params):
    """B066, K27."""
    assert refused("Hi", sampling=SamplingParams(**params)).param == next(iter(params))


# ---- lengths


@pytest.mark.parametrize("as_ids", [False, True])
@pytest.mark.parametrize("max_tokens", [None, 1, 10_000])
def test_prompts_at_the_limit(as_ids, max_tokens):
    """B104: limit - 1, limit, limit + 1."""
    sampling = SamplingParams(max_tokens=max_tokens)

    def prompt(n):
        return [7] * n if as_ids else "x" * n

    assert one(prompt(62), sampling=sampling).sampling.max_tokens == (1 if max_tokens == 1 else 2)
    assert one(prompt(63), sampling=sampling).sampling.max_tokens == 1
    for n in (64, 65):
        error = refused(prompt(n), sampling=sampling)
        assert (error.param, error.code) == ("prompt", "context_length_exceeded")
        assert all(number in str(error) for number in (str(n), "63", "64"))


def test_max_tokens_is_what_is_left():
    assert one("x" * 10, sampling=SamplingParams(max_tokens=None)).sampling.max_tokens == 54
    assert one("x" * 10, sampling=SamplingParams(max_tokens=54)).sampling.max_tokens == 54
    assert one("x" * 10, sampling=SamplingParams(max_tokens=55)).sampling.max_tokens == 54


def test_min_tokens_must_fit():
    """K36."""
    fits = SamplingParams(max_tokens=None, min_tokens=54)
    assert one("x" * 10, sampling=fits).sampling.min_tokens == 54
    for max_tokens in (None, 100):
        error = refused("x" * 11, sampling=SamplingParams(max_tokens=max_tokens, min_tokens=54))
        assert error.param == "min_tokens" and "11 tokens leaves room for 53" in str(error)


def test_a_prompt_larger_than_the_whole_cache():
    """B001: 8 usable blocks of 4."""
    small = make(num_blocks=9)
    assert len(one("x" * 32, small).prompt_token_ids) == 32
    error = refused("x" * 33, small)
    assert error.code == "context_length_exceeded" and "33" in str(error) and "32" in str(error)


def test_a_huge_text_is_refused_without_tokenizing_it():
    """B117."""

    class Slow(ByteTokenizer):
        def encode(self, text, add_special_tokens=True):
            raise AssertionError("tokenized")

    processor = make(Slow())
    error = refused("x" * 1_000_000, processor)
    assert error.code == "context_length_exceeded" and "1000000 bytes" in str(error)
    # The longest token is 5 bytes, so 63 tokens are 315 bytes at most.
    with pytest.raises(AssertionError, match="tokenized"):
        one("é" * 157, processor)
    assert refused("é" * 158, processor).code == "context_length_exceeded"


# ---- n, seeds


def test_n_completions_are_n_requests():
    """B086, B061."""
    parent = SamplingParams(n=3, seed=9, prompt_logprobs=1, logprobs=2)
    children = make().process("r", "Hi", parent)
    assert [c.request_id for c in children] == ["r_0", "r_1", "r_2"]
    assert [c.sampling.n for c in children] == [1, 1, 1]
    assert children[0].sampling.seed == 9 and len({c.sampling.seed for c in children}) == 3
    assert [c.sampling.prompt_logprobs for c in children] == [1, None, None]
    assert [c.sampling.logprobs for c in children] == [2, 2, 2]


def test_unseeded_requests_get_seeds_of_their_own_again_and_again_the_same():
    def seeds(engine_seed):
        processor = make(seed=engine_seed)
        given = [SamplingParams(n=2), SamplingParams(seed=5), SamplingParams(n=2), SamplingParams(temperature=0)]
        return [c.sampling.seed for p in given for c in processor.process("r", "Hi", p)]

    assert seeds(1) == seeds(1)
    assert len({*seeds(1), *seeds(2)}) == 11  # all but the given one differ
    assert all(isinstance(seed, int) and 0 <= seed < 2**64 for seed in seeds(1))


def test_a_refused_request_uses_up_no_seed():
    first, second = make(), make()
    refused("", second)
    refused("x" * 100, second)
    assert one("Hi", first).sampling.seed == one("Hi", second).sampling.seed


def test_params_that_are_complete_are_passed_on():
    sampling = SamplingParams(seed=1, max_tokens=5)
    assert one("Hi", sampling=sampling).sampling is sampling


# ---- labels


@pytest.mark.parametrize("priority", [0, 5, -5, 2**31 - 1, -(2**31)])
def test_priorities(priority):
    """K37."""
    assert one("Hi", priority=priority).priority == priority


@pytest.mark.parametrize("priority", [2**31, -(2**31) - 1, 10**12, 1.0, True, "high", None])
def test_priorities_that_are_none(priority):
    assert refused("Hi", priority=priority).param == "priority"


@pytest.mark.parametrize("param", ["cache_salt", "tenant"])
def test_labels(param):
    """K37."""
    for good in (None, "a", "x" * 1024):
        assert getattr(one("Hi", **{param: good}), param) == good
    for bad in ("", "x" * 1025, 7, b"a"):
        error = refused("Hi", **{param: bad})
        assert error.param == param and "1024" in str(error)


def test_a_chat_is_rendered_and_gets_no_second_bos():
    processor = make(BosTokenizer())
    ids = processor.tokenize_chat([{"role": "user", "content": "Hi"}], add_generation_prompt=True)
    assert ids == ByteTokenizer().encode("user: Hi\nassistant: ")
    with pytest.raises(InvalidRequest) as caught:
        processor.tokenize_chat([{"role": "user", "content": "x" * 100}])
    assert caught.value.code == "context_length_exceeded"


def test_the_processors_import_no_torch():
    code = (
        "import sys, kvern.engine.input_processor, kvern.engine.output_processor\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
