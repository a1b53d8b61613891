"""Chat templates against transformers, and what a bad template or request gets."""

import json
import time

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from stoker.engine.api.errors import RequestError, StartError
from stoker.engine.text.chat_template import ChatTemplate, normalise_messages

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}

# Small templates of our own, one for each way of writing that the model families have.
TEMPLATES = {
    # headers, a date, tools in the first user turn, trimmed content, `is not none`
    "llama3": """\
{{- bos_token }}
{%- if custom_tools is defined %}
    {%- set tools = custom_tools %}
{%- endif %}
{%- if not date_string is defined %}{%- set date_string = strftime_now("%Y") %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = "" %}
{%- endif %}
{{- "<|head|>system<|/head|>\\n\\nToday: " + date_string + "\\n" + system + "<|eot|>" }}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- "<|head|>ipython<|/head|>\\n\\n" }}
        {%- if message.content is mapping or message.content is not string %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- "<|eot|>" }}
    {%- elif 'tool_calls' in message %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|head|>assistant<|/head|>\\n\\n{"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments | tojson }}
        {{- "}<|eot|>" }}
    {%- else %}
        {{- '<|head|>' + message['role'] + '<|/head|>\\n\\n' }}
        {%- if loop.first and tools is not none %}
            {%- for t in tools %}
                {{- t | tojson(indent=4) }}
                {{- "\\n\\n" }}
            {%- endfor %}
        {%- endif %}
        {{- message['content'] | trim + '<|eot|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|head|>assistant<|/head|>\\n\\n' }}
{%- endif %}
""",
    # namespaces, macros, break, string methods, reverse loops, previtem and nextitem
    "qwen": """\
{%- macro show(m) %}{{ '<|im|>' ~ m.role ~ '\\n' }}{% endmacro %}
{%- set ns = namespace(last=messages|length - 1, seen=false) %}
{%- for m in messages[::-1] %}
    {%- if m.role == "user" %}
        {%- set ns.last = messages|length - loop.index %}
        {%- set ns.seen = true %}
        {%- break %}
    {%- endif %}
{%- endfor %}
{%- if tools %}
    {{- "# Tools\\n" }}
    {%- for tool in tools %}
{{ tool | tojson }}
    {%- endfor %}
    {{- "\\n" }}
{%- endif %}
{%- for m in messages %}
    {{- show(m) }}
    {%- set content = m.content if m.content is string else '' %}
    {%- if m.role == "assistant" %}
        {%- if '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1] %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if m.reasoning_content is string %}
            {%- set reasoning = m.reasoning_content %}
        {%- endif %}
        {%- if reasoning and loop.index0 > ns.last %}
            {{- '<think>\\n' ~ reasoning.strip('\\n') ~ '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- content }}
        {%- for call in m.tool_calls or [] %}
            {%- if call.function %}{%- set call = call.function %}{%- endif %}
            {{- '<call>\\n{"name": "' ~ call.name ~ '", "arguments": ' }}
            {%- if call.arguments is string %}
                {{- call.arguments }}
            {%- else %}
                {{- call.arguments | tojson }}
            {%- endif %}
            {{- '}\\n</call>' }}
        {%- endfor %}
    {%- elif m.role == "tool" %}
        {%- if loop.first or loop.previtem.role != "tool" %}{{ '<responses>' }}{% endif %}
        {{- content }}
        {%- if loop.last or loop.nextitem.role != "tool" %}{{ '</responses>' }}{% endif %}
    {%- else %}
        {{- content }}
    {%- endif %}
    {{- '<|end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}
    {{- '<think>\\n\\n</think>\\n\\n' }}
{%- endif %}
{%- endif %}
""",
    # alternating turns or an error, renamed roles, content parts
    "gemma": """\
{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- if messages[0]['content'] is string -%}
        {%- set prefix = messages[0]['content'] + '\\n\\n' -%}
    {%- else -%}
        {%- set prefix = messages[0]['content'][0]['text'] + '\\n\\n' -%}
    {%- endif -%}
    {%- set turns = messages[1:] -%}
{%- else -%}
    {%- set prefix = "" -%}
    {%- set turns = messages -%}
{%- endif -%}
{%- for message in turns -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception("Roles must alternate user/assistant") }}
    {%- endif -%}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}
    {{ '<turn>' + role + '\\n' + (prefix if loop.first else "") }}
    {%- if message['content'] is string -%}
        {{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}
        {%- for item in message['content'] -%}
            {%- if item['type'] == 'text' -%}{{ item['text'] | trim }}{%- endif -%}
        {%- endfor -%}
    {%- else -%}
        {{ raise_exception("Invalid content type") }}
    {%- endif -%}
    {{ '</turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{'<turn>model\\n'}}
{%- endif -%}
""",
    # one namespace for everything, thoughts cut off by split, calls with fenced JSON
    "deepseek": """\
{%- set ns = namespace(is_first=false, is_tool=false, system='') -%}
{%- for message in messages -%}
    {%- if message['role'] == 'system' -%}
        {%- set ns.system = ns.system + message['content'] -%}
    {%- endif -%}
{%- endfor -%}
{{- bos_token -}}{{- ns.system -}}
{%- for message in messages -%}
    {%- if message['role'] == 'user' -%}
        {%- set ns.is_tool = false -%}
        {{- '<User>' + message['content'] -}}
    {%- elif message['role'] == 'assistant' and message['tool_calls'] -%}
        {%- set ns.is_first = false -%}
        {%- for tool in message['tool_calls'] -%}
            {{- '<Assistant><calls>' if not ns.is_first else '\\n' -}}
            {%- set ns.is_first = true -%}
            {{- tool['type'] + '<sep>' + tool['function']['name'] + '\\n' + '```json' + '\\n' -}}
            {{- tool['function']['arguments'] | tojson + '\\n' + '```' -}}
        {%- endfor -%}
        {{- '</calls>' + eos_token -}}
    {%- elif message['role'] == 'assistant' -%}
        {%- set content = message['content'] -%}
        {%- if '</think>' in content -%}
            {%- set content = content.split('</think>')[-1] -%}
        {%- endif -%}
        {{- '<Assistant>' + content + eos_token -}}
    {%- elif message['role'] == 'tool' -%}
        {%- set ns.is_tool = true -%}
        {{- '<output>' + message['content'] + '</output>' -}}
    {%- endif -%}
{%- endfor -%}
{%- if tools is defined and tools -%}{{- tools | length -}}{%- endif -%}
{%- if add_generation_prompt and not ns.is_tool -%}{{- '<Assistant><think>\\n' -}}{%- endif -%}
""",
    # recursive macros over schemas, items, tests of types, a date, effort, thinking of history
    "gpt-oss": """\
{%- macro type_of(spec) -%}
    {%- if spec.type == "array" -%}{{- type_of(spec['items']) }}[]
    {%- elif spec.type is iterable and spec.type is not string -%}{{- spec.type | join(" | ") }}
    {%- elif spec.enum -%}{{ '"' + spec.enum|join('" | "') + '"' }}
    {%- elif spec.type == "object" -%}{
        {%- for name, inner in (spec.properties or {}).items() -%}
            {{- name }}{%- if name not in (spec.required or []) %}?{% endif %}:{{ type_of(inner) }},
        {%- endfor -%}
    }{%- else -%}any{%- endif -%}
{%- endmacro -%}
{%- if reasoning_effort is not defined %}{%- set reasoning_effort = "medium" %}{%- endif %}
{{- "<start>system<message>Date: " + strftime_now("%Y") + "\\nReasoning: " + reasoning_effort }}
{%- if messages[0].role == "developer" or messages[0].role == "system" %}
    {%- set rules, loop_messages = messages[0].content, messages[1:] %}
{%- else %}
    {%- set rules, loop_messages = "", messages %}
{%- endif %}
{{- "<end>" + rules }}
{%- if tools %}
    {%- for tool in tools %}
        {%- set tool = tool.function %}
        {{- "type " + tool.name + " = (_: " }}{{ type_of(tool.parameters or {}) }}{{ ")\\n" }}
    {%- endfor %}
{%- endif %}
{%- set last = namespace(call=none) %}
{%- for message in loop_messages -%}
    {%- if message.role == 'assistant' and "tool_calls" in message %}
        {%- set call = message.tool_calls[0].function %}
        {%- if message.thinking %}{{- "<analysis>" + message.thinking + "<end>" }}{%- endif %}
        {{- "to=functions." + call.name + "<message>" + call.arguments|tojson + "<call>" }}
        {%- set last.call = call.name %}
    {%- elif message.role == 'assistant' and loop.last and not add_generation_prompt %}
        {{- "<final>" + message.content + "<return>" }}
    {%- elif message.role == 'tool' -%}
        {%- if last.call is none %}{{- raise_exception("a tool without a call") }}{%- endif %}
        {{- "<start>functions." + last.call + "<message>" + message.content|tojson + "<end>" }}
    {%- else -%}
        {{- "<start>" ~ message.role ~ "<message>" ~ message.content ~ "<end>" }}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- "<start>assistant" }}{%- endif -%}
""",
    # filters over messages, tools of the last user turn, generation blocks, eos after answers
    "mistral": """\
{%- set users = messages | selectattr("role", "equalto", "user") | list %}
{{- bos_token }}
{%- for message in messages if message.role != "system" %}
{%- if message["role"] == "user" %}
    {%- if tools is not none and message == users[-1] %}
        {{- "[TOOLS] [" }}
        {%- for tool in tools %}
            {{- '{"function": {' }}
            {%- for key, value in tool.function.items() if key != "return" %}
                {{- '"%s": ' | format(key) }}{{ value | tojson }}
                {%- if not loop.last %}, {% endif %}
            {%- endfor %}
            {{- "}}" }}
            {%- if not loop.last %}, {% else %}{{ "]" }}{% endif %}
        {%- endfor %}
        {{- "[/TOOLS]" }}
    {%- endif %}
    {{- "[INST] " + message["content"] + "[/INST]" }}
{%- elif message["role"] == "assistant" and message.content is defined %}
    {% generation %}{{ " " + message["content"] + eos_token }}{% endgeneration %}
{%- elif message["role"] == "assistant" %}
    {%- set names = message.tool_calls | map(attribute="function") | map(attribute="name") %}
    {{- "[CALLS]" ~ names | join(",") }}
{%- else %}
    {%- continue %}
{%- endif %}
{%- endfor %}
""",
}

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": 'Wetter <für> einen "Ort" & mehr',
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "enum": ["Zürich", "東京"]}},
                "required": ["city"],
            },
        },
    },
    {"type": "function", "function": {"name": "now", "parameters": {}}},
]
CALL = {"id": "c1", "type": "function", "function": {"name": "now", "arguments": {"é": [1, None]}}}
CONVERSATIONS = {
    "short": [{"role": "user", "content": "Hi <b>&amp; 'you'</b>!"}],
    "turns": [
        {"role": "system", "content": "  Be brief.\n"},
        {"role": "user", "content": "  spaces around  "},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nYes 🎉", "tool_calls": None},
        {"role": "user", "content": "{{ 7 * 7 }} {% raw %}"},
    ],
    "tools": [
        {"role": "user", "content": "What time is it?"},
        {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning": "use the clock"},
        {"role": "tool", "content": "12:00", "tool_call_id": "c1"},
        {"role": "tool", "content": "12:01", "tool_call_id": "c1"},
    ],
    "prefill": [
        {"role": "user", "content": "Write"},
        {"role": "assistant", "content": "Once upon a time"},
    ],
}


def by_transformers(source: str, messages: list, tokens: dict, **options) -> str:
    # apply_chat_template drops null fields before it comes here
    messages = [{k: v for k, v in m.items() if v is not None} for m in messages]
    [text], _ = render_jinja_template([messages], chat_template=source, **tokens, **options)
    return text


@pytest.mark.parametrize("with_tools", [False, True])
@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("family", TEMPLATES)
def test_equals_transformers(family, conversation, with_tools):
    source, messages = TEMPLATES[family], CONVERSATIONS[conversation]
    options = {"tools": TOOLS if with_tools else None}
    template = ChatTemplate(source, TOKENS)
    if family == "gemma" and conversation == "tools":
        with pytest.raises(RequestError, match=r"^Roles must alternate user/assistant$") as e:
            template.render(messages, **options)
        assert (e.value.param, e.value.status) == ("messages", 400)
        return
    if family == "gemma" and with_tools:
        return  # it knows no tools: see below
    for prompted in (False, True):
        expected = by_transformers(
            source, messages, TOKENS, add_generation_prompt=prompted, **options
        )
        assert template.render(messages, add_generation_prompt=prompted, **options) == expected
    if messages[-1].get("role") == "assistant" and family != "mistral":
        ends_open = {"add_generation_prompt": False, "continue_final_message": True}
        expected = by_transformers(source, messages, TOKENS, continue_final_message=True, **options)
        assert template.render(messages, **ends_open, **options) == expected
        assert expected.endswith("Once upon a time")


def test_smollm2_equals_its_reference_prompts(smollm2, smollm2_greedy):
    template = ChatTemplate(smollm2.chat_template, {})
    for item in smollm2_greedy:
        assert template.render([{"role": "user", "content": item["prompt"]}]) == item["text"]


def test_template_variables():
    template = ChatTemplate(TEMPLATES["qwen"], TOKENS)
    messages = CONVERSATIONS["short"]
    thinking = template.render(messages, template_kwargs={"enable_thinking": False})
    assert thinking == template.render(messages) + "<think>\n\n</think>\n\n"
    for name in ("messages", "tools", "add_generation_prompt", "bos_token", "chat_template"):
        with pytest.raises(RequestError) as e:
            template.render(messages, template_kwargs={name: []})
        assert e.value.param == f"chat_template_kwargs.{name}"
    with pytest.raises(RequestError):
        template.render(messages, template_kwargs={"raise_exception": "x"})


def test_tools_reach_models_whose_templates_know_none():
    system, user = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}
    text = ChatTemplate(TEMPLATES["gemma"], TOKENS).render([user], tools=TOOLS)
    assert "get_weather" in text
    assert "東京" in text
    assert text.index("<tool_call>") < text.index("Hi")
    call = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    answer = {"role": "tool", "content": "12:00"}
    text = ChatTemplate(PLAIN, TOKENS).render([system, user, call, answer], tools=TOOLS)
    assert text.index("Be brief.") < text.index("get_weather") < text.index("<user>Hi</>")
    assert '<tool_call>\n{"name": "now", "arguments": {"é": [1, null]}}\n</tool_call>' in text
    parts = [{"type": "text", "text": "Hi"}]
    text = ChatTemplate(TEMPLATES["gemma"], TOKENS).render(
        [{"role": "user", "content": parts}], tools=TOOLS
    )
    assert "get_weather" in text
    assert "tools" not in ChatTemplate(PLAIN, TOKENS).render([user])


# --- continuing the final message ---

PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"
TRIMS = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</>{% endfor %}"


def continued(source: str, content) -> str:
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": content}]
    return ChatTemplate(source, TOKENS).render(
        messages, add_generation_prompt=False, continue_final_message=True
    )


@pytest.mark.parametrize("source", [PLAIN, TRIMS])
@pytest.mark.parametrize("end", ["", " ", "\n\n", "\t ", "</>"])
def test_continues_exactly_after_the_prefill(source, end):
    assert continued(source, "The answer:" + end) == "<user>q</><assistant>The answer:" + end


def test_continues_the_last_text_part():
    source = (
        "{% for m in messages %}{% for p in m.content %}{{ p.text or p }}|{% endfor %}{% endfor %}"
    )
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two "}]
    assert continued(source, parts) == "q|one|two "


def test_what_cannot_be_continued():
    drops_thoughts = PLAIN.replace("m.content", "m.content.split('</think>')[-1]")
    for source, content in [
        ("{{ messages[0].content }}", "a"),
        (PLAIN, None),
        (drops_thoughts, "<think>x</think>y"),
    ]:
        with pytest.raises(RequestError) as e:
            continued(source, content)
        assert e.value.param == "continue_final_message"
    with pytest.raises(RequestError, match="exclude each other"):
        ChatTemplate(PLAIN, {}).render(
            CONVERSATIONS["short"], add_generation_prompt=True, continue_final_message=True
        )


# --- which template ---


def test_tool_use_template():
    template = ChatTemplate({"default": "D", "tool_use": "T"}, {})
    assert template.render(CONVERSATIONS["short"]) == "D"
    assert template.render(CONVERSATIONS["short"], tools=TOOLS) == "T"


def test_no_template_is_said_plainly():
    with pytest.raises(RequestError, match="no chat template") as e:
        ChatTemplate(None, {}).render(CONVERSATIONS["short"])
    assert (e.value.status, e.value.code) == (400, "no_chat_template")


def test_no_messages():
    with pytest.raises(RequestError, match="at least one"):
        ChatTemplate(PLAIN, {}).render([])


@pytest.mark.parametrize("source", ["{% for %}", "{{ x", "{% unknown %}", "{{ a | no_filter }}"])
def test_an_invalid_template_stops_the_start(source):
    with pytest.raises(StartError, match="chat template 'default'"):
        ChatTemplate(source, {})


# --- hostile templates ---


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ self.__init__.__globals__['os'] }}",
        "{{ (messages | map(attribute='__class__') | list)[0].mro() }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='x') }}",
        "{{ raise_exception.__globals__.sys }}",
        "{{ '{0.__class__}'.format(messages) | length + [].nope.nope }}",
    ],
)
def test_the_sandbox_holds(source):
    with pytest.raises(RequestError) as e:
        ChatTemplate(source, {}).render([{"role": "user", "content": "x"}])
    assert e.value.param == "messages"


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(10**9) %}x{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) ~ f(n - 1) }}{% endif %}{% endmacro %}{{ f(99) }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% for m in messages recursive %}{{ loop(messages) }}{% endfor %}",
        "{% set n = namespace(s='aaaaaaaa') %}"
        "{% for i in range(99) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
        "{% set n = namespace(s='aaaaaaaa') %}"
        "{% for i in range(99) %}{% set n.s = n.s + n.s %}{% endfor %}",
        "{% for i in range(99999) %}{{ '%1000d' % i }}{% endfor %}",
        "{{ 'a' * 10**9 }}",
        "{{ [1] * 10**9 }}",
        "{{ 10**10**8 }}",
        "{{ 'x' | center(10**9) }}",
        "{{ 'x'.ljust(10**9) }}",
        "{{ '%999999999d' % 1 }}",
        "{{ '%999999999d' | format(1) }}",
        "{{ '{:999999999d}'.format(1) }}",
        "{{ ('x' * 10**6) | replace('x', 'y' * 10**6) }}",
        "{{ ('x' * 10**6).replace('x', 'y' * 10**6) }}",
        "{{ lipsum(10**6) }}",
        "{% set n = namespace(s='aaaaaaaa') %}{% for i in range(99) %}"
        "{% set x %}{{ n.s }}{{ n.s }}{% endset %}{% set n.s = x %}{% endfor %}",
        "{% macro d(s) %}{{ s }}{{ s }}{% endmacro %}{% set n = namespace(s='aaaaaaaa') %}"
        "{% for i in range(99) %}{% set n.s = d(n.s) %}{% endfor %}",
        "{% macro d() %}{% set n.l = varargs %}{% endmacro %}{% set n = namespace(l=[1]) %}"
        "{% for i in range(99) %}{% set n.l = [n.l, n.l] %}{% endfor %}{{ n.l | tojson }}",
        "{% set n = namespace(l=[1]) %}{% for i in range(99) %}{% set n.l = n.l + n.l %}{% endfor %}",  # noqa: E501
        "{% set n = namespace(l=[1]) %}{% for i in range(99) %}{% set n.l = (n.l, n.l) %}{% endfor %}"  # noqa: E501
        "{{ n.l }}",
        "{% set n = namespace(l={}) %}{% for i in range(99) %}{% set n.l = dict(a=n.l, b=n.l) %}"
        "{% endfor %}{{ n.l | tojson }}",
        "{% for i in range(99999) %}{{ range(99999) | list | sort | length }}{% endfor %}",
        "{% set x = [[1]] * 99999 %}{{ x | sum(start=[]) | length }}",
        "{{ range(99999) | map('string') | join('a' * 10**5) | length }}",
        "{{ ('a' * 10**5).join(range(99999) | map('string')) | length }}",
        "{% set n = namespace(i=3) %}{% for i in range(99) %}{% set n.i = n.i * n.i %}{% endfor %}",
        "{{ '{:>{w}}'.format('x', w=999999999) }}",
        "{{ ('\t' * 10**5).expandtabs(10**6) | length }}",
        "{% set s = 'a' * 2**24 %}{{ s.translate({97: s}) | length }}",
        "{{ ('\n' * 10**6) | indent(10**5, blank=true) | length }}",
        "{{ messages | tojson(indent=99999) }}",
        "{{ strftime_now('%c' * 10**6) }}",
    ],
)
def test_bombs_end_soon(source):
    template = ChatTemplate(source, {}, timeout_s=0.2)
    start = time.monotonic()
    with pytest.raises(RequestError):
        template.render([{"role": "user", "content": "x"}])
    assert time.monotonic() - start < 10  # without the limits: minutes, or all the memory


def test_limits_do_not_meet_long_honest_prompts():
    text = "word </think> word\n" * 100_000  # 1.9 million characters
    messages = [{"role": "user", "content": text}, {"role": "assistant", "content": text}]
    for family in ("llama3", "qwen", "gemma", "mistral"):
        rendered = ChatTemplate(TEMPLATES[family], TOKENS).render(messages)
        assert len(rendered) > len(text)
        assert rendered == by_transformers(
            TEMPLATES[family], messages, TOKENS, add_generation_prompt=True
        )


# --- messages ---


@pytest.mark.parametrize(
    ("source", "wants"),
    [
        (PLAIN, "string"),
        (TEMPLATES["gemma"], "either"),
        ("{% for m in messages %}{% for p in m['content'] %}{{ p.text }}{% endfor %}{% endfor %}",
         "parts"),
        ("{% for m in messages %}{% set c = m.content %}{% for p in c|list %}{{ p.text }}"
         "{% endfor %}{% endfor %}", "parts"),
        ("{% macro show(content) %}{% if content is string %}{{ content }}{% else %}"
         "{% for p in content %}{{ p.text }}{% endfor %}{% endif %}{% endmacro %}"
         "{% for m in messages %}{{ show(m.content) }}{% endfor %}", "either"),
        ("{% for m in messages %}{% for line in m.content.split('x') %}{{ line }}{% endfor %}"
         "{% endfor %}", "string"),
    ],
)  # fmt: skip
def test_content_format(source, wants):
    template = ChatTemplate(source, {})
    assert template.content_format == wants
    parts = [{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}]
    [message] = template.normalise_messages([{"role": "user", "content": parts}])
    text_parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert message["content"] == ("a\nb" if wants == "string" else text_parts)
    [message] = template.normalise_messages([{"role": "user", "content": "a"}])
    assert message["content"] == ([{"type": "text", "text": "a"}] if wants == "parts" else "a")


def test_parts_that_are_no_text():
    image = {"type": "image_url", "image_url": {"url": "data:,"}}
    messages = [{"role": "user", "content": "x"}, {"role": "user", "content": [image]}]
    for wants in ("string", "parts", "either"):
        with pytest.raises(RequestError, match="'image_url'") as e:
            normalise_messages(messages, wants)
        assert e.value.param == "messages.1.content.0.type"
    allowed = normalise_messages(messages, "parts", part_types=["image_url"])
    assert allowed[1]["content"] == [image]
    with pytest.raises(RequestError, match="text only"):
        normalise_messages(messages, "string", part_types=["image_url"])
    with pytest.raises(RequestError, match="string `text`"):
        normalise_messages([{"role": "user", "content": [{"type": "text"}]}], "parts")


def test_developer_becomes_system_where_the_template_does_not_know_it():
    messages = [{"role": "developer", "content": "x"}]
    assert ChatTemplate(PLAIN, {}).normalise_messages(messages)[0]["role"] == "system"
    knows = PLAIN + "{% if messages[0].role == 'developer' %}{% endif %}"
    assert ChatTemplate(knows, {}).normalise_messages(messages)[0]["role"] == "developer"
    assert messages[0]["role"] == "developer"  # the caller's own stay as they are


def test_tool_call_arguments_become_objects():
    def call(arguments):
        function = {"name": "f", "arguments": arguments}
        return {"role": "assistant", "content": None, "tool_calls": [{"function": function}]}

    [message] = normalise_messages([call(json.dumps({"a": "é", "b": [1]}))], "string")
    assert message["tool_calls"][0]["function"]["arguments"] == {"a": "é", "b": [1]}
    [message] = normalise_messages([call("")], "string")
    assert message["tool_calls"][0]["function"]["arguments"] == {}
    for bad in ("{", "[1]", '"x"', "[" * 100_000):
        with pytest.raises(RequestError) as e:
            normalise_messages([call("{}"), call(bad)], "string")
        assert e.value.param == "messages.1.tool_calls.0.function.arguments"
