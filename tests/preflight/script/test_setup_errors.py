"""Errors that end a script before its first step, with their causes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from types import ModuleType
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from isotype.compat import bitsandbytes
from isotype.compat.torch_fsdp import fake_process_group
from isotype.core.dtypes import dtype_name
from isotype.precision.devices.profile import device_profile
from isotype.preflight.script.missing_gpu import MissingGpu
from isotype.preflight.script.setup_errors import explained
from isotype.trace.dtype_history import remembered


class Saved(nn.Module):
    """Like PEFT's ModulesToSaveWrapper while it copies a layer: the copy is not a submodule yet."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.original_module = layer

    def train_a_copy(self) -> None:
        layer = _quantized()
        for parameter in layer.parameters():
            parameter.requires_grad_(True)


def _quantized() -> nn.Module:
    layer = nn.Linear(2, 2, bias=False)
    layer.weight = nn.Parameter(torch.zeros(4, 1, dtype=torch.uint8), requires_grad=False)
    return layer


def _explanation(act: Callable[[nn.Module], Any], *layers: nn.Module) -> tuple[str, str] | None:
    model = nn.Sequential(*layers)
    try:
        act(model)
    except Exception as error:  # noqa: BLE001 - every error of the library that is called
        known = explained(error)
        return None if known is None else (known.cause, known.help)
    raise AssertionError


def _raise(message: str) -> Callable[[nn.Module], None]:
    def act(model: nn.Module) -> None:
        raise ValueError(message)

    return act


def test_the_layer_that_the_adapter_copies_is_named() -> None:
    cause, how = _explanation(
        lambda model: Saved(model.get_submodule("1")).train_a_copy(), _quantized(), _quantized()
    ) or (
        "",
        "",
    )
    assert cause == "1.weight holds uint8 codes of a quantized layer, and codes have no gradient"
    assert "llm_int8_skip_modules" in how
    assert (
        _explanation(lambda model: torch.zeros(1, dtype=torch.int64).requires_grad_(True), nn.Linear(2, 2))
        is None
    )


def test_an_adapter_is_initialized_from_codes() -> None:
    error = _raise("Please initialize PiSSA under float32, float16, or bfloat16. Subsequently, re-quantize")
    cause, how = _explanation(error, _quantized()) or ("", "")
    assert cause.endswith("but 0.weight holds codes of a quantized layer, stored as uint8")
    assert how.startswith("load the base model without quantization")


def _nf4(storage: torch.dtype) -> nn.Module:
    """A layer whose first codes are 15: in bfloat16 and float32, their bytes are NaN."""
    bnb = pytest.importorskip("bitsandbytes")
    layer = bnb.nn.Linear4bit(64, 64, bias=False, quant_storage=storage, quant_type="nf4")
    layer.weight = bnb.nn.Params4bit(
        torch.ones(64, 64), quant_storage=storage, quant_type="nf4", module=layer
    ).to("cpu")
    return cast(nn.Module, layer)


@pytest.mark.real_cpu
@pytest.mark.parametrize("storage", [torch.uint8, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("init", ["pissa", "pissa_niter_4", "mica", "corda"])
def test_an_adapter_is_initialized_from_codes_in_any_storage(init: Any, storage: torch.dtype) -> None:
    """huggingface/peft #3742: PEFT refuses codes in uint8, but computes with codes that are stored as floats."""
    from peft import LoraConfig, get_peft_model
    from peft.tuners.lora.config import CordaConfig
    from peft.tuners.lora.corda import preprocess_corda

    model: Any = nn.Sequential(nn.Linear(64, 64), _nf4(storage))
    corda = CordaConfig() if init == "corda" else None
    config = LoraConfig(target_modules=["1"], r=4, init_lora_weights=init, corda_config=corda)

    def act(_: nn.Module) -> None:
        if corda is not None:
            with torch.no_grad():
                preprocess_corda(model, config, run_model=lambda: model(torch.randn(8, 64)))
        get_peft_model(model, config)

    cause, _ = _explanation(act) or ("", "")
    name = dtype_name(model[1].weight.dtype)  # CorDA's forward repacks the codes on a CPU
    assert cause.endswith(f"but 1.weight holds codes of a quantized layer, stored as {name}")
    # The same error of other code, such as an optimizer's decomposition of gradients, has another cause.
    nan = torch.full((4, 4), torch.nan)
    assert _explanation(lambda _: torch.linalg.svd(nan), *model) is None


@pytest.mark.real_cpu
def test_an_orthogonal_adapter_gets_the_dtype_of_codes() -> None:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(target_modules=["1"], init_lora_weights="orthogonal")
    for storage in (torch.uint8, torch.bfloat16):
        model = nn.Sequential(nn.Linear(64, 64), _nf4(storage))
        if storage == torch.bfloat16:
            get_peft_model(model, config)  # type: ignore[arg-type]  # the fix that the help names
            continue
        cause, how = _explanation(lambda _, model=model: get_peft_model(model, config)) or ("", "")
        assert cause.endswith("in the dtype of the base weight, but 1.weight holds uint8 codes")
        assert "bnb_4bit_quant_storage=torch.bfloat16" in how


def test_fsdp1_flattens_neither_several_dtypes_nor_codes() -> None:
    """h2oai/h2o-llmstudio #98 (float32 adapters beside a float16 model); the errors end a script before its first step."""
    half, wide, codes = nn.Linear(4, 4).half(), nn.Linear(2, 2), _quantized().half()
    with fake_process_group(2):
        explained = [
            _explanation(lambda m: FullyShardedDataParallel(m, device_id=torch.device("cpu")), half, other)
            for other in (wide, codes)
        ]
    (several, shard), (packed, pack) = ((words or ("", "")) for words in explained)
    assert several.startswith(
        "2 parameters are float32, unlike most weights (first: 1.weight; 0.weight is float16), and FSDP1"
    )
    assert "fully_shard" in shard
    assert packed.startswith("1.weight holds uint8 codes of a quantized layer, and FSDP1")
    assert "bnb_4bit_quant_storage" in pack


@pytest.mark.parametrize(
    ("whole", "storage", "upcast"), [("float16", "bfloat16", False), ("bfloat16", "bfloat16", True)]
)
def test_fsdp1_flattens_no_codes_in_another_dtype_than_the_other_weights(
    whole: str, storage: str, upcast: bool
) -> None:
    """hiyouga/LLaMA-Factory #3853 (a float16 model), axolotl-ai-cloud/axolotl #1494 (norms that the script casts)."""
    bnb = pytest.importorskip("bitsandbytes")
    with remembered(), fake_process_group(2):
        norm = nn.LayerNorm(8).to(getattr(torch, whole))
        codes = bnb.nn.Linear4bit(8, 8, bias=False, quant_storage=getattr(torch, storage)).to("cpu")
        if upcast:
            norm.float()
        cause, how = _explanation(
            lambda m: FullyShardedDataParallel(m, device_id=torch.device("cpu")), norm, codes
        ) or ("", "")
    other = "float32" if upcast else whole
    assert cause.startswith(f"1.weight holds 4-bit codes stored as {storage} (bnb_4bit_quant_storage), but ")
    assert f"but 0.weight is {other}, cast at test_setup_errors.py:" in cause
    assert f"bnb_4bit_quant_storage=torch.{other}, the dtype of the other weights" in how


def test_fsdp1_inside_of_another_has_no_wrapped_module_yet() -> None:
    """eric-mitchell/direct-preference-optimization #90: the policy wraps each layer."""

    class Layer(nn.Sequential):
        pass

    def wrap(model: nn.Module) -> nn.Module:
        policy = ModuleWrapPolicy({Layer})
        return FullyShardedDataParallel(model, auto_wrap_policy=policy, device_id=torch.device("cpu"))

    with fake_process_group(2):
        cause, how = _explanation(wrap, Layer(nn.Linear(4, 4).half(), nn.Linear(2, 2))) or ("", "")
    assert "float32, unlike most weights" in cause
    assert "fully_shard" in how


def test_zero_3_gathers_one_dtype() -> None:
    """haotian-liu/LLaVA #949, deepspeedai/DeepSpeed #8072; without parameters of other dtypes, ZeRO-3 is not the reason."""
    error = _raise("output tensor must have the same type as input tensor")
    cause, how = _explanation(error, nn.Linear(4, 4).bfloat16(), nn.Linear(2, 2)) or ("", "")
    assert cause.startswith("2 parameters are float32, unlike most weights (first: 1.weight), and ZeRO-3")
    assert "0.19.3" in how
    assert _explanation(error, nn.Linear(4, 4)) is None


def test_parameters_without_values_are_counted() -> None:
    cause, how = _explanation(
        lambda model: model.to("cpu"), nn.Linear(2, 2), nn.Linear(2, 2, device="meta")
    ) or ("", "")
    assert cause.startswith("2 parameters are on the meta device, without values (first: 1.weight)")
    assert 'device_map={"": 0}' in how


def test_a_larger_vocabulary_is_named_with_its_size() -> None:
    class Words(nn.Module):
        def __init__(self, rows: int) -> None:
            super().__init__()
            self.embed_tokens = nn.Embedding(rows, 4)

    cause, how = _explanation(lambda model: Words(8).load_state_dict(Words(10).state_dict())) or ("", "")
    assert cause.endswith("10 rows of the embedding or output layer, and this model has 8 rows")
    assert "resize_token_embeddings(10)" in how


@pytest.mark.parametrize(
    ("message", "word"),
    [
        ("Blockwise quantization only supports 16/32-bit floats, but got torch.uint8", "already quantized"),
        (
            "Blockwise 4bit quantization only supports 16/32-bit floats, but got torch.uint8",
            "already quantized",
        ),
        (
            "The model you are trying to fine-tune is quantized with QuantizationMethod.FP8 but that quantization method do not "
            "support training. Please open an issue",
            "refuses",
        ),
        ("You cannot perform fine-tuning on purely quantized models. Please attach", "no adapter"),
        (
            "You can't train a model that has been loaded in 8-bit or 4-bit precision on a different device than the one",
            "device_map",
        ),
        (
            "You can't train a model that has been loaded in 8-bit precision on a different device than",
            "device_map",
        ),
        ("TrainableTokensLayer wraps an unknown layer type, maybe you are targeting", "modules_to_save"),
        ("You cannot cast a bitsandbytes model in a new `dtype`. Make sure to load", "refuses to cast"),
        ("`.half()` is not supported for quantized model. Please use the model as it is", "refuses to cast"),
        ("PREFIX_TUNING does not work with gradient checkpointing.", "turns the cache off"),
        ("Unsloth cannot find any torch accelerator? You need a GPU.", "unsloth"),
        ("No module named 'unsloth_zoo'", "unsloth"),
    ],
)
def test_errors_of_libraries(message: str, word: str) -> None:
    cause, how = _explanation(_raise(message), nn.Linear(2, 2)) or ("", "")
    assert word in cause
    assert how


@pytest.mark.parametrize(
    ("argument", "how"),
    [
        ("evaluation_strategy", "write eval_strategy instead"),
        ("logging_dir", "omit the argument and set the environment variable TENSORBOARD_LOGGING_DIR"),
        ("ray_scope", "omit the argument"),
    ],
)
def test_an_argument_that_the_installed_version_does_not_have(argument: str, how: str) -> None:
    from transformers import TrainingArguments

    cause, fix = _explanation(lambda model: TrainingArguments(**{argument: "x"})) or ("", "")
    assert cause == f"TrainingArguments of transformers {version('transformers')} has no argument {argument}"
    assert fix == f"{how}, or install the version of transformers for which the script was written"


@pytest.mark.real_cpu
def test_row_scales_that_bitsandbytes_loses_on_a_cpu() -> None:
    """DoRA on int8 weights: the second forward fails. The same error of other code has another cause."""
    bnb = pytest.importorskip("bitsandbytes")
    from peft import LoraConfig, get_peft_model

    layer = bnb.nn.Linear8bitLt(8, 8, has_fp16_weights=False)
    layer.weight = bnb.nn.Int8Params(torch.randn(8, 8), requires_grad=False, has_fp16_weights=False).to("cpu")
    model: Any = get_peft_model(nn.Sequential(layer).train(), LoraConfig(target_modules=["0"], use_dora=True))  # type: ignore[arg-type]

    def steps(_: nn.Module) -> None:
        for _ in range(2):
            model(torch.randn(2, 8)).sum().backward()

    cause, how = _explanation(steps) or ("", "")
    assert cause.startswith("bitsandbytes has lost the row scales of 0.weight: on a CPU, PEFT's DoRA")
    assert "load_in_4bit" in how
    assert _explanation(lambda _: None.unsqueeze(1), layer) is None  # type: ignore[attr-defined]


def test_a_tensor_that_is_assigned_to_a_parameter() -> None:
    """cloneofsimo/lora #205: float16 values of a checkpoint; the error names their dtype."""

    def act(model: nn.Module) -> None:
        model[0].weight = torch.zeros(2, 2, dtype=torch.bfloat16)  # type: ignore[index]

    known = _explanation(act, nn.Linear(2, 2))
    assert known is not None
    assert known[0] == "weight is a parameter, and the assigned tensor is not; its dtype is not the cause"
    assert "module.weight.copy_(tensor)" in known[1]


def test_a_misspelt_argument() -> None:
    from peft import LoraConfig
    from transformers import LlamaConfig, LlamaForCausalLM

    def load(model: nn.Module) -> None:
        LlamaForCausalLM.from_pretrained(
            None, config=LlamaConfig(num_hidden_layers=1), state_dict={}, torch_dtpye="auto"
        )  # type: ignore[arg-type]

    acts: dict[str, Any] = {
        "lora_alpha": lambda model: LoraConfig(lora_alfa=8),  # type: ignore[call-arg]
        "torch_dtype": load,
        # `encoder_layer` is a variable of this constructor, not an argument.
        "num_encoder_layers": lambda model: nn.Transformer(8, 1, encoder_layers=1),  # type: ignore[call-arg]
    }
    for name, act in acts.items():
        _, how = _explanation(act) or ("", "")
        assert how.startswith(f"write {name} instead, or")


def test_an_argument_that_moved_to_the_config_of_the_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    """TRL 1 has beta in DPOConfig, and max_length instead of max_seq_length in SFTConfig; without beta, the loss differs."""

    @dataclass
    class StepConfig:
        beta: float = 0.1
        max_length: int = 8

    class StepTrainer:
        def __init__(self, args: StepConfig) -> None: ...

    module = ModuleType("trl.a_trainer")
    vars(module).update(StepConfig=StepConfig, StepTrainer=StepTrainer)
    StepTrainer.__module__ = module.__name__
    monkeypatch.setitem(sys.modules, module.__name__, module)
    called: Any = StepTrainer
    for name, moved in (("beta", "beta"), ("max_seq_length", "max_length")):
        cause, how = _explanation(lambda model, name=name: called(**{name: 1})) or ("", "")
        assert cause == f"StepTrainer of trl {version('trl')} has no argument {name}"
        assert how.startswith(f"pass {moved} to StepConfig, which the trainer gets as args, or install")


@pytest.mark.parametrize(
    ("importer", "code", "absent", "how"),
    [
        ("__main__", "from peft import prepare_model_for_int8_training", "prepare_model_for_int8_training", "import prepare_model_for_kbit_training instead, or install the version of peft for which"),
        ("__main__", "from peft import an_old_name", "an_old_name", "install the version of peft for which the script was written"),
        ("__main__", "from peft import BitsAndBytesConfig", "BitsAndBytesConfig", "import it from transformers, or install the version of peft for which"),
        ("__main__", "import peft.an_old_module", "an_old_module", "install the version of peft for which the script was written"),
        ("trl.trainer", "from peft import an_old_name", "an_old_name", f"trl {version('trl')} needs another version of peft: upgrade trl, or install an older peft"),
    ],
)  # fmt: skip
def test_a_name_that_the_installed_version_does_not_have(
    importer: str, code: str, absent: str, how: str
) -> None:
    """huggingface/peft #3333, transformers #38832, #44351, #45278: old releases of PEFT import a class that transformers 5 removed."""
    cause, fix = _explanation(lambda model: exec(code, {"__name__": importer})) or ("", "")
    assert cause == f"peft {version('peft')} does not contain {absent}"
    assert fix.startswith(how)


def test_a_name_that_a_module_of_the_script_does_not_have_is_not_explained() -> None:
    assert _explanation(lambda model: exec("from tests.models import an_old_name")) is None


def test_a_missing_package_is_no_missing_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers names CUDA when it lacks triton, fbgemm-gpu or qutlass."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    gpu = MissingGpu(device_profile("a100"))
    package = ValueError(
        "MXFP4 quantization requires Triton: CUDA requires Triton >= 3.4.0: `pip install triton`"
    )
    assert gpu.explained(package) == ""
    assert "needs a real NVIDIA A100" in gpu.explained(RuntimeError("No CUDA GPUs are available"))


def test_a_device_without_cuda_is_named_by_pytorchs_word(monkeypatch: pytest.MonkeyPatch) -> None:
    """A script for CUDA on an Apple or Intel GPU: a real one would not help."""
    monkeypatch.setattr(torch.mps, "is_available", lambda: False, raising=False)
    gpu = MissingGpu(device_profile("mps"))
    monkeypatch.setattr(gpu, "_absent", True)
    sentence = gpu.explained(AssertionError("Torch not compiled with CUDA enabled"))
    assert sentence.endswith("asks for the device cuda, which Apple GPU does not have: write 'mps' instead")


@pytest.mark.parametrize("device", ["mps", torch.device("mps")])
def test_a_float64_tensor_cannot_go_to_an_apple_gpu(device: Any) -> None:
    gpu = MissingGpu(device_profile("mps"))
    gpu.attach()
    try:
        values = torch.rand(3, dtype=torch.float64)
        for move in (
            lambda _: values.to(device),
            lambda _: torch.zeros(3, dtype=torch.float64, device=device),
            lambda _: torch.as_tensor(values.numpy(), device=device),
            lambda _: nn.Linear(3, 3).double().to(device),
            lambda _: nn.BatchNorm1d(3).double().to(device=device),
        ):
            known = _explanation(move)
            assert known is not None
            assert "an Apple GPU does not have" in known[0]
        assert values.to(device, torch.float32).dtype == torch.float32
        assert nn.Linear(3, 3).double().to(device, torch.float32).weight.dtype == torch.float32
        assert values.float().to(device).double().dtype == torch.float64  # on the CPU, in place of the GPU
        assert torch.arange(3, device=device).dtype == torch.int64
        assert values.to("cpu").dtype == torch.float64
    finally:
        gpu.detach()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_the_fused_layer_of_an_evaluation_gets_one_dtype() -> None:
    """Lightning-AI/pytorch-lightning #19980: autocast on a CPU casts the input of the layer, but not its weights."""
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 8, batch_first=True), 1).eval()
    padding = torch.tensor([[False, False, False], [False, False, True]])

    def evaluate(_: Any) -> torch.Tensor:
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            return encoder(torch.ones(2, 3, 8, dtype=torch.bfloat16), src_key_padding_mask=padding)

    cause, how = _explanation(evaluate) or ("", "")
    assert "fused kernel" in cause
    assert "set_fastpath_enabled(False)" in how
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        assert evaluate(None).shape == (2, 3, 8)
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


def test_states_of_4_bit_layers_are_saved_but_not_loaded() -> None:
    """bitsandbytes-foundation/bitsandbytes #1946; weights in float can be loaded before the move."""
    bnb = pytest.importorskip("bitsandbytes")
    saved, here = (nn.Sequential(bnb.nn.Linear4bit(64, 64, quant_type="nf4")) for _ in range(2))
    here.load_state_dict(saved.state_dict())
    cause, how = _explanation(lambda _: here.to("cpu").load_state_dict(saved.to("cpu").state_dict())) or (
        "",
        "",
    )
    assert torch.equal(here[0].weight, saved[0].weight)
    assert "load_state_dict does not read them" in cause
    assert "before .to(device) quantizes them" in how


@pytest.mark.parametrize("device", ["t4", "a770"])
def test_a_float64_tensor_can_go_to_other_gpus(device: str) -> None:
    profile = device_profile(device)
    gpu = MissingGpu(profile)
    gpu.attach()
    try:
        assert torch.zeros(3, dtype=torch.float64).to(gpu.kind).dtype == torch.float64
    finally:
        gpu.detach()


def test_an_argument_of_the_scripts_own_function_has_no_explanation() -> None:
    def step(rate: float) -> None: ...

    assert _explanation(lambda model: step(speed=1.0)) is None


def test_other_errors_have_no_explanation() -> None:
    assert _explanation(_raise("mat1 and mat2 must have the same dtype, but got Half and Float")) is None
    size = "size mismatch for layers.0.q_proj.weight: copying a param with shape torch.Size([8, 4]) from checkpoint, "
    assert _explanation(_raise(f"{size}the shape in current model is torch.Size([4, 4]).")) is None


def test_a_script_for_a_gpu_keeps_the_layout_of_4_bit_weights() -> None:
    modules = pytest.importorskip("bitsandbytes").nn.modules
    own = getattr(modules, bitsandbytes.REPACK)
    gpu = MissingGpu(device_profile("t4"))
    gpu.attach()
    try:
        assert getattr(modules, bitsandbytes.REPACK)("weight", "state") == ("weight", "state")
    finally:
        gpu.detach()
    assert getattr(modules, bitsandbytes.REPACK) is own


def test_a_scaler_refuses_the_closure_of_an_optimizer() -> None:
    """torch raises this error itself."""
    scaler = torch.amp.GradScaler("cpu")

    def act(model: nn.Module) -> None:
        scaler.step(torch.optim.LBFGS(model.parameters()), closure=lambda: 0.0)

    cause, how = _explanation(act, nn.Linear(2, 2)) or ("", "")
    assert cause.endswith("a GradScaler supports no closure")
    assert "without a GradScaler" in how


def test_a_scaler_gets_a_closure_before_any_loss() -> None:
    """With a positional closure, torch raises another error: the closure would scale the first loss."""
    scaler = torch.amp.GradScaler("cpu")
    cause, how = _explanation(
        lambda model: scaler.step(torch.optim.LBFGS(model.parameters()), lambda: 0.0), nn.Linear(2, 2)
    ) or ("", "")
    assert cause == "no loss was multiplied by the loss scale before this call"
    assert "an optimizer with a closure (LBFGS) cannot use a GradScaler" in how


def test_sharded_gradients_beside_whole_ones() -> None:
    """kvcache-ai/ktransformers #2145."""

    def act(model: nn.Module) -> None:
        with fake_process_group(1) as mesh:
            fully_shard(model.get_submodule("0"), mesh=mesh)
            model(torch.ones(1, 2)).sum().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    cause, how = _explanation(act, nn.Linear(2, 2), nn.Linear(2, 2)) or ("", "")
    assert cause.startswith("2 parameters are not sharded by FSDP2 (first: 1.weight), and an operator")
    assert how.startswith("call fully_shard(model) for the whole model")


def test_processes_that_send_different_dtypes() -> None:
    """modelscope/ms-swift #3955, #5809, #9550: the error with TORCH_DISTRIBUTED_DEBUG=DETAIL."""
    cause, _ = _explanation(
        _raise(
            "Detected mismatch between collectives on ranks. Rank 1 is running collective: CollectiveFingerPrint("
            "TensorDtypes=BFloat16, …). Collectives differ in the following aspects: \t Tensor Tensor dtypes: BFloat16vs Float"
        )
    ) or ("", "")
    assert cause.startswith("one process sends a tensor of dtype BFloat16, and another process sends Float")


def test_a_hook_that_casts_a_gradient_is_named() -> None:
    def backward(model: nn.Module) -> None:
        hidden = model(torch.ones(1, 2))
        hidden.register_hook(lambda gradient: gradient.bfloat16())
        hidden.sum().backward()

    cause, how = _explanation(backward, nn.Linear(2, 2)) or ("", "")
    assert cause.startswith("the hook <lambda> gets a gradient torch.FloatTensor, and returns a gradient ")
    assert how.startswith("return the gradient in the dtype that the hook gets")
