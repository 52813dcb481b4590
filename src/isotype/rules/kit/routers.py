"""The matrix products of routers. Their scores choose the experts in a mixture of experts."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch

from isotype.records.trace import Call, Operand, Trace, Weight

_CHOICES = ("aten.topk.default", "aten.sort.default", "aten.sort.stable")
# In a model without experts, these also choose the predicted class of a head.
_MAXIMA = ("aten.max.dim", "aten.argmax.default")
_PRODUCTS = ("aten.mm.default", "aten.addmm.default", "aten.linear.default", "aten.matmul.default")


def router_products(trace: Trace) -> Iterator[tuple[Call, Operand, torch.dtype]]:
    """For each choice of experts in the forward, yield the router's product, its weight, and the dtype of the scores."""
    products: list[tuple[Call, Operand]] = []
    choices = (*_CHOICES, *_MAXIMA) if any("expert" in weight.name for weight in trace.weights) else _CHOICES
    for call in trace.calls:
        if call.phase != "forward" or call.recomputed or not call.operands or not call.results:
            continue
        if call.op in _PRODUCTS:
            weights = (_weight(trace.owners, operand) for operand in call.operands)
            products += [(call, weight) for weight in weights if weight is not None]
        elif call.op in choices and call.operands[0].dtype.is_floating_point:
            scores = _scores_of(call, products)
            if scores is not None:
                yield *scores, call.operands[0].dtype


def _weight(owners: Mapping[str, Weight], operand: Operand) -> Operand | None:
    """If `operand` is a matrix weight or a cast of it, return `operand` with this weight as the origin; else None."""
    origin = next((step for step in operand.origin.path() if step.kind == "parameter"), operand.origin)
    owner = owners.get(origin.name)
    whole = owner is not None and not owner.buffer and math.prod(owner.shape) == math.prod(operand.shape)
    return replace(operand, origin=origin) if whole and len(operand.shape) == 2 else None


def _scores_of(choice: Call, products: list[tuple[Call, Operand]]) -> tuple[Call, Operand] | None:
    """Return (product, weight) of a router: the product computes a score for each token and expert.

    The call `choice` chooses by these scores. The product is the last one inside of the parent module of `choice`.
    """
    wanted = choice.operands[0].shape
    inside = (f"{choice.module}.", f"{choice.module.rpartition('.')[0]}.")
    for product, weight in reversed(products):
        near = product.module == choice.module or product.module.startswith(inside)
        shape = product.results[0][1]
        if near and wanted and shape[-1:] == wanted[-1:] and math.prod(shape) == math.prod(wanted):
            return product, weight
    return None
