"""Chat templates, hostile ones and long conversations: bounded by what they do, counted before they do it."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest
from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from twinkle.data_format.chat_template import MAX_SOURCE_CHARACTERS, ChatTemplateCode, TooMuchWork

MESSAGES: list[dict[str, Any]] = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
DOUBLED = "{% set ns = namespace(x=START) %}{% for i in range(60) %}{% set ns.x = AGAIN %}{% endfor %}"
CALLED = "{% macro m() %}{{ caller() }}{{ caller() }}{% endmacro %}"

TOO_MUCH = {
    "loops in loops": "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}",
    "loops that keep nothing": "{% for a in range(9999) %}{% for b in range(9999) if false %}{% endfor %}{% endfor %}",
    "loops that call themselves": "{% for a in range(9999) recursive %}{{ loop(range(9999)) }}{% endfor %}",
    "loops over their own text": "{% for a in range(9999) %}" + "x" * 9999 + "{% endfor %}",
    "macros": "{% macro a(n) %}{% if n %}{{ a(n - 1) }}{{ a(n - 1) }}{% endif %}{% endmacro %}{{ a(60) }}",
    "calls": CALLED + "{% call m() %}" * 18 + "x" + "{% endcall %}" * 18,
    "texts that double, joined": DOUBLED.replace("START", "'ab'").replace("AGAIN", "ns.x ~ ns.x"),
    "texts that double, added": DOUBLED.replace("START", "'ab'").replace("AGAIN", "ns.x + ns.x"),
    "texts that double, written": DOUBLED.replace("START", "'ab'").replace(
        "{% set ns.x = AGAIN %}", "{% set ns.x %}{{ ns.x }}{{ ns.x }}{% endset %}"
    ),
    "lists that double": DOUBLED.replace("START", "[1]").replace("AGAIN", "[ns.x, ns.x]"),
    "lists that are added": DOUBLED.replace("START", "[1]").replace("AGAIN", "ns.x + ns.x"),
    "names that double": DOUBLED.replace("START", "1").replace("AGAIN", "namespace(a=ns.x, b=ns.x)") + "{{ ns.x }}",
    "a name in itself": "{% set ns = namespace() %}{% set ns.x = ns %}{{ ns }}",
    "repetition": "{{ 'a' * 10**10 }}",
    "a repeated list": "{{ 10**10 * [1] }}",
    "powers": "{{ 10**(10**10) }}",
    "products": "{% set ns = namespace(x=7) %}{% for i in range(60) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "ljust": "{{ 'a'.ljust(10**10) }}",
    "rjust": "{{ 'a'.rjust(10**10) }}",
    "zfill": "{{ 'a'.zfill(10**10) }}",
    "expandtabs": "{{ 'a\\tb'.expandtabs(10**10) }}",
    "str.replace": "{{ messages[0].role.replace('', 'b' * 99999) }}",
    "str.join": "{{ ('a' * 9999).join(range(9999)|map('string')) }}",
    "the filter center": "{{ 'a'|center(10**10) }}",
    "the filter indent": "{{ 'a'|indent(10**10, true) }}",
    "the filter replace": "{{ 'aaaa'|replace('', 'b' * 99999) }}",
    "the filter join": "{{ range(9999)|map('string')|join('a' * 9999) }}",
    "the filter batch": "{{ [1]|batch(10**10, 1)|list }}",
    "the filter slice": "{{ [1]|slice(10**10)|list }}",
    "the filter round": "{{ 1.5|round(10**9) }}",
    "the filter tojson": "{{ [[1]]|tojson(indent=10**9) }}",
    "the filter sum": "{{ ([messages] * 999)|sum(start=[])|length }}",
    "the filter sort": "{{ range(9999)|sort|length }}",
    "%": "{{ '%10000000000d' % 1 }}",
    "% with a width from values": "{{ '%*d' % (10**10, 1) }}",
    "the filter format": "{{ '%10000000000d'|format(1) }}",
    "str.format": "{{ '{:>10000000000}'.format(1) }}",
    "str.format with a width from values": "{{ '{:{w}}'.format(1, w=10**10) }}",
    "the time": "{{ strftime_now('%10000000000Y') }}",
    "searching": "{% for i in range(9999) %}{% set x = i in range(9999)|list %}{% endfor %}",
    "comparing": "{% for i in range(9999) %}{% set x = [messages, i] == [messages, i] %}{% endfor %}",
    "a chain of comparisons": "{% for i in range(9999) %}{% set x = [messages] == [messages] == [1] %}{% endfor %}",
    "copying": "{% for i in range(9999) %}{% set x = (messages * 99)[1:] %}{% endfor %}",
    "finding by what is large": "{% set t = (messages,) * 9 %}{% for i in range(9999) %}{{ {}[t|string] }}{% endfor %}",
    "splitting": "{% for i in range(9999) %}{% set x = ('a ' * 99).split() %}{% endfor %}",
    "for web pages": "{{ 'a'|wordwrap(1) }}",
}
"""What each asks for a few characters, and a step would suffice to get."""

OUT_OF_REACH = [
    "{{ (5).to_bytes(10**10, 'big') }}",
    "{{ {}.fromkeys(range(9999)) }}",
    "{{ 'a'.encode() }}",
    "{{ 'a'.translate({97: 'b' * 9999}) }}",
    "{{ messages.append(1) }}",
    "{{ lipsum(n=9999) }}",
    "{{ namespace(__class__=1) }}",
    "{{ ''.__class__.__mro__ }}",
]


def code(source: str, *, max_steps: int = 2**14) -> ChatTemplateCode:
    return ChatTemplateCode(source, lambda: datetime(2026, 1, 2, tzinfo=UTC), max_steps=max_steps)


@pytest.mark.parametrize("attack", TOO_MUCH)
def test_a_template_that_would_do_too_much_is_stopped_before_it_does(attack: str) -> None:
    with pytest.raises(TooMuchWork):
        code(TOO_MUCH[attack]).render({"messages": MESSAGES})


@pytest.mark.parametrize("source", OUT_OF_REACH)
def test_a_template_calls_nothing_whose_price_is_not_known(source: str) -> None:
    with pytest.raises(TemplateError):
        code(source).render({"messages": MESSAGES})


def test_a_template_reads_as_it_always_did_and_is_counted_anew_for_each_conversation() -> None:
    template = code(
        "{%- set ns = namespace(n=0) -%}"
        "{%- for m in messages if m.role != 'tool' -%}"
        "{%- set ns.n = ns.n + 1 -%}{{ '%02d' % ns.n }}<{{ m.role|upper }}>{{ m['content'].strip().replace('h', 'H') }}"
        "{%- if 0 < ns.n <= 1 and loop.first %} first{% endif -%}"
        "{%- if m.role in ('user', 'x') %}{% generation %}[{{ m|tojson }}]{% endgeneration %}{% endif -%}"
        "{% endfor %} {{ messages[1:]|map(attribute='content')|join(', ') }} {{ 'a' ~ 1 }} {{ '{:>3}'.format(7) }}"
        " {{ strftime_now('%d %b %Y') }}"
    )
    for _ in range(200):
        text, spans = template.render_with_spans({"messages": MESSAGES})

    assert text == ('01<USER>Hi first[{"role": "user", "content": "hi"}]02<ASSISTANT>Ho ho a1   7 02 Jan 2026')
    assert [text[start:end] for start, end in spans] == ['[{"role": "user", "content": "hi"}]']


def test_members_of_dictionaries_are_found_as_jinja2_finds_them() -> None:
    source = (
        "{{ row.role }}|{{ row.missing is defined }}|{{ row.missing or 'none' }}|"
        "{% for k, v in row.items() %}{{ k }} {% endfor %}|{{ row.items is callable }}"
        "|{{ row['items'] }}|{{ row.get('role') }}|{{ row.__class__ is defined }}"
    )
    row = {"role": "user", "items": "a member"}

    written = code(source).render({"row": row})

    assert written == ImmutableSandboxedEnvironment().from_string(source).render(row=row)
    assert written == "user|False|none|role items |True|a member|user|False"


def test_a_conversation_of_thousands_of_turns_has_room() -> None:
    template = code(
        "{% for m in messages %}{% if loop.index == messages|length or m.role == 'user' %}"
        "{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endif %}{% endfor %}",
        max_steps=2**20,
    )
    text = template.render({"messages": [{"role": "user", "content": "x" * 100}] * 20_000})
    assert text.count("<|im_start|>") == 20_000


def test_what_is_no_template_or_too_long_for_one_is_said_when_it_is_read() -> None:
    for source in (
        "{% for %}",
        "(" * 99999,
        "{{ " + "(" * 9999 + "1" + ")" * 9999 + " }}",
        "x" * (MAX_SOURCE_CHARACTERS + 1),
    ):
        if source.startswith("("):
            assert code(source).render({}) == source
            continue
        with pytest.raises(TemplateError):
            code(source)
