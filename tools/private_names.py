"""Private names of other libraries outside `compat/`: a step of `make test` that refuses them.

python -m tools.private_names

A name is private where it begins with one underscore. It is another library's where

- an import names it (`from torch._subclasses import …`, `import torch._dynamo`), or a chain of names that begins with an import
  (`torch._C._nn`), or a text that is such a chain (`find_spec("torch._dynamo")`),
- an attribute is read, set or asked for by `getattr` that no class of this package has (`tensor._version`), or a text is the name of one
  that `compat/` reads,
- a method of that name is overridden: `super()._save_checkpoint(…)` where no class of ours above has one, or a class with a base from
  elsewhere has a private method that nothing here calls.

Not counted: operators (`torch.ops.aten._softmax` is a name of the dispatcher's, and data here), `os._exit`, and what named tuples
document (`_replace`, `_asdict`, `_fields`, `_make`).
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache

from tools.sources import PACKAGE, ROOT, Module, Sources, dotted_name, read_sources

HOME = f"{PACKAGE}.compat"
_PRIVATE = re.compile(r"_[^_]\w*")
_PUBLIC = frozenset({"_replace", "_asdict", "_fields", "_make"})
_DOCUMENTED = frozenset({"os._exit"})
_BY_TEXT = frozenset({"getattr", "setattr", "hasattr", "delattr"})
_LIBRARIES = (
    "torch",
    "transformers",
    "trl",
    "peft",
    "bitsandbytes",
    "accelerate",
    "huggingface_hub",
    "datasets",
)
_CHAIN = re.compile(rf"(?:{'|'.join(_LIBRARIES)})(?:\.\w+)+")


@dataclass(frozen=True, order=True)
class PrivateName:
    """One use: where it stands and what it names, `torch._C._nn` or `._version`."""

    module: str
    line: int
    name: str


def private_names(sources: Sources) -> list[PrivateName]:
    """Every use outside of `compat/`, in the order of files and lines."""
    ours = _defined(sources)
    known = _named_in_compat(sources)
    return sorted(
        {
            PrivateName(module.name, line, name)
            for module in sources.modules.values()
            if not _is_home(module)
            for line, name in _uses(module, sources, ours, known)
        }
    )


def _is_private(name: str) -> bool:
    return _PRIVATE.fullmatch(name) is not None and name not in _PUBLIC and not name.startswith(f"_{PACKAGE}")


def _foreign(dotted: str) -> bool:
    """Whether a dotted name leads into another library and through a private part of it."""
    first, *rest = dotted.split(".")
    if first == PACKAGE or dotted.startswith("torch.ops.") or dotted in _DOCUMENTED:
        return False
    return any(map(_is_private, rest))


def _defined(sources: Sources) -> frozenset[str]:
    """Private names that classes of this package give: their methods, and what their bodies and `self` are given."""
    names: set[str] = set()
    for known in sources.classes.values():
        names |= {name for part in known.node.body for name in _assigned(part)}
        for node in ast.walk(known.node):
            match node:
                case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                    names.add(name)
                case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
                    names.add(name)
    overridden = {
        name[1:] for module in sources.modules.values() for _, name in _all_overrides(module, sources)
    }
    return frozenset(filter(_is_private, names)) - overridden


def _assigned(node: ast.stmt) -> list[str]:
    targets = (
        node.targets
        if isinstance(node, ast.Assign)
        else [node.target]
        if isinstance(node, ast.AnnAssign)
        else []
    )
    return [part.id for target in targets for part in ast.walk(target) if isinstance(part, ast.Name)]


def _all_overrides(module: Module, sources: Sources) -> Iterator[tuple[int, str]]:
    for node in module.nodes:
        if isinstance(node, ast.ClassDef):
            yield from _overrides(node, module, sources)


def _named_in_compat(sources: Sources) -> frozenset[str]:
    """Private attributes that `compat/` reads or sets: elsewhere no text may name one."""
    nodes = (node for module in sources.modules.values() if _is_home(module) for node in module.nodes)
    return frozenset(
        node.attr if isinstance(node, ast.Attribute) else str(node.value)
        for node in nodes
        if (
            isinstance(node, ast.Attribute)
            and _is_private(node.attr)
            and dotted_name(node.value) not in ("torch", "torch.ops.aten")
        )
        or (isinstance(node, ast.Constant) and isinstance(node.value, str) and _is_private(node.value))
    )


def _is_home(module: Module) -> bool:
    return module.name == HOME or module.name.startswith(f"{HOME}.")


def _uses(
    module: Module, sources: Sources, ours: frozenset[str], known: frozenset[str]
) -> Iterator[tuple[int, str]]:
    docstrings = set(_docstrings(module))
    inner = {
        id(node.value)
        for node in module.nodes
        if isinstance(node, ast.Attribute) and dotted_name(node) is not None
    }
    yield from _all_overrides(module, sources)
    for node in module.nodes:
        match node:
            case ast.Import(names=aliases):
                yield from ((node.lineno, alias.name) for alias in aliases if _foreign(alias.name))
            case ast.ImportFrom(module=str(above), names=aliases, level=0):
                named = (f"{above}.{alias.name}" for alias in aliases)
                yield from ((node.lineno, name) for name in named if _foreign(name))
            case ast.Attribute(attr=attribute) if id(node) not in inner:
                yield from ((node.lineno, name) for name in _attribute(node, attribute, module, ours))
            case ast.Call(func=ast.Name(id=by), args=[_, ast.Constant(value=str(name)), *_]) if (
                by in _BY_TEXT
            ):
                if _is_private(name) and name not in ours:
                    yield node.lineno, f".{name}"
            case ast.Constant(value=str(text)) if id(node) not in docstrings:
                if _CHAIN.fullmatch(text) and _foreign(text):
                    yield node.lineno, text
                elif text in known and text not in ours:
                    yield node.lineno, f".{text}"


def _attribute(node: ast.Attribute, attribute: str, module: Module, ours: frozenset[str]) -> Iterator[str]:
    """The private names in a whole chain `a._b._c`, its last part included."""
    dotted = dotted_name(node)
    root = module.imports.get(dotted.split(".", 1)[0]) if dotted is not None else None
    if dotted is not None and root is not None:
        if not root.startswith(f"{PACKAGE}."):
            full = f"{root}.{dotted.split('.', 1)[1]}"
            if _foreign(full):
                yield full
        return
    first, *parts = dotted.split(".") if dotted is not None else ["", attribute]
    if first in _operator_namespaces(module):
        return
    yield from (f".{part}" for part in parts if _is_private(part) and part not in ours)


@cache
def _operator_namespaces(module: Module) -> frozenset[str]:
    """Names that a module gives to parts of `torch.ops`, as `aten`."""
    return frozenset(
        name
        for node in module.nodes
        if isinstance(node, ast.Assign) and (dotted_name(node.value) or "").startswith("torch.ops.")
        for name in _assigned(node)
    )


def _overrides(node: ast.ClassDef, module: Module, sources: Sources) -> Iterator[tuple[int, str]]:
    """Private methods of another library's that a class overrides."""
    functions = [part for part in node.body if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef)]
    methods = [method for method in functions if _is_private(method.name)]
    if not methods:
        return
    above = [name for base in node.bases if (name := dotted_name(base)) is not None]
    of_ours = [sources.definition(module, name) for name in above]
    elsewhere = any(name is None for name in of_ours) and above != ["Protocol"]
    called = {
        part.func.attr
        for part in ast.walk(node)
        if isinstance(part, ast.Call)
        and isinstance(part.func, ast.Attribute)
        and isinstance(part.func.value, ast.Call)
        and dotted_name(part.func.value.func) == "super"
    }
    used = _used(sources)
    for method in methods:
        inherited = any(owner and sources.method(owner, method.name) for owner in of_ours)
        if not inherited and (method.name in called or (elsewhere and method.name not in used)):
            yield method.lineno, f".{method.name}"


_used_names: dict[int, frozenset[str]] = {}


def _used(sources: Sources) -> frozenset[str]:
    """Attributes and names that anything in the package reads, but for calls on `super()`."""
    if id(sources) not in _used_names:
        _used_names.clear()
        _used_names[id(sources)] = frozenset(
            node.attr if isinstance(node, ast.Attribute) else node.id
            for module in sources.modules.values()
            for node in module.nodes
            if isinstance(node, ast.Name)
            or (isinstance(node, ast.Attribute) and not isinstance(node.value, ast.Call))
        )
    return _used_names[id(sources)]


def _docstrings(module: Module) -> Iterator[int]:
    for node in module.nodes:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            yield id(node.value)


def refusal(names: Iterable[PrivateName]) -> str:
    """What the lint step prints; "" where there is nothing to refuse."""
    lines = [f"src/{name.module.replace('.', '/')}.py:{name.line}: {name.name}" for name in names]
    if not lines:
        return ""
    return "\n".join([*lines, f"{len(lines)} private names of other libraries outside of src/isotype/compat"])


if __name__ == "__main__":
    message = refusal(private_names(read_sources(ROOT / "src")))
    print(message or "no private names of other libraries outside of src/isotype/compat")
    sys.exit(bool(message))
