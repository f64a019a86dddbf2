"""The front's half of a request: deltas that add up, one ending each, cuts in step, nothing left behind."""

import gc
import random

import pytest

from kvern.engine.messages import AddRequest, RequestUpdate, StepReport
from kvern.engine.output_processor import CompletionDelta, OutputCollector, OutputProcessor, _Completion
from kvern.outputs import Logprob
from kvern.sampling_params import InvalidRequest, SamplingParams
from kvern.tokenizer.byte_tokenizer import ByteTokenizer

TOKENIZER = ByteTokenizer()
EOS = 2


def ids(text):
    return TOKENIZER.encode(text)


def make(processor, request_id="r", n=1, prompt="Hi", **params):
    sampling = SamplingParams(n=n, max_tokens=1000, seed=0, **params)
    children = [
        AddRequest(
            request_id=request_id if n == 1 else f"{request_id}_{i}",
            prompt_token_ids=ids(prompt),
            sampling=sampling.child(i),
            arrival_time=10.0,
        )
        for i in range(n)
    ]
    processor.add(request_id, children)
    return [child.request_id for child in children]


def step(processor, tokens, time=11.0, **updates):
    report = StepReport(
        request_ids=list(tokens), token_ids=[list(t) for t in tokens.values()], updates=updates, time=time
    )
    return processor.process(report)


def ended(reason, **fields):
    return RequestUpdate(finish_reason=reason, first_scheduled_time=10.5, **fields)


def test_a_request_from_first_token_to_end():
    processor = OutputProcessor(TOKENIZER)
    make(processor)
    first = RequestUpdate(first_scheduled_time=10.5, num_cached_tokens=16, num_preemptions=1)
    (delta,), aborts = step(processor, {"r": ids("H")}, 11.0, r=first)
    assert (delta.request_id, delta.index, delta.text, delta.token_ids) == ("r", 0, "H", ids("H"))
    assert delta.finish_reason is None and not aborts
    step(processor, {"r": ids("i")}, 12.0)
    (delta,), aborts = step(processor, {"r": [EOS]}, 13.0, r=ended("stop", num_cached_tokens=16, num_preemptions=2))
    assert (delta.text, delta.token_ids, delta.finish_reason, delta.stop_reason) == ("", [EOS], "stop", None)
    m = delta.metrics
    assert (m.arrival_time, m.first_scheduled_time, m.first_token_time) == (10.0, 10.5, 11.0)
    assert (m.last_token_time, m.finished_time, m.num_cached_tokens, m.num_preemptions) == (13.0, 13.0, 16, 2)
    assert not aborts and len(processor) == 0


def test_the_first_token_time_is_the_first_only():
    """B124."""
    processor = OutputProcessor(TOKENIZER)
    make(processor)
    for time in (11.0, 12.0, 13.0):
        (delta,), _ = step(processor, {"r": ids("a")}, time, r=RequestUpdate(first_scheduled_time=10.5))
    assert (delta.metrics.first_token_time, delta.metrics.time_to_first_token) == (11.0, 1.0)


@pytest.mark.parametrize(("reason", "error"), [("length", None), ("abort", None), ("error", "the logits are NaN")])
def test_other_endings_carry_the_last_text(reason, error):
    processor = OutputProcessor(TOKENIZER)
    make(processor)
    step(processor, {"r": ids("a") + ids("é")[:1]})
    (delta,), aborts = step(processor, {}, r=ended(reason, error=error))
    assert (delta.text, delta.token_ids, delta.finish_reason, delta.error) == ("\ufffd", [], reason, error)
    assert not aborts and len(processor) == 0


def test_a_stop_id_shows_no_text_but_a_length_end_does():
    processor = OutputProcessor(TOKENIZER)
    make(processor, "a")
    make(processor, "b")
    x = ids("x")
    deltas, _ = step(processor, {"a": x, "b": x}, a=ended("stop", stop_reason=x[0]), b=ended("length"))
    assert [(d.text, d.token_ids, d.stop_reason) for d in deltas] == [("", x, x[0]), ("x", x, None)]


# ---- stop strings


def test_a_stop_string_cuts_text_ids_and_logprobs_alike_and_aborts():
    """B053, B071: several tokens in one step, the stop string ends in the middle of them."""
    processor = OutputProcessor(TOKENIZER)
    make(processor, stop=["lo,"], logprobs=0)
    tokens = ids("hello, world")
    wire = [([t], [-0.5], 1) for t in tokens]
    (delta,), aborts = step(processor, {"r": tokens}, r=RequestUpdate(logprobs=wire, first_scheduled_time=10.5))
    assert (delta.text, delta.finish_reason, delta.stop_reason) == ("hel", "stop", "lo,")
    assert delta.token_ids == ids("hello,") and len(delta.logprobs) == 6
    assert aborts == ["r"] and len(processor) == 0
    # What the engine says of it afterwards is nobody's.
    assert step(processor, {"r": ids("zzz")}, r=ended("abort")) == ([], [])


def test_a_stop_string_in_the_engines_last_token_needs_no_abort():
    processor = OutputProcessor(TOKENIZER)
    make(processor, stop=["b"])
    (delta,), aborts = step(processor, {"r": ids("ab")}, r=ended("length"))
    assert (delta.text, delta.finish_reason, delta.stop_reason, aborts) == ("a", "stop", "b", [])


def test_text_held_back_while_ids_flow():
    processor = OutputProcessor(TOKENIZER)
    make(processor, stop=["abc"])
    texts = [step(processor, {"r": ids(c)})[0][0].text for c in "xabab"]
    assert texts == ["x", "", "", "ab", ""]
    (delta,), _ = step(processor, {"r": [EOS]}, r=ended("stop"))
    assert delta.text == "ab"


def test_a_stop_string_that_is_the_eos_token():
    """B074."""
    processor = OutputProcessor(TOKENIZER)
    make(processor, stop=["<eos>"])
    (delta,), _ = step(processor, {"r": [*ids("a"), EOS]}, r=ended("stop"))
    assert (delta.text, delta.stop_reason) == ("a", "<eos>")


# ---- n > 1


def test_each_of_n_ends_once_and_their_sums_are_right():
    """B086."""
    processor = OutputProcessor(TOKENIZER)
    children = make(processor, n=4)
    assert children == ["r_0", "r_1", "r_2", "r_3"]
    collector = OutputCollector("r", "Hi", ids("Hi"), SamplingParams(n=4))
    rng = random.Random(0)
    lengths = dict(zip(children, (3, 1, 6, 4), strict=True))
    ends = []
    for k in range(1, 7):
        live = [c for c in children if lengths[c] >= k]
        rng.shuffle(live)
        updates = {c: ended("length", num_preemptions=1) for c in live if lengths[c] == k}
        deltas, _ = step(processor, {c: ids(c[-1]) for c in live}, 10.0 + k, **updates)
        for delta in deltas:
            assert delta.request_id == "r"
            collector.put(delta)
            ends += [delta.index] * (delta.finish_reason is not None)
        assert collector.finished == (k == 6)
    assert sorted(ends) == [0, 1, 2, 3]
    output = collector.output()
    assert [o.index for o in output.outputs] == [0, 1, 2, 3]
    assert [o.text for o in output.outputs] == ["000", "1", "222222", "3333"]
    assert output.finished and output.prompt_token_ids == ids("Hi") and output.prompt == "Hi"
    assert (output.metrics.first_token_time, output.metrics.finished_time) == (11.0, 16.0)
    assert output.metrics.num_preemptions == 4
    assert len(processor) == 0


def test_abort_fans_out_to_what_is_live_and_ends_with_the_engines_word():
    processor = OutputProcessor(TOKENIZER)
    make(processor, n=3)
    make(processor, "other")
    step(processor, {"r_1": ids("x")}, r_1=ended("length"))
    assert processor.abort(["r", "nobody"]) == ["r_0", "r_2"]
    assert processor.abort(["r_2"]) == ["r_2"]
    deltas, _ = step(processor, {}, r_0=ended("abort"), r_2=ended("abort"))
    assert [(d.index, d.finish_reason) for d in deltas] == [(0, "abort"), (2, "abort")]
    assert processor.abort(["r"]) == []
    assert len(processor) == 1


def test_a_live_id_is_refused_and_nothing_of_it_is_kept():
    """B107."""
    processor = OutputProcessor(TOKENIZER)
    make(processor, "r_1")
    for request_id, n in (("r_1", 1), ("r", 2)):
        with pytest.raises(InvalidRequest, match="running"):
            make(processor, request_id, n)
    assert len(processor) == 1
    step(processor, {}, r_1=ended("abort"))
    make(processor, "r", 2)


# ---- logprobs


def test_logprobs_have_the_token_first_then_the_likeliest():
    processor = OutputProcessor(TOKENIZER)
    make(processor, logprobs=2)
    a, b, half = ids("a")[0], ids("b")[0], ids("é")[0]
    wire = [([a, b, half], [-3.0, -0.1, -2.5], 7), ([b, b, a], [-0.1, -0.1, -3.0], 1)]
    (delta,), _ = step(processor, {"r": [a, b]}, r=RequestUpdate(logprobs=wire, first_scheduled_time=1.0))
    assert list(delta.logprobs[0].items()) == [
        (a, Logprob(-3.0, 7, "a")),
        (b, Logprob(-0.1, 1, "b")),
        (half, Logprob(-2.5, 2, "\ufffd")),
    ]
    assert list(delta.logprobs[1].items()) == [(b, Logprob(-0.1, 1, "b")), (a, Logprob(-3.0, 2, "a"))]
    collector = OutputCollector("r", None, ids("Hi"), SamplingParams(logprobs=0))
    collector.put(delta)
    assert collector.output().outputs[0].cumulative_logprob == -3.1


def test_prompt_logprobs_in_parts_and_told_again_come_once():
    processor = OutputProcessor(TOKENIZER)
    make(processor, prompt="abcd", prompt_logprobs=0)
    b, c, d = ids("bcd")

    def part(start, *tokens):
        return RequestUpdate(prompt_logprobs=[([t], [-1.0], 1) for t in tokens], prompt_logprobs_start=start)

    assert step(processor, {}, r=part(1, b)) == ([], [])
    assert step(processor, {"r": []}, r=part(1, b, c)) == ([], [])  # preempted meanwhile
    (delta,), _ = step(processor, {"r": ids("x")}, r=part(2, c, d))
    assert delta.prompt_logprobs[0] is None
    assert [list(at) for at in delta.prompt_logprobs[1:]] == [[b], [c], [d]]
    (later,), _ = step(processor, {"r": ids("y")})
    assert later.prompt_logprobs is None
    delta.merge(later)
    assert len(delta.prompt_logprobs) == 4


# ---- merging


@pytest.mark.parametrize("seed", range(20))
def test_any_grouping_of_deltas_adds_up_to_the_same(seed):
    """K31: a reader may be as slow as it likes and find one delta."""
    rng = random.Random(seed)
    tokens = ids("The café 👋 says: stop here")
    processor = OutputProcessor(TOKENIZER)
    make(processor, stop=["stop"], logprobs=0)
    deltas = []
    place = 0
    while not deltas or deltas[-1].finish_reason is None:
        new = tokens[place : place + rng.randint(1, 4)]
        place += len(new)
        update = RequestUpdate(logprobs=[([t], [-float(t)], 1) for t in new])
        deltas += step(processor, {"r": new}, r=update)[0]
    groups: list[CompletionDelta] = []
    for delta in deltas:
        if groups and rng.random() < 0.6:
            groups[-1].merge(delta)
        else:
            groups.append(delta)
    assert "".join(d.text for d in groups) == "The café 👋 says: "
    assert [t for d in groups for t in d.token_ids] == ids("The café 👋 says: stop")
    got = [next(iter(at.values())).logprob for d in groups for at in d.logprobs]
    assert got == [-float(t) for t in ids("The café 👋 says: stop")]
    assert [d.finish_reason for d in groups] == [None] * (len(groups) - 1) + ["stop"]
    assert groups[-1].stop_reason == "stop"


# ---- failures and leftovers


def test_a_failing_detokenizer_fails_its_request_alone():
    """B077."""

    class Broken(ByteTokenizer):
        def token_bytes(self, token_id):
            if token_id == ids("!")[0]:
                raise RuntimeError("Invalid prefix encountered")
            return super().token_bytes(token_id)

    processor = OutputProcessor(Broken())
    make(processor, "a")
    make(processor, "b")
    for k in range(8):
        tokens = {"a": ids("!" if k == 4 else "x"), "b": ids("y")}
        deltas, aborts = step(processor, tokens, **({"b": ended("length")} if k == 7 else {}))
        if k < 4:
            assert len(deltas) == 2 and not aborts
        elif k == 4:
            assert (deltas[0].finish_reason, aborts) == ("error", ["a"])
            assert "Invalid prefix" in deltas[0].error
        else:
            assert [d.request_id for d in deltas] == ["b"]
    assert deltas[0].finish_reason == "length" and len(processor) == 0


def test_an_engine_failure_ends_all():
    processor = OutputProcessor(TOKENIZER)
    make(processor, "a")
    make(processor, "b", n=2)
    deltas = processor.fail_all("the engine died", 20.0)
    assert [(d.request_id, d.index, d.finish_reason, d.error) for d in deltas] == [
        ("a", 0, "error", "the engine died"),
        ("b", 0, "error", "the engine died"),
        ("b", 1, "error", "the engine died"),
    ]
    assert len(processor) == 0 and processor.fail_all("again", 21.0) == []


def test_nothing_is_kept_of_ended_requests():
    """B123."""
    processor = OutputProcessor(TOKENIZER)
    for k in range(2000):
        make(processor, f"r{k}", n=1 + k % 2, stop=["x"])
        live = [c for c in (f"r{k}", f"r{k}_0", f"r{k}_1") if processor.abort([c]) == [c]]
        step(
            processor, {c: ids("x" if k % 3 else "a") for c in live}, **{c: ended("length") for c in live if k % 3 == 0}
        )
    assert len(processor) == 0 and not processor._requests
    gc.collect()
    assert sum(isinstance(o, _Completion) for o in gc.get_objects()) == 0


def test_unknown_ids_are_ignored():
    assert step(OutputProcessor(TOKENIZER), {"ghost": ids("x")}, spirit=ended("stop")) == ([], [])
