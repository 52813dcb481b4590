"""Finds the linear layers whose weight the code of a model reads directly, without the forward of the layer.

An adapter on such a layer has no effect, and packed codes in place of the weight break the code.
"""

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from functools import cache
from typing import Any

from torch import nn

from isotype.model.walk import is_tuner_layer

_RESULTS = {
    "t", "T", "mT", "type", "to", "float", "view", "reshape", "transpose", "squeeze", "unsqueeze", "clamp",
}  # fmt: skip
"""A tensor's attributes and methods that return the same values, or (`clamp`) the values limited to a range."""
_QUERIES = re.compile(r"^(isinstance|getattr|hasattr|setattr|len|type|id)$|init|_tie")


def layers_read(base: Any, *, packed: bool = False) -> dict[str, str]:
    """Return layer name -> class of the parent, for each linear layer whose weight a method of a parent reads.

    With `packed`, also return the linear layers for which packed codes would break a method. Such a method changes the
    weight in place (Gemma 3n), or casts to the weight's dtype (SigLIP 2 casts pixels).
    """
    reads, modules = {}, dict(base.named_modules(remove_duplicate=False))
    for name, module in base.named_modules():
        cls: Any = type(module)
        for path in _read_by(cls, packed):
            full = f"{name}.{path}".lstrip(".")
            layer = modules.get(full)
            if isinstance(layer, nn.Linear) or (layer is not None and is_tuner_layer(layer)):
                reads[full] = cls.__name__
    return reads


def unquantizable(base: Any) -> tuple[str, ...]:
    """Return the layers whose weight a method of a parent reads or changes, as names for `llm_int8_skip_modules`.

    `mixer.dt_proj` names all layers with this ending. Layers of at most 8 weights are also named, because their codes may
    have the shape `[1, 1]`, which bitsandbytes interprets as a transposed weight.
    """
    linear = {name: module for name, module in base.named_modules() if type(module) is nn.Linear}
    dense = layers_read(base, packed=True).keys() | {n for n, m in linear.items() if m.weight.numel() <= 8}
    names: dict[str, None] = {}
    for name in linear:
        if name in dense:
            end = ".".join(name.split(".")[-2:])
            names[end if all(other in dense for other in linear if other.endswith(end)) else name] = None
    return tuple(sorted(names))


@cache
def _read_by(cls: Any, packed: bool) -> frozenset[str]:
    paths: set[str] = set()
    for base in cls.__mro__[: cls.__mro__.index(nn.Module)]:
        for name, method in vars(base).items():
            method = inspect.unwrap(method) if callable(method) else method
            code = getattr(method, "__code__", None)
            if not callable(method) or code is None or "weight" not in code.co_names or _QUERIES.search(name):
                continue
            try:
                tree = ast.parse(textwrap.dedent(inspect.getsource(method)))
            except (OSError, SyntaxError):
                continue
            paths |= set(_paths(tree, packed))
    return frozenset(paths)


def _paths(tree: ast.AST, packed: bool) -> Iterator[str]:
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    for node, parent in parents.items():
        text = ast.unparse(node) if isinstance(node, ast.Attribute) and node.attr == "weight" else ""
        path = re.fullmatch(r"self\.([\w.]+)\.weight", text)
        computes = isinstance(parent, (ast.keyword, ast.BinOp, ast.List))
        if isinstance(parent, ast.Attribute):
            method = parents[parent]
            changes = (
                parent.attr == "data" and isinstance(method, ast.Attribute) and method.attr.endswith("_")
            )
            computes = parent.attr in _RESULTS or (packed and (changes or parent.attr == "dtype"))
        elif isinstance(parent, ast.Call):
            computes = node in parent.args and not _QUERIES.search(ast.unparse(parent.func))
        if path and computes:
            yield path[1]
