"""Chat templates of transformers (5.20 to 5.24): limits of time, memory and text, and the date that they write."""

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

from jinja2 import TemplateError, TemplateRuntimeError, TemplateSyntaxError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from isotype.compat.replaced import replaced

SECONDS = 5
"""Maximum processor time for rendering one conversation."""
BYTES = 1 << 30
"""Maximum memory for rendering one conversation (Linux only)."""
CHARACTERS = 1 << 24
"""Maximum length of a conversation's text: about four million tokens."""
BITS = 100_000
"""Maximum size of an integer. A product of larger integers takes seconds, and no signal can interrupt it."""

CLOCK = "strftime_now"
"""Name of the function with which a template writes today's date."""

ERRORS = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""Errors of Python in templates, besides jinja's own errors."""


class LimitedEnvironment(ImmutableSandboxedEnvironment):
    """jinja's sandbox with limits of time, memory and text."""

    intercepted_binops = frozenset({"*", "**"})
    day: date | None = None
    """The date of `strftime_now`; None for the current date."""

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Return `left operator right`. Raise TemplateRuntimeError if it is an integer with too many bits."""
        if isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
            if bits > BITS:
                raise TemplateRuntimeError(f"it computes a number of more than {BITS} bits")
        return super().call_binop(context, operator, left, right)

    def from_string(self, *args: Any, **kwargs: Any) -> Any:
        """Compile a template. Limits of time and memory hold while it is compiled and while it is rendered."""
        clock: Any = self.globals.get(CLOCK)
        if clock is not None:
            self.globals[CLOCK] = partial(_written, clock)
        try:
            with _limits():
                template = super().from_string(*args, **kwargs)
        except TemplateSyntaxError as error:
            raise TemplateError(f"line {error.lineno}: {error.message}") from error
        except SyntaxError as error:  # in the Python code that jinja generates: 21 nested loops are too many
            raise TemplateError(f"it cannot be compiled: {error.msg}") from error
        template.root_render_func = partial(_limited, template.root_render_func)
        return template


def _written(clock: Callable[[str], str], format: str) -> str:  # noqa: A002 - its name in templates
    day = LimitedEnvironment.day
    return clock(format) if day is None else day.strftime(format)


def _limited(render: Callable[[Any], Iterator[str]], context: Any) -> Iterator[str]:
    length = 0
    with _limits():
        for piece in render(context):
            length += len(piece)
            if length > CHARACTERS:
                raise TemplateRuntimeError(f"it writes more than {CHARACTERS:,} characters")
            yield piece


@contextmanager
def _limits() -> Iterator[None]:
    try:
        with _time_limit(), _memory_limit():
            yield
    except MemoryError:
        raise TemplateRuntimeError(f"it takes more than {BYTES >> 30} GiB of memory") from None
    except RecursionError:
        raise TemplateRuntimeError("its loops or calls are nested too deeply") from None


@contextmanager
def _time_limit() -> Iterator[None]:
    """Raise TemplateRuntimeError if a template takes too long. Only Python's main thread can limit the time."""
    start = time.thread_time()

    def expired(*_: Any) -> None:
        if time.thread_time() - start > SECONDS:
            raise TemplateRuntimeError(f"it runs for more than {SECONDS} seconds")

    with ExitStack() as after:
        if threading.current_thread() is threading.main_thread() and hasattr(signal, "setitimer"):
            after.callback(signal.signal, signal.SIGALRM, signal.signal(signal.SIGALRM, expired))
            timer = signal.setitimer(signal.ITIMER_REAL, SECONDS, SECONDS / 10)
            after.callback(signal.setitimer, signal.ITIMER_REAL, *timer)
        yield


@contextmanager
def _memory_limit() -> Iterator[None]:
    """In the `with` block, Python raises MemoryError if this process allocates more than `BYTES` (Linux only)."""
    if not sys.platform.startswith("linux"):
        yield
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = int(Path("/proc/self/statm").read_bytes().split()[0]) * resource.getpagesize() + BYTES
    if soft != resource.RLIM_INFINITY and soft < limit:
        limit = soft
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def limit_templates() -> None:
    """Limit every chat template that transformers compiles after this call."""
    from transformers.utils import chat_template_utils as theirs

    if theirs.ImmutableSandboxedEnvironment is not LimitedEnvironment:
        theirs.ImmutableSandboxedEnvironment = LimitedEnvironment
        theirs._compile_jinja_template.cache_clear()


def day_held(day: date) -> AbstractContextManager[None]:
    """In the `with` block, chat templates write `day` (time 00:00) in place of the current date."""
    return replaced(LimitedEnvironment, "day", day)


def writes_date(tokenizer: Any) -> bool:
    """Return whether the chat template of a tokenizer or processor can write the date."""
    return CLOCK in str(getattr(tokenizer, "chat_template", None))


def render_chat(tokenizer: Any, turns: Any, **arguments: Any) -> Any:
    """Return the result of `tokenizer.apply_chat_template`. Raise TemplateError if the template fails."""
    limit_templates()
    try:
        return tokenizer.apply_chat_template(turns, **arguments)
    except ERRORS as error:
        raise TemplateError(f"{type(error).__name__}: {error}") from error


def template_source(tokenizer: Any) -> str:
    """Return the path of a tokenizer's chat template; the tokenizer's name if there is no file."""
    folder = Path(tokenizer.name_or_path)
    names = ("chat_template.jinja", "chat_template.json", "tokenizer_config.json")
    return next((str(folder / name) for name in names if (folder / name).is_file()), str(folder))
