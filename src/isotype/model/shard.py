"""Shards a model under a policy by FSDP2. Every tensor keeps its dtype.

FSDP2 (`torch.distributed.fsdp.fully_shard`) gathers and reduces a group of parameters together, and the trained
parameters of a group need one dtype. Under a policy, a model has several dtypes. Therefore FSDP2 casts nothing when it
gathers (`param_dtype=None`). Parameters that are trained in another dtype than their block form a separate group.
"""

import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from isotype.compat.torch_fsdp import reshard, sharded_policy
from isotype.core.dtypes import dtype_name
from isotype.core.errors import PrecisionError, UsageError
from isotype.core.names import with_parents
from isotype.model.walk import blocks_in, kind_of, places
from isotype.precision.policy import PrecisionPolicy


def is_sharded(parameter: torch.Tensor) -> bool:
    return hasattr(parameter, "placements")


def has_shards(model: nn.Module) -> bool:
    return any(is_sharded(parameter) for parameter in model.parameters())


def is_gathered(module: nn.Module) -> bool:
    """Return True if FSDP2 gathers the parameters of this module before its forward."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # nothing is sharded before it is imported
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def is_flattened(model: nn.Module) -> bool:
    """Return True if FSDP1 has replaced parameters of `model` by this process's parts of flattened parameters."""
    flat = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", ())
    return any(isinstance(module, flat) for module in model.modules())


def uncopied(model: nn.Module) -> str:
    """Return the reason why a step must not run on a copy of a sharded model; "" if it may."""
    if is_flattened(model):
        return "FSDP1 has flattened the parameters"
    # `ds_id` is an attribute of the parameters that ZeRO-3 has partitioned.
    engine = getattr(sys.modules.get("deepspeed"), "DeepSpeedEngine", ())
    if isinstance(model, engine) or any(hasattr(parameter, "ds_id") for parameter in model.parameters()):
        return "a copy of the model would share DeepSpeed's optimizer with the model"
    return ""


def gathered_by(model: nn.Module) -> dict[str, tuple[Any, list[str]]]:
    """Return (`MixedPrecisionPolicy`, names of the float parameters that FSDP2 gathers) of each sharded module."""
    groups = {n: (sharded_policy(m), list[str]()) for n, m in model.named_modules() if is_gathered(m)}
    for name, parameter in model.named_parameters() if groups else ():
        if is_sharded(parameter) and parameter.is_floating_point():
            next(groups[module] for module in with_parents(name) if module in groups)[1].append(name)
    return groups


def gathering(model: nn.Module) -> dict[str, tuple[str, torch.dtype | None]]:
    """Return parameter name -> (module for which FSDP2 gathers the parameter, dtype in the module's policy or None)."""
    groups = gathered_by(model).items()
    return {name: (unit, policy.param_dtype) for unit, (policy, names) in groups for name in names}


def free_gathered(model: nn.Module) -> None:
    """Free gathered parameters, because some FSDP2 groups keep them after a forward without a backward, or after an error."""
    for module in filter(is_gathered, model.modules()):
        reshard(module)


@contextmanager
def outer_gathered(model: Any) -> Iterator[None]:
    """Gather the parameters that are in no block, until the end of the `with` block. Parts of the model can then run."""
    if is_gathered(model):
        model.unshard()
    try:
        yield
    finally:
        free_gathered(model)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this process's part of a sharded tensor. For other tensors, return `tensor` itself."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def device_of(policy: PrecisionPolicy) -> torch.device:
    """Return the device of this process's part of a model. It is a CPU if the policy requests this, or if there is no accelerator."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return accelerator if accelerator and policy.device != "cpu" else torch.device("cpu")


def process_count() -> int:
    """Return the number of processes in torch's process group; 1 without a group."""
    from torch import distributed

    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


def mesh_over_all(device: torch.device) -> Any:
    """Return a one-dimensional `DeviceMesh` of all processes. Raise UsageError without a process group."""
    from torch import distributed

    if not (distributed.is_available() and distributed.is_initialized()):
        raise UsageError.of(
            "there are no processes to shard over",
            "a process that was started alone",
            "a process group (torch.distributed)",
            "start the command with torchrun --nproc_per_node N or accelerate launch, or call "
            "torch.distributed.init_process_group() first",
        )
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh(device.type, (distributed.get_world_size(),))


def shard_model(model: Any, policy: PrecisionPolicy, mesh: Any = None, *, reshard: bool = True) -> Any:
    """Shard a model under `policy` by FSDP2, in place. Each process keeps some rows of each parameter.

    Each block is a group. A frozen input embedding is a group if no other module shares its weight. All other parameters
    (final norm, head) are one group, which stays gathered until the end of the backward. Gradients are summed in the
    policy's reduce dtype.

    Args:
        model: any module. Its parameters may be on the meta device.
        mesh: a one-dimensional `DeviceMesh`. The default contains all processes.
        reshard: True to free a block's gathered weights after its forward, and to gather them again in its backward.

    Returns:
        The same model; FSDP2 has changed its class.

    Raises:
        PrecisionError: a module has trained parameters of several dtypes.
        UsageError: there is no process group, or the mesh has several dimensions.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

    mesh = mesh_over_all(device_of(policy)) if mesh is None else mesh
    if mesh.ndim != 1:
        mesh_text, fix = f"a mesh of {mesh.ndim} dimensions", "pass mesh['the dimension to shard over']"
        raise UsageError.of("a mesh that cannot be sharded over", mesh_text, "one dimension", fix)
    mixed = MixedPrecisionPolicy(param_dtype=None, reduce_dtype=policy.reduce, cast_forward_inputs=False)
    _plain_codes(model)
    for group in groups_of(model, reshard=reshard):
        with integers_named():
            fully_shard(group.module, mesh=mesh, mp_policy=mixed, reshard_after_forward=group.reshard)
    if hasattr(model, "generate"):
        register_fsdp_forward_method(model, "generate")
    return model


@dataclass(frozen=True)
class Group:
    """Parameters that FSDP2 gathers before the forward of `module` and whose gradients it reduces together."""

    module: nn.Module
    parameters: tuple[nn.Parameter, ...]
    reshard: bool


def groups_of(
    model: nn.Module, *, reshard: bool = True, more_blocks: Iterable[nn.Module] = ()
) -> tuple[Group, ...]:
    """Return the groups of `shard_model`: inner groups first, the rest of the model last.

    `more_blocks` are other modules that are groups, such as the layers of folded lists. Raise PrecisionError if a module
    has trained parameters of several dtypes.
    """
    all_blocks = {id(block): block for block in (*blocks_in(model), *more_blocks)}
    inner = {id(part) for block in all_blocks.values() for part in block.modules() if part is not block}
    blocks = [block for number, block in all_blocks.items() if number not in inner]
    pairs: list[tuple[nn.Module, bool]] = []
    for block in blocks:
        pairs += [*((module, reshard) for module in _of_another_dtype(block)), (block, reshard)]
    embedding = _lone_embedding(model)
    pairs += [(embedding, True)] if embedding is not None else []
    pairs += [(module, False) for module in _of_another_dtype(model, outside=blocks)]
    pairs.append((model, False))
    grouped: set[int] = set()
    groups = []
    for module, freed in pairs:
        parameters = tuple(p for p in module.parameters() if id(p) not in grouped)
        grouped |= {id(parameter) for parameter in parameters}
        groups.append(Group(module, parameters, freed))
    return tuple(groups)


@contextmanager
def integers_named() -> Iterator[None]:
    """Replace the error of torch releases that cannot shard integers (2.10) by a PrecisionError."""
    try:
        yield
    except RuntimeError as error:
        if "floating point" not in str(error):
            raise
        what = f"weights stored as integers under torch {torch.__version__}"
        expected = "weights stored in a float dtype, or a newer torch"
        fix = "torch 2.13 can shard integers; 4-bit codes can be stored as floats: --bnb_4bit_quant_storage bfloat16"
        raise PrecisionError.of("this torch cannot shard quantized weights", what, expected, fix) from error


def _plain_codes(model: nn.Module) -> None:
    """Make quantized weights plain parameters, because FSDP2 drops the attributes of parameters. The layers keep the constants."""
    for place in places(model):
        layer: Any = place.module
        if place.kind == "linear4bit":
            layer.quant_state = getattr(layer.weight, "quant_state", None) or layer.quant_state
        elif place.kind == "linear8bit":
            layer.state.CB = None
        else:
            continue
        layer.weight = nn.Parameter(layer.weight.data, requires_grad=False)


def _of_another_dtype(model: nn.Module, outside: list[nn.Module] | None = None) -> list[nn.Module]:
    """Return modules whose trained parameters do not have the most common dtype, without modules in `outside`."""
    excluded = {id(part) for block in outside or () for part in block.modules()}
    trained: list[tuple[nn.Module, set[torch.dtype]]] = []
    for module in model.modules():
        if id(module) not in excluded:
            trainable = (p for p in module.parameters(recurse=False) if p.requires_grad and not is_sharded(p))
            trained.append((module, {parameter.dtype for parameter in trainable}))
    dtypes = Counter(dtype for _, own_dtypes in trained for dtype in own_dtypes)
    if len(dtypes) < 2:
        return []
    most = dtypes.most_common(1)[0][0]
    for module, own_dtypes in trained:
        if len(own_dtypes) > 1:
            names = " and ".join(sorted(map(dtype_name, own_dtypes)))
            what = f"{type(module).__name__} with trained parameters in {names}"
            expected = "trained parameters of one dtype"
            fix = "train it in one dtype: isotype.enforce(model, policy) before it is sharded"
            raise PrecisionError.of("a module that FSDP2 cannot shard", what, expected, fix)
    return [module for module, own_dtypes in trained if own_dtypes - {most}]


def _lone_embedding(model: Any) -> nn.Module | None:
    """Return the input embedding if it is frozen and not shared, because its weight can then be freed after the lookup."""
    embedding: Any = model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None
    if embedding is None or kind_of(embedding) != "embedding" or embedding.weight.requires_grad:
        return None
    pairs = ((module, p) for module in model.modules() for p in module.parameters(recurse=False))
    return embedding if [module for module, p in pairs if p is embedding.weight] == [embedding] else None
