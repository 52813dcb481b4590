"""The package's sources as data: modules with their imports, functions, classes with their fields; nothing is imported."""

from __future__ import annotations

import ast
import gc
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src"
PACKAGE = "isotype"


@dataclass(frozen=True)
class Function:
    """A function or a method. `name`: `isotype.room.module:function` or `…:Class.method`."""

    name: str
    node: ast.FunctionDef | ast.AsyncFunctionDef
    module: str
    owner: str | None

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names that can be passed by position, in order."""
        return tuple(argument.arg for argument in (*self.node.args.posonlyargs, *self.node.args.args))


@dataclass(frozen=True)
class Class:
    """A class. `fields` are its annotated attributes, in order; `methods` its own functions by name."""

    name: str
    node: ast.ClassDef
    module: str
    fields: Mapping[str, ast.expr]
    methods: Mapping[str, Function]


@dataclass(frozen=True, eq=False)
class Module:
    """One file: its tree, and what its imports bind (`alias -> dotted name`), wherever in the file they stand."""

    name: str
    path: Path
    text: str
    tree: ast.Module = field(repr=False)

    @property
    def folder(self) -> str:
        """The package that it is in."""
        return self.name.rpartition(".")[0]

    @cached_property
    def nodes(self) -> tuple[ast.AST, ...]:
        """All nodes of the tree, walked once."""
        return tuple(ast.walk(self.tree))

    @cached_property
    def imports(self) -> dict[str, str]:
        """What each imported name stands for: `isotype.core.dtypes.name_of`, `torch._C`."""
        bound: dict[str, str] = {}
        for node in self.nodes:
            if isinstance(node, ast.Import):
                for alias in node.names:
                    first = alias.name.split(".", 1)[0]
                    bound[alias.asname or first] = alias.name if alias.asname else first
            elif isinstance(node, ast.ImportFrom) and node.module is not None and not node.level:
                for alias in node.names:
                    bound[alias.asname or alias.name] = f"{node.module}.{alias.name}"
        return bound


@dataclass(frozen=True)
class Sources:
    """All modules of a package, and what they define."""

    modules: Mapping[str, Module]
    functions: Mapping[str, Function]
    classes: Mapping[str, Class]

    _definitions: dict[tuple[str, str], str | None] = field(default_factory=dict, repr=False)

    def definition(self, module: Module, dotted: str) -> str | None:
        """The name (`isotype.room.module:function`) of what a dotted name of a module stands for, if it is ours."""
        key = module.name, dotted
        if key not in self._definitions:
            self._definitions[key] = self._definition(module, dotted)
        return self._definitions[key]

    def _definition(self, module: Module, dotted: str) -> str | None:
        head, *rest = dotted.split(".")
        local = f"{module.name}:{dotted}"
        if local in self.functions or local in self.classes:
            return local
        if head not in module.imports:
            return None
        parts = [*module.imports[head].split("."), *rest]
        for length in range(len(parts) - 1, 0, -1):
            name = f"{'.'.join(parts[:length])}:{'.'.join(parts[length:])}"
            if name in self.functions or name in self.classes:
                return name
        return None

    @cached_property
    def methods_by_folder(self) -> dict[tuple[str, str], list[Function]]:
        """`(folder, name)` -> the methods of that name."""
        methods: dict[tuple[str, str], list[Function]] = {}
        for known in self.classes.values():
            for name, method in known.methods.items():
                methods.setdefault((self.modules[known.module].folder, name), []).append(method)
        return methods

    def method(self, owner: str, name: str) -> Function | None:
        """A method of a class or of one of its bases that are ours."""
        own = self.classes.get(owner)
        if own is None:
            return None
        if name in own.methods:
            return own.methods[name]
        bases = (dotted_name(base) for base in own.node.bases)
        for base in bases:
            above = self.definition(self.modules[own.module], base) if base else None
            if above is not None and (method := self.method(above, name)) is not None:
                return method
        return None


def dotted_name(node: ast.AST) -> str | None:
    """`a.b.c` of an expression that is a chain of names."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        above = dotted_name(node.value)
        return f"{above}.{node.attr}" if above is not None else None
    return None


def read_sources(root: Path = SOURCE, package: str = PACKAGE) -> Sources:
    """Every module of a package below a folder, parsed."""
    modules: dict[str, Module] = {}
    collects = gc.isenabled()
    gc.disable()  # trees have no garbage, and looking for it takes longer than parsing
    for path in sorted((root / package).rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        text = path.read_text(encoding="utf-8")
        modules[name] = Module(name, path, text, ast.parse(text))
    if collects:
        gc.enable()
    functions: dict[str, Function] = {}
    classes: dict[str, Class] = {}
    for module in modules.values():
        for definition in _definitions(module):
            if isinstance(definition, Class):
                classes[definition.name] = definition
                functions.update({method.name: method for method in definition.methods.values()})
            else:
                functions[definition.name] = definition
    return Sources(modules, functions, classes)


def _definitions(module: Module) -> Iterator[Function | Class]:
    for node in module.tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield Function(f"{module.name}:{node.name}", node, module.name, None)
        elif isinstance(node, ast.ClassDef):
            name = f"{module.name}:{node.name}"
            fields = {
                part.target.id: part.annotation
                for part in node.body
                if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name)
            }
            methods = {
                part.name: Function(f"{name}.{part.name}", part, module.name, name)
                for part in node.body
                if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef)
            }
            yield Class(name, node, module.name, fields, methods)
