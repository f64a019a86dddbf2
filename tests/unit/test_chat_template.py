"""Chat messages to prompts: the same text as transformers writes, and whatever clients send is rendered or refused."""

import copy
import json

import pytest

from kvern.sampling_params import InvalidRequest
from kvern.tokenizer import ByteTokenizer, load_tokenizer, render_chat
from kvern.weights import ModelFiles
from tests.models import fetch

SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "Hello <b>&\n 'you'"}
ASSISTANT = {"role": "assistant", "content": "Hi there."}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {
            "id": "call_1",
            "type": "function",
            "function": {"name": "weather", "arguments": {"city": "Zürich", "days": 2}},
        }
    ],
}
RESULT = {"role": "tool", "tool_call_id": "call_1", "name": "weather", "content": "12 degrees"}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "weather", "description": "Weather & <more>", "parameters": {"type": "object"}},
    }
]
CONVERSATIONS = [[USER], [SYSTEM, USER], [USER, ASSISTANT, USER], [SYSTEM, USER, ASSISTANT], [USER, CALL, RESULT]]

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' }}\n"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
WITH_TOOLS = """\
{%- if tools %}
    {{- "# Tools" }}
    {%- for tool in tools %}
        {{- "\\n" + (tool | tojson) }}
    {%- endfor %}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == "skip" %}{% continue %}{% endif %}
    {{- "\\n[" + message.role + "]" }}
    {%- if message.content %}{{ message.content | trim }}{% endif %}
    {%- for call in message.tool_calls or [] %}
        {%- for name, value in call.function.arguments | items %}
            {{- name ~ "=" ~ value ~ ";" }}
        {%- endfor %}
        {{- call.function.arguments | tojson(indent=2) }}
    {%- endfor %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- bos_token + ("<think>" if enable_thinking is not defined or enable_thinking else "") }}
{%- endif %}
"""
PARTS = (
    "{% for message in messages %}{% for part in message['content'] %}"
    "{% if part['type'] == 'text' %}[{{ part['text'] }}]{% endif %}{% endfor %}{% endfor %}"
)


def by_transformers(template, messages, tools=None, add_generation_prompt=True, **variables):
    from transformers.utils.chat_template_utils import render_jinja_template

    rendered, _ = render_jinja_template(
        conversations=[copy.deepcopy(messages)],
        tools=tools,
        chat_template=template,
        add_generation_prompt=add_generation_prompt,
        **variables,
    )
    return rendered[0]


def render(messages, template=CHATML, **options):
    return render_chat(ByteTokenizer(), messages, chat_template=template, **options)


# -- the same text as transformers


@pytest.fixture(scope="module")
def smollm2():
    return load_tokenizer(ModelFiles("gguf", fetch("smollm2"), "smollm2"))


@pytest.mark.model
@pytest.mark.parametrize("messages", CONVERSATIONS)
@pytest.mark.parametrize("prompt", [True, False])
def test_smollm2_template(smollm2, messages, prompt):
    expected = by_transformers(smollm2.chat_template, messages, add_generation_prompt=prompt)
    assert render_chat(smollm2, messages, add_generation_prompt=prompt) == expected
    if messages == [SYSTEM, USER] and prompt:
        assert expected == (
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello <b>&\n 'you'<|im_end|>\n"
            "<|im_start|>assistant\n"
        )


@pytest.mark.parametrize("template", [CHATML, WITH_TOOLS])
@pytest.mark.parametrize("messages", CONVERSATIONS)
@pytest.mark.parametrize("tools", [None, TOOLS])
def test_other_templates(template, messages, tools):
    expected = by_transformers(template, messages, tools, bos_token="<bos>", enable_thinking=False)
    assert render(messages, template, tools=tools, chat_template_kwargs={"enable_thinking": False}) == expected


@pytest.mark.parametrize("messages", [[USER, ASSISTANT], [USER, ASSISTANT, USER], [USER, USER | ASSISTANT, ASSISTANT]])
def test_continuing_the_final_message(messages):
    from transformers.utils.chat_template_utils import render_jinja_template

    expected, _ = render_jinja_template(
        conversations=[copy.deepcopy(messages)], chat_template=CHATML, continue_final_message=True
    )
    assert render(messages, continue_final_message=True) == expected[0]


# -- what clients send


def parts(*texts):
    return [{"type": "text", "text": text} for text in texts]


@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
def test_text_parts_are_joined_for_a_template_that_wants_strings(role):
    """CASES B101, K04."""
    assert render([{"role": role, "content": parts("a", "b")}]) == render([{"role": role, "content": "a\nb"}])


def test_a_template_that_wants_parts_gets_parts():
    assert render([{"role": "user", "content": "a"}], PARTS) == "[a]"
    assert render([{"role": "user", "content": parts("a", "b")}], PARTS) == "[a\nb]"
    assert render([USER, {"role": "assistant", "content": "ab"}], PARTS, continue_final_message=True).endswith("[ab")


@pytest.mark.parametrize("content", [{"content": ""}, {"content": None}, {}])
@pytest.mark.parametrize(
    "tool_calls", [{}, {"tool_calls": None}, {"tool_calls": []}, {"tool_calls": CALL["tool_calls"]}]
)
@pytest.mark.parametrize("template", [CHATML, WITH_TOOLS])
def test_assistant_without_content(content, tool_calls, template):
    """CASES B102, K06."""
    assistant = {"role": "assistant", **content, **tool_calls}
    expected = render(
        [USER, {"role": "assistant", "content": "", **(tool_calls if tool_calls.get("tool_calls") else {})}], template
    )
    assert render([USER, assistant], template) == expected
    assert "None" not in expected


def test_arguments_of_tool_calls_are_objects_for_the_template():
    call = copy.deepcopy(CALL)
    call["tool_calls"][0]["function"]["arguments"] = json.dumps(CALL["tool_calls"][0]["function"]["arguments"])
    before = copy.deepcopy(call)
    assert render([USER, call], WITH_TOOLS) == render([USER, CALL], WITH_TOOLS)
    assert "city=Zürich;days=2;" in render([USER, call], WITH_TOOLS)
    assert call == before  # the caller's messages stay as they were
    call["tool_calls"][0]["function"]["arguments"] = ""
    assert "{}" in render([USER, call], WITH_TOOLS)


def test_arguments_that_are_not_json_end_only_a_template_that_needs_them():
    call = copy.deepcopy(CALL)
    for broken in ("[" * 100_000, '{"city": "Zür'):
        call["tool_calls"][0]["function"]["arguments"] = broken
        assert render([USER, call]).startswith("<|im_start|>user")
    with pytest.raises(InvalidRequest, match="the chat template refused"):
        render([USER, call], WITH_TOOLS)


def test_unknown_keys_are_ignored_and_developer_is_system():
    assert render([{**USER, "cache_control": {"type": "x"}, "name": None}]) == render([USER])
    assert render([{"role": "developer", "content": "x"}]) == render([{"role": "system", "content": "x"}])
    knows = "{% for m in messages %}{% if m.role == 'developer' %}dev{% endif %}{{ m.content }}{% endfor %}"
    assert render([{"role": "developer", "content": "x"}], knows) == "devx"


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        (["hello"], "messages[0]"),
        ([{"content": "a"}], "messages[0].role"),
        ([USER, {"role": "wizard", "content": "a"}], "messages[1].role"),
        ([{"role": "", "content": "a"}], "messages[0].role"),
        ([{"role": 3, "content": "a"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content"),
        ([{"role": "user", "content": [7]}], "messages[0].content"),
        ([{"role": "assistant", "tool_calls": ["x"]}], "messages[0].tool_calls"),
        ([{"role": "assistant", "tool_calls": 7}], "messages[0].tool_calls"),
    ],
)
def test_messages_that_are_not_well_formed(messages, param):
    with pytest.raises(InvalidRequest) as caught:
        render(messages)
    assert caught.value.param == param


def test_a_role_that_only_this_template_knows():
    template = CHATML + "{# also 'ipython' #}"
    assert "<|im_start|>ipython\nx" in render([{"role": "ipython", "content": "x"}], template)


# -- templates that say no, or misbehave


def test_the_template_refuses():
    template = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role here') }}{% endif %}ok"
    assert render([USER], template) == "ok"
    with pytest.raises(InvalidRequest, match="no system role here"):
        render([SYSTEM], template)


def test_no_template():
    tokenizer = ByteTokenizer()
    tokenizer.chat_templates = {}
    with pytest.raises(InvalidRequest, match="no chat template"):
        render_chat(tokenizer, [USER])
    assert render_chat(tokenizer, [USER], chat_template="{{ messages[0].content }}") == USER["content"]


def test_the_template_for_tools_is_taken_when_there_are_tools():
    tokenizer = ByteTokenizer()
    tokenizer.chat_templates = {"default": "plain", "tool_use": "{{ tools | length }} tools"}
    assert render_chat(tokenizer, [USER]) == render_chat(tokenizer, [USER], tools=[]) == "plain"
    assert render_chat(tokenizer, [USER], tools=TOOLS) == "1 tools"


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception.__globals__.json }}",
        "{{ cycler.__init__.__globals__.os }}",
        "{% for i in range(10000000) %}{% endfor %}",
        "{{ messages[0].nothing.more }}",
        "{{ 1 / 0 }}",
        "{% if %}",
    ],
)
def test_a_template_can_do_no_harm(template):
    with pytest.raises(InvalidRequest):
        render([USER], template)


def test_what_templates_may_use():
    assert render([USER], "{{ {'b': 'é<', 'a': 1} | tojson(sort_keys=true) }}") == '{"a": 1, "b": "é<"}'
    assert render([USER], "{{ strftime_now('%Y') | length }}") == "4"
    assert render([USER], "{% generation %}x{{ 1 }}{% endgeneration %}y") == "x1y"
    assert render([USER], "  {% if true %}\nx\n  {% endif %}\ny") == "x\ny"  # blocks leave no line behind
    assert render([USER], "{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "01"


def test_variables_cannot_replace_the_messages():
    kwargs = {"messages": [], "tools": TOOLS, "self": 1, "bos_token": "B"}
    assert (
        render([USER], "{{ messages | length }}{{ tools is none }}{{ bos_token }}", chat_template_kwargs=kwargs)
        == "1TrueB"
    )


def test_a_final_message_that_is_not_written_cannot_be_continued():
    with pytest.raises(InvalidRequest, match="cannot be continued"):
        render([USER], "{{ messages | length }}", continue_final_message=True)


def test_a_long_conversation_is_fast():
    messages = [USER, ASSISTANT] * 2000
    assert render(messages).count("<|im_end|>") == 4000
