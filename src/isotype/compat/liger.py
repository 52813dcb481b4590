"""Removes the methods of Liger-Kernel (0.3 to 0.8) from a model's modules.

`_apply_liger_kernel_to_instance` sets `forward`, `extra_repr` and `_get_name` on every norm, MLP and model instance
(`_bind_method_to_module` in liger_kernel/transformers/monkey_patch.py). A precision policy and `isotype.fuse` change a
module's class. A method on the instance would override the new class's method. tests/compat/test_liger.py sets methods
as Liger does.
"""

from types import MethodType

from torch import nn

_PACKAGE = "liger_kernel."


def without_liger(model: nn.Module) -> tuple[str, ...]:
    """Remove Liger's methods from a model's modules. Return the names of the modules with Liger's forward."""
    names = []
    for name, module in model.named_modules():
        methods = {key: value for key, value in vars(module).items() if type(value) is MethodType}
        bound = [key for key, m in methods.items() if (m.__func__.__module__ or "").startswith(_PACKAGE)]
        for key in bound:
            del module.__dict__[key]
        if "forward" in bound:
            names.append(name)
    return tuple(names)
