"""One value's way through the sources: which functions take it on, followed by reading and never by running.

A *stop* is a function with the parameter that receives the value. From a stop the value goes on through

- a call of a function, a method or a class of ours that it is passed to (`functools.partial` and `dataclasses.replace` count
  as calls; a method is found by the class of `self`, of an annotation, of a constructor's result, or of a field),
- assignments, tuples, conditional expressions, `with … as`, and what a function of ours returns or yields of it,
- the field of a record or attribute of `self` that it is put into: whoever gets the record is a stop where it reads that field, and so
  is every method of its class, whoever calls it (a hook's and a callback's caller is another library),
- a method whose object has no known class, where one class alone in the folder has a method of that name,
- an attribute that is read of it (`settings.model`, `model.config`), a text, path or container made of it.

Names in nested functions and lambdas belong to the function around them. Not followed: elements, results of other libraries'
functions, calls through tables and protocols, `*args`, callbacks. So the count is a lower bound; it is the same for the same
sources, which is what a before and an after need.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path as FilePath

from tools.sources import Function, Sources, dotted_name

Path = tuple[str, ...]
"""Fields that lead from a value to the one that is followed; () is the value itself."""

_Keywords = list[tuple[str | None, set[Path]]]
_DEEPEST = 3


@dataclass
class Walk:
    """Where a value goes from one parameter of one function on."""

    sources: Sources
    values: dict[str, dict[str, set[Path]]] = field(default_factory=dict)
    """Of each function: what its parameters hold."""
    touched: set[tuple[str, str]] = field(default_factory=set)
    """Functions and parameters that meet the value itself; others only hand its record on."""
    results: dict[str, set[Path]] = field(default_factory=lambda: defaultdict(set))
    """What functions return of the value, and what of it an object of a class keeps in its attributes."""
    readers: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    """Of each function or class: who has asked for its results."""
    waiting: set[str] = field(default_factory=set)

    def arrive(self, target: Function, parameter: str, paths: set[Path]) -> None:
        """The value comes to a parameter; a function with a new one is read again."""
        held = self.values.setdefault(target.name, {}).setdefault(parameter, set())
        if not paths <= held:
            held |= paths
            self.waiting.add(target.name)

    def give(self, name: str, paths: set[Path]) -> None:
        """A function returns, or a class keeps, the value; who has asked is read again."""
        if not paths <= self.results[name]:
            self.results[name] |= paths
            self.waiting |= self.readers[name]
            self.keep(name, self.results[name])

    def keep(self, name: str, paths: set[Path]) -> None:
        """An object of a class has the value in its attributes, which all of its methods may read."""
        known = self.sources.classes.get(name)
        for method in known.methods.values() if known is not None and paths else ():
            if method.parameters[:1] == ("self",) and not method.name.endswith(".__init__"):
                self.arrive(method, "self", paths)

    def ask(self, name: str, reader: str) -> set[Path]:
        """What a function returns, or a class keeps, as far as it is known."""
        self.readers[name].add(reader)
        return set(self.results[name])

    @property
    def stops(self) -> list[tuple[str, str]]:
        """Functions and parameters that meet the value itself."""
        return sorted(self.touched)

    @property
    def files(self) -> list[str]:
        """The modules with a stop."""
        return sorted({self.sources.functions[function].module for function, _ in self.stops})

    @property
    def climbs(self) -> list[tuple[str, str]]:
        """(function, module) where a function hands what it has of the value back up into another module."""
        functions = self.sources.functions
        return sorted(
            {
                (name, functions[reader].module)
                for name, paths in self.results.items()
                if paths and name in functions
                for reader in self.readers[name]
                if functions[reader].module != functions[name].module
            }
        )


def walk(sources: Sources, function: str, parameter: str) -> Walk:
    """Follow a parameter of a function (`isotype.preflight.check:check`, `model`) until nothing new is met."""
    if parameter not in _all_parameters(sources.functions[function]):
        raise ValueError(f"{function} has no parameter {parameter}")
    result = Walk(sources)
    result.arrive(sources.functions[function], parameter, {()})
    while result.waiting:
        name = result.waiting.pop()
        _Reader(result, sources.functions[name], result.values[name]).read()
    return result


def _all_parameters(function: Function) -> tuple[str, ...]:
    return (*function.parameters, *(argument.arg for argument in function.node.args.kwonlyargs))


class _Reader:
    """Reads one function with what its parameters hold."""

    def __init__(self, result: Walk, function: Function, values: dict[str, set[Path]]) -> None:
        self.result, self.sources, self.function = result, result.sources, function
        self.module = self.sources.modules[function.module]
        self.arrived = {name: set(paths) for name, paths in values.items()}
        self.values: dict[str, set[Path]] = defaultdict(
            set, {name: set(paths) for name, paths in values.items()}
        )
        self.nodes = _nodes(function.node)
        self.passes_on = _CONVERTERS | set(_all_parameters(function))
        self.types: dict[str, str] = dict(self._annotated())

    def _annotated(self) -> Iterator[tuple[str, str]]:
        if self.function.owner is not None and self.function.parameters:
            yield self.function.parameters[0], self.function.owner
        for argument in ast.walk(self.function.node.args):
            if isinstance(argument, ast.arg) and (owner := self._class_in(argument.annotation)):
                yield argument.arg, owner

    def _class_in(self, annotation: ast.AST | None) -> str | None:
        """The first class of ours that an annotation names."""
        for node in ast.walk(annotation) if annotation is not None else ():
            dotted = dotted_name(node)
            if dotted and (name := self.sources.definition(self.module, dotted)) in self.sources.classes:
                return name
        return None

    def read(self) -> None:
        """Pass the value on wherever the function does, until the names of the function hold nothing new."""
        before = -1
        while before != (before := sum(map(len, self.values.values()))):
            for node in self.nodes:
                self._statement(node)
        chains = {dotted_name(node) for node in self.nodes if isinstance(node, ast.Attribute)}
        for name, paths in self.arrived.items():
            if any(not path or ".".join((name, *path)) in chains for path in paths):
                self.result.touched.add((self.function.name, name))

    def _statement(self, node: ast.AST) -> None:
        match node:
            case ast.Assign(targets=targets, value=value):
                for target in targets:
                    self._bind(target, value)
            case (
                ast.AnnAssign(target=target, value=ast.expr() as value)
                | ast.NamedExpr(target=target, value=value)
            ):
                self._bind(target, value)
            case ast.withitem(context_expr=value, optional_vars=target):
                self._value(value)
                if target is not None:
                    self._bind(target, value)
            case ast.Return(value=ast.expr() as value) | ast.Yield(value=ast.expr() as value):
                self.result.give(self.function.name, self._value(value))
            case ast.YieldFrom(value=value):
                self.result.give(self.function.name, self._value(value))
            case ast.Call():
                self._value(node)

    def _bind(self, target: ast.expr, value: ast.expr) -> None:
        if (
            isinstance(target, ast.Tuple)
            and isinstance(value, ast.Tuple)
            and len(target.elts) == len(value.elts)
        ):
            for one, of in zip(target.elts, value.elts, strict=True):
                self._bind(one, of)
            return
        paths = self._value(value)
        match target:
            case ast.Name(id=name):
                self.values[name] |= paths
                if (owner := self._type(value)) is not None:
                    self.types.setdefault(name, owner)
            case ast.Tuple(elts=parts) if isinstance(value, ast.Call):
                for part in parts:
                    if isinstance(part, ast.Name):
                        self.values[part.id] |= paths
            case ast.Attribute(value=ast.Name(id="self"), attr=attribute) if self.function.owner is not None:
                held = {(attribute, *path)[:_DEEPEST] for path in paths}
                self.values["self"] |= held
                self.result.give(self.function.owner, held)

    def _type(self, node: ast.expr) -> str | None:
        """The class of ours that an expression is of, where that is written down."""
        match node:
            case ast.Name(id=name):
                return self.types.get(name)
            case ast.Attribute(value=value, attr=attribute):
                owner = self._type(value)
                known = self.sources.classes.get(owner or "")
                if known is None:
                    return None
                annotation = known.fields.get(attribute)
                method = known.methods.get(attribute)
                typed = _Typed(self.sources, known.module)
                written = annotation or (method.node.returns if method else None)
                return typed.of(written) if written is not None else typed.kept(known.node, attribute)
            case ast.Call(func=function):
                callee = self._callee(function)
                if callee in self.sources.classes:
                    return callee
                found = self.sources.functions.get(callee or "")
                return (
                    _Typed(self.sources, found.module).of(found.node.returns) if found is not None else None
                )
        return None

    def _callee(self, function: ast.expr) -> str | None:
        """The function or class of ours that a call names."""
        dotted = dotted_name(function)
        if dotted is not None and (name := self.sources.definition(self.module, dotted)) is not None:
            return name
        if isinstance(function, ast.Attribute):
            owner = self._type(function.value)
            if isinstance(function.value, ast.Call) and dotted_name(function.value.func) == "super":
                return self._above(function.attr)
            if owner is not None:
                method = self.sources.method(owner, function.attr)
                return method.name if method is not None else None
            return self._only_method(function)
        return None

    def _only_method(self, function: ast.Attribute) -> str | None:
        """The method of a name that one class alone in this folder has, and none of Python's own types."""
        head = (dotted_name(function.value) or "").split(".")[0]
        if head in self.module.imports or function.attr in _OF_PYTHON:
            return None
        here = self.sources.methods_by_folder.get((self.module.folder, function.attr), [])
        return here[0].name if len(here) == 1 else None

    def _above(self, name: str) -> str | None:
        own = self.sources.classes.get(self.function.owner or "")
        for base in own.node.bases if own is not None else ():
            above = self._class_in(base)
            if above is not None and (method := self.sources.method(above, name)) is not None:
                return method.name
        return None

    def _value(self, node: ast.expr) -> set[Path]:
        """Where in an expression's value the followed one is."""
        match node:
            case ast.Name(id=name):
                return self.values.get(name, set())
            case ast.Attribute(value=value, attr=attribute):
                return {path[1:] for path in self._value(value) if path[:1] in ((attribute,), ())}
            case ast.Tuple(elts=parts) | ast.List(elts=parts):
                return self._union(part.value if isinstance(part, ast.Starred) else part for part in parts)
            case ast.IfExp(body=body, orelse=other):
                return self._value(body) | self._value(other)
            case ast.BoolOp(values=parts):
                return self._union(parts)
            case ast.NamedExpr(value=value) | ast.Await(value=value):
                return self._value(value)
            case ast.Call():
                return self._call(node)
        return set()

    def _union(self, parts: Iterable[ast.expr]) -> set[Path]:
        return set().union(*map(self._value, parts))

    def _call(self, node: ast.Call) -> set[Path]:
        function, arguments = node.func, list(node.args)
        name = dotted_name(function) or ""
        keywords: _Keywords = [
            (keyword.arg, self._value(keyword.value)) for keyword in node.keywords if keyword.arg is not None
        ]
        if name in ("partial", "functools.partial") and arguments:
            function, arguments = arguments[0], arguments[1:]
        if name in ("replace", "dataclasses.replace") and arguments:
            changed = {field for field, _ in keywords}
            kept = {path for path in self._value(arguments[0]) if path[:1] and path[0] not in changed}
            return kept | {(field, *path)[:_DEEPEST] for field, paths in keywords if field for path in paths}
        callee = self._callee(function)
        if callee is None:
            values = [*map(self._value, node.args), *(paths for _, paths in keywords)]
            return set().union(*values) if name in self.passes_on else set()
        positional = [set() if isinstance(part, ast.Starred) else self._value(part) for part in arguments]
        if callee in self.sources.classes:
            return self._constructed(callee, positional, keywords)
        target = self.sources.functions[callee]
        parameters = list(_positional(target))
        if (
            target.owner is not None
            and isinstance(function, ast.Attribute)
            and parameters[:1] in (["self"], ["cls"])
        ):
            self.result.arrive(target, "self", self._value(function.value))
            parameters = parameters[1:]
        self._arrive_all(target, parameters, positional, keywords)
        return self.result.ask(callee, self.function.name)

    def _constructed(self, callee: str, positional: list[set[Path]], keywords: _Keywords) -> set[Path]:
        """What a new object of a class holds: its fields, or what its `__init__` keeps in attributes."""
        init = self.sources.method(callee, "__init__")
        if init is None:
            fields = list(self.sources.classes[callee].fields)
            passed: _Keywords = [*zip(fields, positional, strict=False), *keywords]
            held = {(name, *path)[:_DEEPEST] for name, paths in passed if name for path in paths}
        else:
            self._arrive_all(init, list(_positional(init))[1:], positional, keywords)
            held = self.result.ask(callee, self.function.name)
            if init.owner is not None:
                held |= self.result.ask(init.owner, self.function.name)
        self.result.keep(callee, held)
        return held

    def _arrive_all(
        self,
        target: Function,
        parameters: list[str],
        positional: list[set[Path]],
        keywords: _Keywords,
    ) -> None:
        for name, paths in (*zip(parameters, positional, strict=False), *keywords):
            if name is not None and name in _all_parameters(target):
                self.result.arrive(target, name, paths)


@cache
def _nodes(function: ast.AST) -> tuple[ast.AST, ...]:
    return tuple(node for node in ast.walk(function) if isinstance(node, _READ))


def _positional(function: Function) -> tuple[str, ...]:
    static = any(dotted_name(decorator) == "staticmethod" for decorator in function.node.decorator_list)
    return ("", *function.parameters) if static else function.parameters


_OF_PYTHON = frozenset(name for kind in (str, list, dict, set, FilePath, bytes) for name in dir(kind))
_CONVERTERS = frozenset({"str", "Path", "cast", "dict", "list", "tuple"})
_READ = (
    ast.Assign,
    ast.AnnAssign,
    ast.NamedExpr,
    ast.withitem,
    ast.Return,
    ast.Yield,
    ast.YieldFrom,
    ast.Call,
    ast.Attribute,
)


@dataclass(frozen=True)
class _Typed:
    sources: Sources
    module: str

    def of(self, annotation: ast.AST | None) -> str | None:
        """The first class of ours that an annotation of this module names."""
        module = self.sources.modules[self.module]
        for node in ast.walk(annotation) if annotation is not None else ():
            dotted = dotted_name(node)
            if dotted and (name := self.sources.definition(module, dotted)) in self.sources.classes:
                return name
        return None

    def kept(self, owner: ast.ClassDef, attribute: str) -> str | None:
        """The class of ours of an attribute that a method sets: by the constructor that is called, or the parameter's annotation."""
        for method in owner.body:
            if not isinstance(method, ast.FunctionDef):
                continue
            annotated = {
                argument.arg: argument.annotation
                for argument in ast.walk(method.args)
                if isinstance(argument, ast.arg)
            }
            for node in ast.walk(method):
                if isinstance(node, ast.Assign) and dotted_name(node.targets[0]) == f"self.{attribute}":
                    value = node.value.func if isinstance(node.value, ast.Call) else node.value
                    if (name := self.of(annotated.get(dotted_name(value) or "", value))) is not None:
                        return name
        return None
