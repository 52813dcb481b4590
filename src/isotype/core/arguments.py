"""A command-line parser that reports all invalid arguments in one error, and suggests similar valid ones."""

import argparse
import difflib
import math
import re
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from importlib import import_module
from itertools import takewhile
from pathlib import Path
from typing import Any, NoReturn, Self

from isotype.compat.standard import ValueParser, actions_of
from isotype.core.errors import IsotypeError, Problem, UsageError
from isotype.core.tables import table

_TABLES, COMMANDS = table(__file__), table(__file__, "commands.json")
"""Names and values that users know from other libraries and earlier versions, and the arguments of isotype's commands."""
_OTHER_NAMES = {
    other: names.split() for names, others in _TABLES["names"].items() for other in others.split()
}
"""Maps a short name, or a name of another library, to names of isotype's arguments. A command has at most one of these arguments."""
_ELSEWHERE = frozenset({*_OTHER_NAMES, *(name for names in _TABLES["names"] for name in names.split())})
"""Names with a known meaning. For such a name, isotype does not suggest an argument that is only spelled similarly."""
_OTHER_VALUES: Mapping[str, str] = _TABLES["values"]
_SWITCHES: Mapping[str, str] = {
    other: words for words, others in _TABLES["switches"].items() for other in others.split()
}
"""Maps a `flag` (alone or with the value True) or `flag=value` of another library to isotype's arguments."""
RENAMED: Mapping[str, Sequence[str]] = _TABLES["renamed"]
"""Maps a former name to (current name, equivalent value). The equivalent value is "" if the value after the former name stays valid."""
REMOVED: Mapping[str, str] = _TABLES["removed"]
"""Maps the name of a removed argument to advice on what to write instead."""
_KINDS = {
    "int": ("a whole number", "8"),
    "float": ("a number", "0.1"),
    "string_to_bool": ("True or False", "True"),
    "Path": ("a path", "VALUE"),
    "image_size": ("a size in pixels", "1024x768"),
}
"""Maps the name of an argument's type to (a description of the expected value, an example)."""
_BOOLEANS = {"on": "True", "true": "True", "yes": "True", "off": "False", "false": "False", "no": "False"}
_OF_ARGUMENT = re.compile(r"argument ([^:\s]+)(?: \S+)?: (.*)", re.DOTALL)


class Parser(ValueParser):
    """An argparse parser that collects invalid values in `problems`, and does not stop at the first invalid value.

    `parse_args` raises one error that lists all problems. After `parse_known_args`, the caller has to check `problems`.
    Names cannot be abbreviated.
    """

    problems: list[Problem]
    stray: Callable[[str], str] = staticmethod(lambda value: "")
    """Return the name of the argument to which a value without a name most likely belongs, or ""."""
    _command_line: tuple[str, ...] = ()

    @classmethod
    def of(cls, command: str) -> Self:
        parser = cls.described(command)
        add_arguments(parser, command)
        return parser

    @classmethod
    def described(cls, command: str) -> Self:
        """Return a parser with the description of a command in commands.json, but without arguments."""
        settings = {n: v for n, v in COMMANDS[command].items() if n not in ("arguments", "stray", "training")}
        for name, text in settings.items():
            if isinstance(text, list):  # lines
                settings = {**settings, name: "\n".join(text)}
                settings["formatter_class"] = argparse.RawDescriptionHelpFormatter
        parser = cls(prog=f"isotype {command}", **settings)
        parser.stray = lambda value: COMMANDS[command].get("stray", "")
        return parser

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # With argparse's abbreviations, a typo sets another argument: --learning_rat 3 set the learning rate to 3.
        super().__init__(*args, **{"allow_abbrev": False, **kwargs})

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse known arguments like argparse, and collect a problem for each invalid value in `problems`."""
        self.problems = []
        return super().parse_known_args(args, namespace)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse like argparse. Raise one UsageError that lists all invalid arguments."""
        self._command_line = tuple(sys.argv[1:] if args is None else args)
        parsed, unknown = self.parse_known_args(args, namespace)
        self.refuse([*self.problems, *self.unknown(unknown)])
        return parsed

    def refuse(self, problems: Sequence[Problem]) -> None:
        if problems:
            hint = f"{self.prog} --help lists the arguments"
            raise UsageError("invalid arguments", problems, hint)

    def error(self, message: str) -> NoReturn:
        """Raise UsageError for a missing value or argument. argparse stops parsing after this error."""
        known = {name for action in actions_of(self) for name in action.option_strings}
        named = (token for token in self._command_line if re.match("--?[A-Za-z]", token))
        unknown = self.unknown([token for token in named if token.partition("=")[0] not in known])
        *_, missing = message.partition("are required: ")
        values = [name.upper() for name in missing.split(", ") if not name.startswith("-")]
        flags = [name.split("/") for name in missing.split(", ") if name.startswith("-")]
        typed = () if unknown else self._command_line
        options = [f"{names[0]} {names[-1].lstrip('-').upper()}" for names in flags]
        fix = " ".join([self.prog, *values, *typed, *options]) if missing else f"see {self.prog} --help"
        # The first words are values, as in `isotype merge ADAPTER OUTPUT --dtype bfloat16`.
        first, swap = [*takewhile(lambda word: not word.startswith("-"), typed)], None
        if flags and not values and len(first) > 1:
            swap = (first[-1:], (flags[0][0], first[-1]))
            fix = " ".join([self.prog, *first[:-1], *swap[1], *typed[len(first) :]])
        problem = Problem(message, "all arguments that the command needs", fix, swap)
        if about := _OF_ARGUMENT.match(message):
            name = about[1].split("/")[0]
            problem = Problem(f"{name}: {about[2]}", "the argument with its value", f"{name} VALUE")
        required = {name for names in flags for name in names}
        certain = any(other.swap and not {*other.swap[1]} - required for other in unknown)
        self.refuse([*self.problems, *unknown, *([] if certain else [problem])])
        raise AssertionError(message)

    def unknown(self, tokens: Sequence[str]) -> list[Problem]:
        """Return a problem for each unknown argument and each value without an argument."""
        flags = [token for token in tokens if re.match(r"--[A-Za-z0-9]|-[A-Za-z]", token)]
        # If a name is unknown, the tokens after it are most likely its values.
        stray = [] if flags else [token for token in tokens if token]
        named = [action.option_strings for action in actions_of(self) if action.option_strings]
        known = [next((name for name in names if name.startswith("--")), names[0]) for names in named]
        positional = [action.dest for action in actions_of(self) if not action.option_strings]
        problems = [
            Problem(token, f"{positional[0].upper()} without a flag", f"omit {token}", ((token,), ()))
            if {(bare := _bare(token)), *_OTHER_NAMES.get(bare, ())} & {*positional}
            else self._unknown(tokens, token, known)
            for token in flags
        ]
        return [*problems, *map(self._stray, stray)]

    def _unknown(self, tokens: Sequence[str], token: str, known: Sequence[str]) -> Problem:
        name, value = name_and_value(tokens, token)
        problem = unknown_name(name, value, known, f"{self.prog} --help")
        flag = self.stray(value) if len(_bare(name)) == 1 and value else ""
        if flag and problem.swap is None:  # such as -d train.jsonl
            return Problem(name, f"a known name: {flag}", f"{flag} {value}", ((name,), (flag,)))
        return problem

    def _stray(self, value: str) -> Problem:
        name = self.stray(value)
        expected, fix = "the name of an argument before each value", f"{name} {value}"
        if name:
            return Problem(value, expected, fix, ((value,), (name, value)))
        return Problem(value, expected, "omit the value, or write the name of its argument before it")

    def wrong_value(self, action: argparse.Action, value: Any) -> Any:
        if not isinstance(value, _Wrong):
            self.problems.append(_wrong_value(action, value))
        return _Wrong()


def add_arguments(parser: argparse.ArgumentParser, command: str, **choices: Iterable[str]) -> None:
    """Add the arguments of a command to a parser. commands.json describes each argument:

    - `exclusive`: a call may contain only one of the arguments that have the key `exclusive`.
    - `choices`: valid values.
    - `choices_of`: a table in `isotype.core`. Its entries are also valid values.

    `choices` adds valid values from tables of other packages, as a dictionary: argument -> values.
    """
    group: Any = None
    for names, described in COMMANDS[command]["arguments"].items():
        keywords: dict[str, Any] = {n: tuple(v) if isinstance(v, list) else v for n, v in described.items()}
        exclusive, table = keywords.pop("exclusive", False), keywords.pop("choices_of", "")
        if "type" in keywords:
            keywords["type"] = _TYPES[keywords["type"]]
        if table:
            module, name = table.split(".")
            entries = getattr(import_module(f"isotype.core.{module}"), name)
            keywords["choices"] = (*entries, *keywords.get("choices", ()))
        elif (name := names.lstrip("-")) in choices:
            keywords["choices"] = tuple(choices[name])
        if exclusive:
            group = group or parser.add_mutually_exclusive_group()
        (group if exclusive else parser).add_argument(*names.split(), **keywords)


def image_size(text: str) -> tuple[int, int]:
    """Parse a text such as `1024x768` to (width, height). Raise ValueError if the text is not a size."""
    width, _, height = text.lower().replace("×", "x").partition("x")
    if min(sides := (int(width), int(height))) < 1:
        raise ValueError(text)
    return sides


_TYPES: Mapping[str, Callable[[str], Any]] = {
    "int": int,
    "float": float,
    "Path": Path,
    "image_size": image_size,
}


class _Wrong:
    """Placeholder for a value that could not be parsed."""


def _wrong_value(action: argparse.Action, value: Any) -> Problem:
    name = action.option_strings[0] if action.option_strings else action.dest
    argument = f"{name} {value}"
    if action.choices:
        return wrong_choice(argument, str(value), map(str, action.choices))
    expected, example = _KINDS.get(getattr(action.type, "__name__", ""), ("another value", "VALUE"))
    return wrong_number(name, str(value), expected, example)


def did_you_mean(
    wanted: str,
    known: Iterable[str],
    otherwise: str,
    n: int = 3,
    cutoff: float = 0.6,
    shown: Callable[[str], str] = str,
) -> str:
    """Return "did you mean …?" with up to `n` similar known names, or `otherwise` if no known name is similar."""
    near = difflib.get_close_matches(wanted, list(known), n, cutoff)
    return f"did you mean {' or '.join(map(shown, near))}?" if near else otherwise


def unknown_name(name: str, value: Any, known: Sequence[str], listing: str) -> Problem:
    """Return the `Problem` for a name that is not in `known`. The command `listing` prints the known names."""
    names = {_bare(known_name) for known_name in known}
    text = str(value) if isinstance(value, (str, int, float)) else ""
    former = renamed(name, names, text)
    if former is not None:
        return former
    (meant, certain), valued = closest(name, known), _SWITCHES.get(f"{_bare(name)}={text.lower()}", "")
    switch = (valued or _SWITCHES.get(_bare(name), "")).split()
    if _OTHER_NAMES.get(_bare(name)) == ["devices"] and not meant:
        fix = f"torchrun --nproc_per_node {text or 'N'} -m {listing.removesuffix(' --help')} …"
        return Problem(name, "arguments without the number of processes", fix)
    if switch and _bare(switch[0]) in names and (valued or text.lower() in ("", "true")):
        old = (name, text) if text else (name,)
        return Problem(" ".join(old), "a known name", " ".join(switch), (old, switch))
    expected = f"a known name: {', '.join(meant)}" if meant else "a known name"
    swap = ((name,), (meant[0],)) if certain and not switch else None
    return Problem(name, expected, f"did you mean {meant[0]}?" if meant else f"see {listing}", swap)


def wrong_number(name: str, value: str, expected: str, example: Any) -> Problem:
    """Return the `Problem` for a value that is no number or boolean. The fix for `2e-4,`, `1.5` or `off` is the value that is meant."""
    text, swap = value.strip(" ,;'\""), None
    whole = expected == _KINDS["int"][0]
    if whole:  # a comma in other numbers may be a decimal comma
        text = re.sub(r",(?=\d{3}\b)", "", text)
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if number.is_integer() if whole else math.isfinite(number) and expected == _KINDS["float"][0]:
        example = int(number) if whole else text
        swap = ((name, value), (name, str(example)))
    elif whole and math.isfinite(number):
        example = math.ceil(number)
    elif expected == _KINDS["string_to_bool"][0] and text.lower() in _BOOLEANS:
        example = _BOOLEANS[text.lower()]
        swap = ((name, value), (name, example))
    return Problem(f"{name} {value}", expected, f"{name} {example}", swap)


def wrong_size(name: str, value: str) -> Problem:
    """Return the `Problem` for a value that is not an amount of memory. The fix assumes that a number without a unit means GiB."""
    number = value if re.fullmatch(r"[1-9]\d{0,3}(\.\d+)?", value) else "20"
    return Problem(f"{name} {value}", "an amount of memory with its unit", f"{name} {number}GiB")


def usual_value(value: str) -> str:
    """Return isotype's value for a value of another library (`nf4` for `int4`). For other values, return the value in lower case."""
    return _OTHER_VALUES.get(value.lower().replace("-", "").replace("_", ""), value.lower())


def wrong_choice(what: str, value: str, choices: Iterable[str]) -> Problem:
    """Return the `Problem` for a value that is not in `choices`. The fix names the most similar choices."""
    known = list(choices)
    lower = {choice.lower(): choice for choice in known}
    other = usual_value(value)
    similar = partial(difflib.get_close_matches, value.lower(), lower, n=2)
    longer = [choice for choice in lower if value and choice.startswith(value.lower())]
    same = [value.lower()] if value.lower() in lower else []
    near = same or similar(cutoff=0.8) or longer[:2] or similar(cutoff=0.5)
    meant = [other] if other in known else [lower[name] for name in near]
    fix = f"did you mean {' or '.join(meant)}?" if meant else "give one of these"
    flag = what.removesuffix(f" {value}")
    certain = len(meant) == 1 and (other in known or similar(cutoff=0.8)) and flag.startswith("-")
    swap = ((flag, value), (flag, meant[0])) if certain else None
    return Problem(what, f"one of {', '.join(known)}", fix, swap)


def closest(name: str, known: Sequence[str]) -> tuple[list[str], bool]:
    """Return up to three known names that `name` may mean, and True if it certainly means the first of them.

    The order is: aliases, names that begin with `name`, similar names. The first name is certain if it is an alias, the
    only name that begins with `name`, or clearly the most similar name.
    """
    bare, wanted = {_bare(known_name): known_name for known_name in known}, _bare(name)
    if aliases := [other for other in (wanted, *_OTHER_NAMES.get(wanted, ())) if other in bare]:
        certain = True
    elif wanted in _ELSEWHERE:  # similar names have other meanings
        return [], False
    longer = sorted((other for other in bare if len(wanted) > 1 and other.startswith(wanted)), key=len)
    near = difflib.get_close_matches(wanted, bare, n=3, cutoff=0.7)
    if not aliases:
        ratios = [difflib.SequenceMatcher(None, other, wanted).ratio() for other in near]
        first, second, *_ = (*ratios, 0.0, 0.0)
        clear = first >= 0.85 and (second < 0.85 or first - second > 0.05)
        certain = (clear and near[0] == (longer or near)[0]) or (len(longer) == 1 and len(wanted) > 3)
    return [bare[other] for other in dict.fromkeys([*aliases, *longer, *near])][:3], certain


def _bare(name: str) -> str:
    return name.lstrip("-").replace("-", "_").lower()


def corrected(
    words: Sequence[str], problems: Sequence[Problem], parse: Callable[[list[str]], object]
) -> tuple[list[str] | None, list[Problem]]:
    """Correct the words of a command by the `swap` of each problem. Return (words, []), or (None, problems without a
    correction).

    Problems about words that a correction added are omitted. If a flag would occur twice in the words, the words are
    not returned.
    """
    line, added = separated(words), set[str]()
    for _ in range(4):  # one correction may show the next problem
        if not problems or not all(problem.swap and _swap(line, *problem.swap) for problem in problems):
            break
        added |= {word for problem in problems if problem.swap for word in problem.swap[1]}
        try:
            parse(line)
        except IsotypeError as error:
            problems = error.problems
        else:
            twice = any(line.count(word) > 1 for word in added if word.startswith("--"))
            return (None if twice else line), []
    return None, [problem for problem in problems if re.split("[: ]", problem.given)[0] not in added]


def separated(words: Sequence[str]) -> list[str]:
    """Return a command's words with each `--name=value` as two words."""
    line: list[str] = []
    for word in words:
        name, equals, value = word.partition("=")
        line += [name, value] if equals and name.startswith("--") and not value.startswith("-") else [word]
    return line


def _swap(line: list[str], old: Sequence[str], new: Sequence[str]) -> bool:
    """Replace the first `old` in the line by `new`. Return False if the line does not contain `old`."""
    size, lower = len(old), [word.lower() for word in old]
    for at in range(len(line)):
        if [word.lower() for word in line[at : at + size]] == lower:
            line[at : at + size] = new
            return True
    return False


def name_and_value(tokens: Sequence[str], flag: str) -> tuple[str, str]:
    """Return the name and the value of an unknown flag. The value is the text after `=`, or else the next token, or else ""."""
    name, equals, value = flag.partition("=")
    after = tokens[tokens.index(flag) + 1 :][:1]
    return name, value if equals else "".join(token for token in after if not token.startswith("-"))


def renamed(flag: str, names: Collection[str], asked: str = "") -> Problem | None:
    """Return the `Problem` for an argument that transformers or TRL renamed or removed (`--no-cuda`); None for other
    arguments.

    `asked` is the value of the argument on the command line or in a file. The fix contains `asked` if this value is
    still valid.
    """
    old, typed = _bare(flag), (flag, asked) if asked else (flag,)
    new, value = RENAMED.get(old, ("", ""))
    if old in names:
        return None
    if new in names:
        if value and asked.lower() in ("false", "no", "0"):
            return Problem(f"{flag} {asked}: removed", f"--{new} if it is true", "omit it", (typed, ()))
        word = value or asked
        certain = word and not {*" '/"} & {*word} and (not value or asked.lower() in ("", "true"))
        swap = (typed, (f"--{new}", word)) if certain else None
        expected = f"the name in transformers 5 and TRL 1: --{new}"
        return Problem(f"{flag}: renamed", expected, f"--{new} {word or 'VALUE'}", swap)
    if fix := REMOVED.get(old):
        expected = "an argument that transformers 5 or TRL 1 has"
        return Problem(f"{flag}: removed", expected, fix, (typed, ()) if fix.startswith("omit") else None)
    return None
