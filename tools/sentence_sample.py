"""Draw sentences at random for a reading test: a reader rates every sentence "read once" or "read twice".

python -m tools.sentence_sample --seed 7              # 40 sentences of pages, docstrings and messages
python -m tools.sentence_sample --seed 7 --count 20
python -m tools.sentence_sample --under src/isotype/trace    # all of a folder or a file, in order
python -m tools.sentence_sample --seed 7 --beside peft trl --places build/places.txt    # mixed with other libraries' sentences
python -m tools.sentence_sample --seed 7 --context    # each with what stands around it in the file

The reader sees a sentence with its file, its line and its function, and may not open the file. A sentence that needs a second reading
is rewritten, and so are its like. Then another person reads another sample.

With `--context`, the reader also sees what every reader of the file sees: the signature of the function, and the sentence before.

Readers differ in how strict they are. With `--beside`, as many sentences of other libraries' docstrings and messages are mixed in,
shuffled and printed without their places, so that a reader judges both by the same bar; `--places` gets the places.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

from tools.sources import ROOT, Module, Sources, read_sources

_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z`*])")
_PART = re.compile(r"\n\s*\n|^\s*(?:[-*]|\d+\.)\s+|^(?=    \**\w+: )", re.MULTILINE)
_PATTERN = re.compile(r"\\|\(\?")
_CODE = re.compile(r"^( *)```.*?^\1```", re.DOTALL | re.MULTILINE)
_EXAMPLE = re.compile(r"(?<=\n\n)(?: {4,}\S.*\n?|\n)+")
_SKIPPED = ("|", "#", "<")
_LINK = re.compile(r">>>|http|\[`|<Tip")
_LEAST_WORDS = 5


@dataclass(frozen=True)
class Sentence:
    """A sentence with its place: `where` is path and line, `holder` the page, function, class or module around it.

    `signature` is the function's or class's, "" for others; `before` is the sentence before in the same paragraph, "" for the first.
    """

    kind: str
    where: str
    holder: str
    text: str
    signature: str = ""
    before: str = ""


def sentences(sources: Sources) -> list[Sentence]:
    """Return all sentences of five words or more in docstrings, messages, README, CONTRIBUTING and docs."""
    drawn = [sentence for module in sources.modules.values() for sentence in _in_module(module, ROOT)]
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))):
        drawn += _in_page(str(page.relative_to(ROOT)), page.read_text(encoding="utf-8"))
    return drawn


def _in_module(module: Module, root: Path) -> Iterator[Sentence]:
    path = str(module.path.relative_to(root))
    no_message: set[int] = set()
    for node in module.nodes:
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
            holder = module.name if isinstance(node, ast.Module) else node.name
            match node.body[:1]:
                case [ast.Expr(value=ast.Constant(value=str(text)) as alone)]:
                    no_message.add(id(alone))
                    prose = _EXAMPLE.sub(_blank, inspect.cleandoc(text))
                    for sentence in _split("docstring", path, alone.lineno, holder, prose):
                        yield replace(sentence, signature=_signature(node))
        elif isinstance(node, ast.JoinedStr):
            no_message |= {id(part) for part in node.values}
    for node in module.nodes:
        match node:
            case ast.JoinedStr() | ast.Constant(value=str()) if id(node) not in no_message:
                yield from _split("message", path, node.lineno, module.name, _written(node))


def _signature(node: ast.Module | ast.ClassDef | ast.FunctionDef) -> str:
    """Return the line that a function or class begins with; "" for a module."""
    match node:
        case ast.FunctionDef():
            returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
            return f"def {node.name}({ast.unparse(node.args)}){returns}"
        case ast.ClassDef():
            return f"class {node.name}({', '.join(map(ast.unparse, node.bases))})"
        case _:
            return ""


def _written(node: ast.expr) -> str:
    """Return the text of a string; of an f-string with the expressions of its values in braces."""
    match node:
        case ast.Constant():
            return str(node.value)
        case ast.JoinedStr():
            return "".join(map(_written, node.values))
        case ast.FormattedValue():
            return f"{{{ast.unparse(node.value)}}}"
        case _:
            raise TypeError(f"not a string: {ast.unparse(node)}")


def _in_page(path: str, text: str) -> Iterator[Sentence]:
    return _split("page", path, 1, path, _CODE.sub(_blank, text))


def _blank(code: re.Match[str]) -> str:
    """Return as many empty lines as the code has lines, so that the lines after it keep their numbers."""
    return "\n" * code.group().count("\n")


def _split(kind: str, path: str, line: int, holder: str, text: str) -> Iterator[Sentence]:
    place = 0
    for part in _PART.split(text):
        place = text.index(part, place)
        if part.startswith(_SKIPPED) or (kind == "message" and _PATTERN.search(part)):
            continue
        before = ""
        for sentence in _END.split(re.sub(r"\s+", " ", part).strip()):
            if len(sentence.split()) >= _LEAST_WORDS:
                where = f"{path}:{line + text.count(chr(10), 0, place)}"
                yield Sentence(kind, where, holder, sentence, before=before)
            before = sentence


def of_library(name: str) -> list[Sentence]:
    """Return the sentences of the docstrings and messages of an installed library."""
    spec = find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(f"--beside {name}: no package of this name is installed")
    folder = Path(spec.submodule_search_locations[0])
    read: list[Sentence] = []
    for path in sorted(folder.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        dotted = ".".join(path.relative_to(folder.parent).with_suffix("").parts)
        read += _in_module(Module(dotted, path, text, ast.parse(text)), folder.parent)
    return read


def _mixed(ours: list[Sentence], others: Sequence[str], chance: random.Random, count: int) -> list[Sentence]:
    """Return `count` of our sentences and `count` of the other libraries', without pages, links and doctests, shuffled."""
    theirs = [sentence for name in others for sentence in of_library(name)]
    drawn = []
    for group in (ours, theirs):
        prose = [
            sentence for sentence in group if sentence.kind != "page" and not _LINK.search(sentence.text)
        ]
        drawn += chance.sample(prose, count)
    chance.shuffle(drawn)
    return drawn


def _unnamed(sentence: Sentence, libraries: Sequence[str]) -> Sentence:
    """Return the sentence without its place and the names of the libraries, which would tell a reader where it is from."""
    text, signature, before = (
        re.sub("|".join(libraries), "library", part, flags=re.IGNORECASE)
        for part in (sentence.text, sentence.signature, sentence.before)
    )
    holder = sentence.holder.split(".")[-1]
    return Sentence(sentence.kind, "a library", holder, text, signature, before)


def main() -> None:
    """Print `--count` sentences that `--seed` draws, or without it all `--under` a path."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seed", type=int)
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--under", default="")
    parser.add_argument("--beside", nargs="+", default=[], metavar="LIBRARY")
    parser.add_argument("--places", type=Path)
    parser.add_argument("--context", action="store_true")
    chosen = parser.parse_args()
    if chosen.beside and (chosen.seed is None or chosen.places is None):
        parser.error("--beside needs --seed and --places")
    drawn = [sentence for sentence in sentences(read_sources()) if sentence.where.startswith(chosen.under)]
    if chosen.beside:
        drawn = _mixed(drawn, chosen.beside, random.Random(chosen.seed), chosen.count)
        places = "".join(f"{number} {sentence.where}\n" for number, sentence in enumerate(drawn, 1))
        chosen.places.write_text(places, encoding="utf-8")
        drawn = [_unnamed(sentence, ["isotype", *chosen.beside]) for sentence in drawn]
    elif chosen.seed is not None:
        drawn = random.Random(chosen.seed).sample(drawn, min(chosen.count, len(drawn)))
    for number, sentence in enumerate(drawn, 1):
        print(f"{number:3}. {sentence.kind} in {sentence.where} ({sentence.holder})")
        if chosen.context:
            around = (sentence.signature, sentence.before)
            print(*(f"     | {line}\n" for line in around if line), sep="", end="")
        print(f"     {sentence.text}\n")


if __name__ == "__main__":
    main()
