"""A text depends on its prompt and its sampling alone: the same bits through the whole engine, in whatever company.

Every request is run alone first: whole prompt in one step, no cache, memory for all. Then many are run together, under
each way the engine has of doing it differently. Tokens, logprobs and prompt logprobs must be equal, to the last bit.
"""

import random

import pytest

from kvern import LLM, SamplingParams
from tests.models import fetch
from tests.tiny_folder import NATIVE_SHAPE, write_model

POLICIES = ("fcfs", "priority", "fair", "deadline", "shortest", "prefix")
WHOLE = 512
# How each kind of model is computed: by the reference kernels, whose blocks may be small, or by the native ones.
KERNELS = {
    "reference": {"kernels": "reference", "block_size": 8},
    "native": {"kernels": "native"},
    "int8": {"kernels": "native", "quantize": "int8", "activations": "int8", "kv_cache_dtype": "int8"},
    "int4": {"kernels": "native", "quantize": "int4", "graph": "piecewise"},
}
_rng = random.Random(0)
STEM = [_rng.randrange(200) for _ in range(64)]


def _prompt(i):
    """Own ones and shared ones, prefixes of each other, whole numbers of blocks, equal ones."""
    rng = random.Random(i)
    own = [rng.randrange(200) for _ in range(rng.randrange(1, 70))]
    return [STEM[: rng.choice([8, 16, 32, 48])], STEM[: rng.randrange(1, 50)] + own[:9], own, STEM[:40]][i % 4]


def _sampling(i):
    options = [
        {"temperature": 0.0, "logprobs": 2},
        {"temperature": 1.0, "seed": i, "top_p": 0.9, "logprobs": 0},
        {"temperature": 0.7, "seed": i, "n": 2, "logprobs": 1},
        {"temperature": 0.0, "repetition_penalty": 1.2, "frequency_penalty": 0.3, "logprobs": 1},
        {"temperature": 1.3, "seed": i, "top_k": 20, "min_p": 0.05},
        {"temperature": 0.0, "logprobs": 1, "prompt_logprobs": 1},
    ][i % 6]
    return SamplingParams(max_tokens=5 + 3 * i % 11, ignore_eos=i % 2 == 0, **options)


REQUESTS = [(_prompt(i), _sampling(i)) for i in range(32)]


def results(outputs):
    for output in outputs:
        assert output.error is None
    return [
        (output.prompt_logprobs, [(c.token_ids, c.logprobs, c.finish_reason) for c in output.outputs])
        for output in outputs
    ]


def generate(llm, requests):
    prompts = [{"prompt_token_ids": prompt} for prompt, _ in requests]
    return llm.generate(
        prompts,
        [sampling for _, sampling in requests],
        priority=[i % 3 for i in range(len(requests))],
        tenant=[f"tenant {i % 4}" for i in range(len(requests))],
    )


def load(model, **options):
    defaults = {"num_blocks": 1000, "max_model_len": 96, "check_invariants": True}
    if model == "toy:history-hash":
        defaults |= {"max_num_batched_tokens": 512, "block_size": 8}
    return LLM(model, **(defaults | options))


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """kind -> (name to load, its options, what every request gives alone); made when first asked for."""
    folder, made = tmp_path_factory.mktemp("models"), {}

    def model(kind):
        if kind not in made:
            architecture, _, kernels = kind.partition(" ")
            options = KERNELS[kernels] if kernels else {}
            shape = NATIVE_SHAPE if options.get("kernels") == "native" else {}
            name = "toy:history-hash" if kind == "toy" else write_model(folder / kind, architecture, **shape)
            with load(name, enable_prefix_caching=False, max_num_seqs=1, **options) as llm:
                made[kind] = name, options, [results(generate(llm, [request]))[0] for request in REQUESTS]
        return made[kind]

    return model


# What is done ahead of time: nothing, drafts from what was said before, a step while the one before is computed.
AHEAD = {
    "nothing": {},
    "drafts": {"speculative": "ngram", "num_speculative_tokens": 3},
    "steps": {"async_scheduling": "on"},
}

# What a request that is as long as any here can hold at once in all groups of the model, and a little more.
TIGHT = {"llama": 15, "mistral": 15, "gemma3": 40, "toy": 15}  # blocks of 8
TIGHT_NATIVE = {"llama": 9, "mistral": 9, "gemma3": 26}  # blocks of 16
SWAP = {"preemption": "swap", "kv_host_memory": "4MiB"}
FORCED = {"preempt_probability": 0.3}


def check(models, kind, batch=32, chunk=WHOLE, rounds=1, tight=False, ahead="nothing", **options):
    """Run `batch` requests at once, all of them `rounds` times, and compare. Returns the scheduler's totals."""
    name, kernels, alone = models(kind)
    count = max(batch, 8)
    sizes = {"max_num_seqs": batch, "max_num_batched_tokens": max(chunk, 4 * batch if ahead == "drafts" else batch)}
    if batch > 1 and chunk < WHOLE:
        sizes["long_prefill_token_threshold"] = chunk
    if tight:
        sizes["num_blocks"] = (TIGHT if kernels.get("kernels") != "native" else TIGHT_NATIVE)[kind.partition(" ")[0]]
    with load(name, **sizes, **kernels, **AHEAD[ahead], **options) as llm:
        for _ in range(rounds):
            got = results(generate(llm, REQUESTS[:count]))
            for i, (mine, want) in enumerate(zip(got, alone, strict=False)):
                assert mine == want, f"request {i}"
        stats = llm._client.core.stats()
        assert stats.num_free_blocks == stats.num_blocks
        return stats


FAST = {
    "alone": {"batch": 1},
    "eight": {"batch": 8, "chunk": 64},
    "many": {"batch": 32},
    "chunks of 1": {"batch": 8, "chunk": 1},
    "chunks of 7": {"batch": 32, "chunk": 7, "rounds": 2},
    "no cache": {"batch": 32, "chunk": 64, "enable_prefix_caching": False},
    "prompts first": {"batch": 32, "batching": "prefill_first", "rounds": 2},
}


@pytest.mark.parametrize("how", FAST)
@pytest.mark.parametrize(
    "kind", ["llama reference", "llama int8", "llama int4", pytest.param("gemma3 native", marks=pytest.mark.slow)]
)
def test_alone_as_in_company(models, kind, how):
    """CASES B028, B038."""
    stats = check(models, kind, **FAST[how])
    assert (stats.prefix_hit_tokens > 0) is (how != "no cache")


@pytest.mark.parametrize("way", ["recompute", "swap"])
@pytest.mark.parametrize("kind", ["llama native", "gemma3 int8", "toy"])
def test_preemption_is_invisible(models, kind, way):
    """CASES B044, B119: memory for few, many want to run, and now and then somebody is preempted for no reason."""
    stats = check(models, kind, batch=8, chunk=64, tight=True, **FORCED, **(SWAP if way == "swap" else {}))
    assert stats.preemptions > 5
    assert (stats.swapped_out_blocks > 0) is (way == "swap")


@pytest.mark.parametrize("ahead", ["drafts", "steps"])
@pytest.mark.parametrize("kind", ["llama int4", "gemma3 native"])
def test_what_is_done_ahead_is_invisible(models, kind, ahead):
    check(models, kind, chunk=64, ahead=ahead, **FORCED)


def test_auto_decides_by_measured_costs(models):
    options = {"preemption": "auto", "kv_host_memory": "1MiB"}
    with load(models("llama native")[0], **options) as llm:
        costs = llm._client.core.scheduler.state.costs
        assert 0 < costs.copy_block < 0.1 and 0 < costs.compute_token < 0.1
    stats = check(models, "llama native", batch=8, chunk=64, tight=True, **options)
    assert stats.preemptions > 0


@pytest.mark.parametrize("policy", POLICIES)
def test_order_is_invisible(models, policy):
    check(models, "llama int8", batch=8, chunk=64, tight=True, policy=policy)


def combinations(kind, count):
    """Some of all ways to run: each value of each option equally often, together with others by chance."""
    axes = {
        "batch": [1, 8, 32],
        "chunk": [1, 7, 64, WHOLE],
        "rounds": [1, 2],
        "enable_prefix_caching": [True, False],
        "tight": [False, True],
        "preempt_probability": [0.0, 0.3],
        "policy": POLICIES,
        "batching": ["mixed", "prefill_first"],
        "preemption": ["recompute", "swap", "auto"],
        "kv_host_memory": ["64KiB", "1MiB"],  # without preemption to it, it keeps evicted prefixes only
        "ahead": AHEAD,
    }
    rng, columns = random.Random(kind), []
    for values in map(list, axes.values()):
        column = [values[i % len(values)] for i in range(count)]
        rng.shuffle(column)
        columns.append(column)
    return [dict(zip(axes, way, strict=True)) for way in zip(*columns, strict=True)]


KINDS = [
    ("llama reference", 6),
    ("llama native", 12),
    ("llama int8", 8),
    ("llama int4", 8),
    ("mistral int8", 12),
    ("gemma3 reference", 6),
    ("gemma3 native", 12),
    ("gemma3 int8", 6),
    ("toy", 20),
]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "count"), KINDS)
def test_every_way_to_run(models, kind, count):
    for way in combinations(kind, count):
        try:
            check(models, kind, **way)
        except Exception as exc:
            raise AssertionError(f"{way}: {exc}") from exc


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.parametrize("kernels", [{"dtype": "float32"}, {"activations": "int8"}, {"kv_cache_dtype": "int8"}])
def test_real_weights(kernels):
    """SmolLM2: matrices large enough for every path of the kernels."""
    name = str(fetch("smollm2"))
    requests = [([t * 97 for t in prompt], sampling) for prompt, sampling in REQUESTS[:8]]
    with load(name, enable_prefix_caching=False, max_num_seqs=1, **kernels) as llm:
        alone = [results(generate(llm, [request]))[0] for request in requests]
    for options in (
        {"max_num_seqs": 8},
        {"max_num_seqs": 8, "max_num_batched_tokens": 40, "num_blocks": 9, "preempt_probability": 0.2},
        {"max_num_seqs": 8, "max_num_batched_tokens": 40, "num_blocks": 9, **SWAP, "kv_host_memory": "64MiB"},
    ):
        with load(name, **options, **kernels) as llm:
            for _ in range(2):
                assert results(generate(llm, requests)) == alone, options
