"""How a weight got its dtype: the line that created or cast it, in every way that a script can do this."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import bitsandbytes
import pytest
import torch
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
)

from isotype.trace.dtype_history import remembered, set_at

_DATA = torch.Tensor.data


@pytest.fixture(autouse=True)
def _remembering() -> Iterator[None]:
    with remembered():
        yield
    assert torch.Tensor.data is _DATA


def _line(function: Callable[..., object], code: str) -> str:
    """`test_dtype_history.py:LINE` of the line with `code` in a function."""
    lines, first = inspect.getsourcelines(function)
    return f"test_dtype_history.py:{first + next(i for i, line in enumerate(lines) if code in line)}"


def _cast_module(net: nn.Module) -> None:
    net.half()


def _cast_to(net: nn.Module) -> None:
    net.to(device="cpu", dtype=torch.float16)


def _cast_data(net: nn.Module) -> None:
    for parameter in (*net.parameters(), *net.buffers()):
        parameter.data = parameter.data.half()


def _new_tensors(net: nn.Module) -> None:
    for name, parameter in list(net.named_parameters()):
        setattr(net, name, nn.Parameter(parameter.detach().half()))
    for name in ("running_mean", "running_var"):
        net.register_buffer(name, net.get_buffer(name).half())


@pytest.mark.parametrize(
    ("cast", "code"),
    [(_cast_module, "net.half"), (_cast_to, "net.to"), (_cast_data, "parameter.data = "), (_new_tensors, "")],
)
def test_a_cast_names_its_line(cast: Callable[[nn.Module], None], code: str) -> None:
    net = nn.BatchNorm1d(3)  # parameters, float buffers and a buffer of integers
    created = _line(test_a_cast_names_its_line, "nn.BatchNorm1d")
    assert {set_at(net, name) for name, _ in net.named_parameters()} == {f"created at {created}"}
    cast(net)
    texts = {set_at(net, name) for name in ("weight", "bias", "running_mean", "running_var")}
    if code:
        assert texts == {f"cast at {_line(cast, code)}"}
    else:
        assert {text.rpartition(":")[0] for text in texts} == {"cast at test_dtype_history.py"}


def test_a_weight_that_moves_without_a_cast_keeps_its_line() -> None:
    net = nn.Linear(2, 2)
    text = set_at(net, "weight")
    net.to("cpu")
    net.weight = nn.Parameter(net.weight.detach().clone())
    net.weight.data = net.weight.data * 2
    assert (
        set_at(net, "weight")
        == text
        == f"created at {_line(test_a_weight_that_moves_without_a_cast_keeps_its_line, 'nn.Linear')}"
    )


def test_both_names_of_a_tied_weight_have_the_line_of_its_last_cast() -> None:
    net = nn.ModuleDict({"embed": nn.Embedding(4, 2), "head": nn.Linear(2, 4, bias=False)})
    net["head"].weight = net["embed"].weight
    created = _line(test_both_names_of_a_tied_weight_have_the_line_of_its_last_cast, "nn.Embedding")
    assert {set_at(part, "weight") for part in net.values()} == {f"created at {created}"}
    net["embed"].weight.data = net["embed"].weight.data.half()
    cast = _line(test_both_names_of_a_tied_weight_have_the_line_of_its_last_cast, ".data.half")
    assert {set_at(part, "weight") for part in net.values()} == {f"cast at {cast}"}


def test_tensors_can_be_swapped() -> None:
    # torch swaps tensors that have no weak reference; it casts sharded and torchao's weights so.
    net = nn.Linear(2, 2)
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        net.half()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert set_at(net, "weight") == f"cast at {_line(test_tensors_can_be_swapped, 'net.half')}"


def test_a_weight_that_is_quantized_names_the_line_of_its_load(tmp_path: Path) -> None:
    config = LlamaConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=1, vocab_size=8
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=BitsAndBytesConfig(load_in_4bit=True)
    )
    line = _line(test_a_weight_that_is_quantized_names_the_line_of_its_load, "AutoModelForCausalLM")
    assert (
        set_at(model.get_submodule("model.layers.0.mlp.up_proj"), "weight")
        == f"loaded by from_pretrained at {line}"
    )
    layer = bitsandbytes.nn.Linear4bit(64, 64)
    layer.to("cpu")
    line = _line(test_a_weight_that_is_quantized_names_the_line_of_its_load, 'layer.to("cpu")')
    assert set_at(layer, "weight") == f"quantized at {line}"


@pytest.mark.parametrize("seed", range(4))
def test_a_copy_has_the_line_of_its_original(seed: int) -> None:
    """PEFT copies a head that `modules_to_save` names. A later cast of the copy does not change the original's line."""
    random = Random(seed)
    net = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2)))
    part = random.choice([*net.modules()])
    part.half()
    model = LlamaForSequenceClassification(
        LlamaConfig(
            hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, vocab_size=8
        )
    ).to(random.choice([torch.float16, torch.bfloat16]))
    adapted = get_peft_model(model, LoraConfig(task_type="SEQ_CLS", target_modules=["q_proj"]))
    head = adapted.get_submodule("base_model.model.score.modules_to_save.default")
    line = _line(test_a_copy_has_the_line_of_its_original, ").to(")
    assert set_at(head, "weight") == f"cast at {line}"
    copied = copy.deepcopy(net)
    for name, module in net.named_modules():
        for key, _ in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
            assert set_at(copied.get_submodule(name), key) == set_at(module, key) != ""
    before = set_at(net[0], "weight")
    copied.double()
    assert (
        set_at(copied[0], "weight") == f"cast at {_line(test_a_copy_has_the_line_of_its_original, '.double')}"
    )
    assert set_at(net[0], "weight") == before


def test_without_a_known_line_nothing_is_said() -> None:
    net = nn.Linear(2, 2)
    vars(net)["_parameters"]["bias"] = nn.Parameter(torch.zeros(2))
    assert set_at(net, "bias") == ""
    assert set_at(copy.deepcopy(net), "bias") == ""
    torch.utils.swap_tensors(net.weight, nn.Parameter(net.weight.detach().half()))
    assert net.weight.dtype == torch.float16
    assert set_at(net, "weight") == ""


def test_a_library_s_function_is_named_with_the_line_that_calls_it(tmp_path: Path) -> None:
    config = LlamaConfig(
        hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, vocab_size=8
    )
    model = LlamaForCausalLM(config)
    line = _line(test_a_library_s_function_is_named_with_the_line_that_calls_it, "LlamaForCausalLM(config)")
    assert set_at(model.lm_head, "weight") == f"created by LlamaForCausalLM at {line}"
    model.to(torch.bfloat16).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    line = _line(test_a_library_s_function_is_named_with_the_line_that_calls_it, "from_pretrained(tmp_path)")
    assert set_at(model.lm_head, "weight") == f"loaded by from_pretrained at {line}"
    prepare_model_for_kbit_training(model)
    line = _line(
        test_a_library_s_function_is_named_with_the_line_that_calls_it, "prepare_model_for_kbit_training("
    )
    assert set_at(model.lm_head, "weight") == f"cast by prepare_model_for_kbit_training at {line}"
    adapted = get_peft_model(model, LoraConfig(target_modules=["q_proj"]))
    line = _line(test_a_library_s_function_is_named_with_the_line_that_calls_it, "get_peft_model(")
    adapter = adapted.get_submodule("base_model.model.model.layers.0.self_attn.q_proj.lora_A.default")
    assert set_at(adapter, "weight") == f"created by get_peft_model at {line}"


class _Named(nn.Module):
    """A module whose hash needs an attribute that the constructor sets after the weight."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.name = name

    def __hash__(self) -> int:
        return hash(self.name)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Named) and self.name == other.name


def test_modules_with_equal_names_have_lines_of_their_own() -> None:
    first, second = _Named("a"), _Named("a").half()
    second.half()
    assert "created" in set_at(first, "weight")
    assert "cast" in set_at(second, "weight")


def test_a_constructor_may_be_a_function_outside_of_its_class() -> None:
    namespace = {"nn": nn, "torch": torch}
    code = "def __init__(self):\n nn.Module.__init__(self)\n self.weight = nn.Parameter(torch.zeros(2))"
    exec(compile(code, bitsandbytes.__file__, "exec"), namespace)
    module = type("Made", (nn.Module,), {"__init__": namespace["__init__"]})()
    line = _line(test_a_constructor_may_be_a_function_outside_of_its_class, "module = type")
    assert set_at(module, "weight").endswith(f" at {line}")


@pytest.mark.parametrize(
    ("values", "to", "verb"),
    [
        (torch.ones(2), torch.complex64, "cast"),
        (torch.ones(2, dtype=torch.int64), torch.int32, "cast"),
        (torch.ones(2), torch.int8, "quantized"),
    ],
)
def test_only_codes_of_floats_are_quantized(values: torch.Tensor, to: torch.dtype, verb: str) -> None:
    module = nn.Module()
    module.register_buffer("values", values)
    module.register_buffer("values", values.to(to))
    assert set_at(module, "values").startswith(f"{verb} at ")


_CASTS = (
    "{part}.to({dtype})",
    "for p in {part}.parameters(): p.data = p.data.to({dtype})",
    "[setattr(p, 'data', p.to({dtype})) for p in {part}.parameters()]",
    "model.apply(lambda m: m.to({dtype}) if isinstance(m, nn.Linear) else m)",
    "model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().to({dtype}))",
    "model.load_state_dict({{k: v.to({dtype}) for k, v in model.state_dict().items()}})",
    "model.load_state_dict({{k: v.to({dtype}) for k, v in model.state_dict().items()}}, assign=True)",
    "prepare_model_for_kbit_training(model)",
    "model.tie_weights()",
)
_PARTS = ("model", "model.model.norm", "model.model.layers[0]", "model.model.layers[1].mlp", "model.lm_head")


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(40))
def test_the_line_is_the_last_after_which_the_dtype_was_another(seed: int) -> None:
    random = Random(seed)
    lines = ["model = LlamaForCausalLM(config)"]
    for _ in range(random.randint(1, 8)):
        dtype = random.choice(["torch.float16", "torch.bfloat16", "torch.float32", "torch.float64"])
        lines.append(random.choice(_CASTS).format(part=random.choice(_PARTS), dtype=dtype))
    config = LlamaConfig(
        hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=1, vocab_size=8
    )
    names = {**globals(), "config": config}
    last: dict[str, tuple[torch.dtype, int]] = {}
    for number, line in enumerate(lines, 1):
        exec(compile("\n" * (number - 1) + line, "/script.py", "exec"), names)
        tensors = [*names["model"].named_parameters(remove_duplicate=False), *names["model"].named_buffers()]
        for name, tensor in tensors:
            if name not in last or last[name][0] != tensor.dtype:
                last[name] = tensor.dtype, number
    for name, (_, number) in last.items():
        module, _, weight = name.rpartition(".")
        text = set_at(names["model"].get_submodule(module), weight)
        assert not text or text.endswith(f" at script.py:{number}"), (name, text, lines)
    assert set_at(names["model"].model.layers[0].mlp.up_proj, "weight")
