"""Chat templates end, whatever they do, and leave nothing behind."""

from __future__ import annotations

import resource
import signal
import threading
from datetime import date
from typing import Any

import pytest
from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from isotype.compat import templates
from isotype.compat.templates import LimitedEnvironment, render_chat

TURNS = [{"role": "user", "content": "a"}]
LOOPS = "{% for i in range(100000) %}{% for j in range(100000) %}BODY{% endfor %}{% endfor %}"


class Tokenizer:
    """Renders as tokenizers of transformers do."""

    def __init__(self, template: str) -> None:
        self.template = template

    def apply_chat_template(self, turns: Any, **arguments: Any) -> str:
        from transformers.utils.chat_template_utils import render_jinja_template

        return str(render_jinja_template([turns], chat_template=self.template, **arguments)[0][0])


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ 1/0 }}", "ZeroDivisionError: division by zero"),
        ("{% include 'x' %}", "TypeError: no loader for this environment specified"),
        ("{{ messages[0].content + messages }}", 'TypeError: can only concatenate str (not "list") to str'),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "its loops or calls are nested too deeply"),
        (
            "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}",
            "it runs for more than 0.1 seconds",
        ),
        (LOOPS.replace("BODY", "{% set x = j %}"), "it runs for more than 0.1 seconds"),
        (LOOPS.replace("BODY", "{{ j }}" * 20), "it writes more than 10,000 characters"),
        (
            "{% for i in range(10000000000) %}{% endfor %}",
            "OverflowError: Range too big. The sandbox blocks ranges larger than MAX_RANGE (100000).",
        ),
        ("{{ ('a' * 10**12)|length }}", "it takes more than 1 GiB of memory"),
        ("{{ 'a'|center(1000000000000)|length }}", "it takes more than 1 GiB of memory"),
        ("{{ 9**(9**9) }}", "it computes a number of more than 100000 bits"),
        ("{{ raise_exception('no system') }}", "no system"),
        ("{{ a.b }}", "'a' is undefined"),
        ("a\n{{ messages[0 }}", "line 2: unexpected '}', expected ']'"),
        ("a\nb\n{{ a|unknown }}", "line 3: No filter named 'unknown'."),
        ("{% break %}", "it cannot be compiled: 'break' outside loop"),
        (
            "{% for a in messages %}" * 22 + "{% endfor %}" * 22,
            "it cannot be compiled: too many statically nested blocks",
        ),
    ],
)
def test_a_template_that_fails_or_runs_on_is_an_error(template, message, monkeypatch):
    monkeypatch.setattr(templates, "SECONDS", 0.1)
    monkeypatch.setattr(templates, "CHARACTERS", 10_000)
    threads = threading.active_count()
    with pytest.raises(TemplateError) as caught:
        render_chat(Tokenizer(template), TURNS)
    assert str(caught.value) == message
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    assert signal.getsignal(signal.SIGALRM) == signal.SIG_DFL
    assert resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY
    assert threading.active_count() == threads


def test_a_sound_template_writes_what_it_wrote():
    template = (
        "{% for m in messages %}{{ loop.index * 2 }}{{ m.role ~ '=' ~ m.content }} {% endfor %}{{ 2**3 }}"
    )
    assert render_chat(Tokenizer(template), [*TURNS, *TURNS]) == "2user=a 4user=a 8"
    marked = "{% generation %}{{ 'b' * 3 }}{% endgeneration %}"
    from transformers.utils.chat_template_utils import render_jinja_template

    text, spans = render_jinja_template([TURNS], chat_template=marked, return_assistant_tokens_mask=True)
    assert (text, spans) == (["bbb"], [[(0, 3)]])


def test_a_day_that_is_held_is_written_and_let_go():
    template = "{{ strftime_now('%d %b %Y') }} {{ strftime_now(format='%H:%M') }}"
    with templates.day_held(date(2024, 7, 26)):
        assert render_chat(Tokenizer(template), TURNS) == "26 Jul 2024 00:00"
    assert "2024" not in render_chat(Tokenizer(template), TURNS)


def test_templates_still_run_without_an_end():
    from transformers.utils import chat_template_utils as theirs

    templates.limit_templates()
    assert issubclass(LimitedEnvironment, ImmutableSandboxedEnvironment)
    assert isinstance(theirs._compile_jinja_template("{{ 1 }}").environment, LimitedEnvironment)
    assert not ImmutableSandboxedEnvironment.intercepted_binops
