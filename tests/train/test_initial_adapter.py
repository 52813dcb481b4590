"""`--init_lora_weights`: the same function at the start, the same run after a resume, the same model from the files."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from rich.console import Console
from safetensors.torch import load_file

import isotype
from isotype.checkpoint.adapter import load_for_inference, quiet_peft
from isotype.checkpoint.merge.merge import merge_adapter
from isotype.core.errors import CheckpointError, DataError, PrecisionError, UsageError
from isotype.data.methods import METHODS
from isotype.records.request import DEFAULT_PHASES
from isotype.train import training
from isotype.train.initial_adapter import is_its_own_reference, start_of
from isotype.train.models import _peft_config, processing_class, weightless_model
from isotype.train.preflight.step import check_plan
from isotype.train.preflight.step_plan import parse_options, plan_of
from isotype.train.rows.lengths import adapter_notes
from isotype.train.validate import argument_problems
from tests.adapters import save_adapter, save_trained
from tests.pairwise import few
from tests.parsed import parse_settings
from tests.refusals import refused
from tests.train.tiny import rows, save_chat_model, save_rows

pytestmark = pytest.mark.usefixtures("unchecked")
IDS = torch.arange(4, 20)[None]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chat_model(tmp_path_factory.mktemp("model"))


def train(path: Path, out: Path, *more: object, method: str = "sft") -> training.Outcome:
    data = save_rows(out.parent / f"{method}.jsonl", rows(method))
    argv = f"""--model_name_or_path {path} --dataset_name {data} --output_dir {out} --max_steps 2 --logging_steps 1
        --per_device_train_batch_size 2 --learning_rate 1e-2 --lora_r 4 --lora_dropout 0 --save_steps 1 --device cpu --dtype float32
        --report_to none""".split()
    settings = parse_settings(METHODS[method], [*argv, *map(str, more)])
    return training.run(settings, Console(file=io.StringIO(), width=200))


def losses(outcome: training.Outcome) -> list[float]:
    return [step.loss for step in outcome.record.steps]


@pytest.mark.parametrize("name", ["pissa", pytest.param("olora", marks=pytest.mark.exhaustive)])
def test_what_takes_a_part_of_the_base_resumes_and_merges_to_the_trained_model(
    path: Path, tmp_path: Path, name: str
) -> None:
    flags = ("--init_lora_weights", name)
    plain = train(path, tmp_path / "plain", "--max_steps", 1)
    whole = train(path, tmp_path / "whole", *flags)
    # The base and the part that was taken out of it make the same function; float32 rounds the decomposition.
    assert losses(whole)[0] == pytest.approx(losses(plain)[0], rel=1e-5)
    out = tmp_path / "whole"
    again = train(path, out, *flags, "--resume_from_checkpoint", out / "checkpoint-1")
    assert losses(again)[1:] == pytest.approx(losses(whole)[1:], rel=1e-6)
    model, _, _ = load_for_inference(out)
    base = transformers.AutoModelForCausalLM.from_pretrained(path)
    untrained = base(IDS).logits
    theirs = peft.PeftModel.from_pretrained(base, out)
    merge_adapter(out, tmp_path / "merged")
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    with torch.no_grad():
        ours = model(IDS).logits
        assert (ours - untrained).norm() > 0.01 * untrained.norm()  # it has learned something
        torch.testing.assert_close(ours, theirs(IDS).logits, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(merged(IDS).logits, ours, rtol=1e-4, atol=1e-5)


@few("name", ["gaussian", "orthogonal", "true"], "orthogonal")
def test_what_is_drawn_leaves_the_model_as_it_is_at_first(path: Path, tmp_path: Path, name: str) -> None:
    base = ("--quantization", "nf4") if name == "gaussian" else ()
    outcome = train(path, tmp_path / "out", "--init_lora_weights", name, *base, "--max_steps", 1)
    plain = train(path, tmp_path / "plain", *base, "--max_steps", 1)
    assert losses(outcome) == pytest.approx(losses(plain), rel=1e-5)
    saved = peft.PeftConfig.from_pretrained(tmp_path / "out").init_lora_weights
    assert saved == (True if name == "true" else name)


@pytest.mark.parametrize(("written", "read"), [("True", True), ("false", False), ("PISSA", "pissa")])
def test_initialisations_as_peft_reads_them(path: Path, written: str, read: object) -> None:
    settings = parse_settings(
        METHODS["sft"], ["--model_name_or_path", str(path), "--init_lora_weights", written]
    )
    assert argument_problems(settings) == []
    policy = isotype.resolve_precision(path, "float32", device="cpu")
    model = weightless_model(transformers.AutoConfig.from_pretrained(path), policy)
    assert _peft_config(settings, model).init_lora_weights == read
    assert is_its_own_reference(settings) == (read is True)


def save_kind(path: Path, directory: Path, config: peft.PeftConfig) -> Path:
    with quiet_peft():
        model = peft.get_peft_model(transformers.AutoModelForCausalLM.from_pretrained(path), config)
    return save_trained(model, directory, scale=0.02)


_Q: dict[str, Any] = {"target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}


_KINDS: dict[str, Any] = {
    "alora": peft.LoraConfig(
        r=4, alora_invocation_tokens=[2, 5], **_Q
    ),  # "<s> assistant", before each answer
    "adalora": peft.AdaLoraConfig(init_r=4, total_step=9, **_Q),
    "boft": peft.BOFTConfig(boft_block_size=8, **_Q),
    "vblora": peft.VBLoRAConfig(r=4, num_vectors=16, vector_length=16, **_Q),
    "tokens": peft.TrainableTokensConfig(
        token_indices=[4, 5], target_modules=["embed_tokens"], task_type="CAUSAL_LM"
    ),
}


@pytest.mark.filterwarnings(
    "ignore:(Failed to load the CUDA extension|Setting boft_n_butterfly):UserWarning"
)  # of BOFT
@few("config", _KINDS, "alora", "adalora", "boft")
def test_kinds_of_adapters_are_checked_and_trained_further(
    path: Path, tmp_path: Path, config: peft.PeftConfig
) -> None:
    adapter = save_kind(path, tmp_path / "adapter", config)
    data = save_rows(tmp_path / "sft.jsonl", rows("sft"))
    argv = f"""--model_name_or_path {adapter} --dataset_name {data} --output_dir {tmp_path / "out"} --max_steps 1
        --per_device_train_batch_size 2 --gradient_checkpointing True --device cpu --report_to none""".split()
    report = check_plan(plan_of(*parse_options(["sft", *argv])), DEFAULT_PHASES)
    assert report.findings == ()
    assert report.trace.failure is None
    settings = parse_settings(METHODS["sft"], argv)
    outcome = training.run(settings, Console(file=io.StringIO(), width=200))
    before, after = (load_file(folder / "adapter_model.safetensors") for folder in (adapter, outcome.adapter))
    assert before.keys() == after.keys()
    assert any(not torch.equal(before[name], after[name]) for name in before)


def test_tokens_that_begin_an_alora_are_not_exchanged_by_a_check(path: Path, tmp_path: Path) -> None:
    # One of the tokens fills the check's rows. A changed row with the tokens at another place would begin elsewhere.
    adapter = save_kind(
        path, tmp_path / "adapter", peft.LoraConfig(r=4, alora_invocation_tokens=[5, 6], **_Q)
    )
    argv = f"sft --model_name_or_path {adapter} --device cpu-avx2 --gradient_checkpointing False --length 24".split()
    assert check_plan(plan_of(*parse_options(argv)), DEFAULT_PHASES).findings == ()


def test_a_quantized_base_is_checked_without_its_values(path: Path, tmp_path: Path) -> None:
    plans = {}
    for name in ("olora", "pissa"):
        adapter = save_kind(path, tmp_path / name, peft.LoraConfig(r=4, init_lora_weights=name, **_Q))
        flags = f"sft --model_name_or_path {adapter} --quantization nf4 --dtype float32 --length 8".split()
        plans[name] = plan_of(*parse_options(flags))
    assert check_plan(plans["olora"], ("forward",)).ok  # PEFT quantizes the rest of the weights again
    with pytest.raises(CheckpointError, match="a base in nf4, and an adapter that pissa initialised"):
        check_plan(plans["pissa"], ("forward",))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (peft.PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM"), "which adds virtual tokens"),
        (peft.PolyConfig(r=4, **_Q), "task_ids"),
        (
            peft.AdaptionPromptConfig(adapter_len=2, adapter_layers=1, task_type="CAUSAL_LM"),
            "log-probabilities",
        ),
    ],
)
def test_kinds_that_no_trainer_of_trl_can_train_are_refused(
    path: Path, tmp_path: Path, config: peft.PeftConfig, words: str
) -> None:
    adapter = save_kind(path, tmp_path / "adapter", config)
    with pytest.raises(UsageError, match=rf"(?s){words}.*--model_name_or_path {path}"):
        start_of(parse_settings(METHODS["sft"], ["--model_name_or_path", str(adapter)]))


def test_what_begins_from_the_quantization_error_goes_on_as_any_adapter(path: Path, tmp_path: Path) -> None:
    flags = ("--quantization", "nf4", "--init_lora_weights", "loftq")
    whole = train(path, tmp_path / "out", *flags)
    plain = train(path, tmp_path / "plain", "--quantization", "nf4", "--max_steps", 1)
    assert losses(whole)[0] != losses(plain)[0]  # which are of the same function where adapters begin at zero
    again = train(path, tmp_path / "out", *flags, "--resume_from_checkpoint", tmp_path / "out/checkpoint-1")
    assert losses(again)[1:] == pytest.approx(losses(whole)[1:], rel=1e-6)
    # PEFT would decompose weights of its own for "loftq": what was begun so is in the file.
    assert peft.PeftConfig.from_pretrained(tmp_path / "out").init_lora_weights is True
    model, _, _ = load_for_inference(tmp_path / "out")
    merge_adapter(tmp_path / "out", tmp_path / "merged", dtype="float32")
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    with torch.no_grad():
        torch.testing.assert_close(merged(IDS).logits, model(IDS).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--init_lora_weights pisa", "did you mean pissa"),
        ("--init_lora_weights pissa_niter_4", "pissa_niter starts from random values"),
        ("--init_lora_weights eva", "is computed from data"),
        (
            "--init_lora_weights loftq --quantization nf4 --use_dora True",
            "LoRA without DoRA, because DoRA computes its magnitudes",
        ),
        (
            "--init_lora_weights loftq --quantization nf4 --chat_template_path x/y",
            "needs the adapter before TRL adds tokens",
        ),
        ("--init_lora_weights mica", "its matrix B is not trained"),
        ("--init_lora_weights orthogonal --lora_r 5", "an even rank"),
        ("--init_lora_weights orthogonal --quantization nf4", "PEFT draws A and B in the dtype of the base"),
        ("--init_lora_weights pissa --quantization nf4", "pissa and a base in nf4"),
        ("--init_lora_weights olora --load_in_8bit True", "olora and a base in int8"),
    ],
)
def test_what_cannot_be_is_refused_with_its_reason_by_run_and_check(
    path: Path, tmp_path: Path, flags: str, words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        train(path, tmp_path / "out", *flags.split())
    options, rest = parse_options(["sft", "--model_name_or_path", str(path), *flags.split()])
    with pytest.raises(UsageError, match=words):
        plan_of(options, rest)


def test_no_second_adapter_takes_its_part_out_of_the_base_once_more(path: Path, tmp_path: Path) -> None:
    """TRL adds a reference adapter with the same config, which would change the base weights again."""
    with pytest.raises(UsageError, match="TRL adds a second adapter as the reference"):
        train(path, tmp_path / "out", "--init_lora_weights", "pissa", method="dpo")
    train(path, tmp_path / "sft", "--init_lora_weights", "pissa", "--max_steps", 1)
    with pytest.raises(UsageError, match="merge it first"):
        train(tmp_path / "sft", tmp_path / "out", method="dpo")
    with pytest.raises(CheckpointError, match="subtracts the adapter's initial values from the base"):
        load_for_inference(tmp_path / "sft", quantization="nf4")


def test_a_check_takes_it(path: Path) -> None:
    options, rest = parse_options(["sft", "--model_name_or_path", str(path), "--init_lora_weights", "pissa"])
    plan = plan_of(options, rest)
    assert (
        plan.lora.init_lora_weights is True
    )  # a step's memory and dtypes are the same however adapters begin


def test_a_check_trains_the_adapter_that_it_starts_from(path: Path, tmp_path: Path) -> None:
    """PEFT saves `inference_mode: true`, with which a check found nothing to train."""
    adapter = save_adapter(path, tmp_path / "adapter", "float32", None)
    plan = plan_of(*parse_options(["sft", "--model_name_or_path", str(adapter)]))
    policy = isotype.resolve_precision(path, "float32", device="cpu")
    model = weightless_model(transformers.AutoConfig.from_pretrained(path), policy, lora=plan.lora)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert len(trained) == len(load_file(adapter / "adapter_model.safetensors"))


@pytest.mark.parametrize(
    ("method", "flags", "copies"),
    [("dpo", "", True), ("rloo", "--beta 0", True), ("grpo", "", False), ("grpo", "--beta 0.1", True)],
)
def test_biases_and_parts_of_the_base_where_trl_copies_the_adapter(
    path: Path, method: str, flags: str, copies: bool
) -> None:
    for more in ("--lora_bias all", "--init_lora_weights pissa"):
        settings = parse_settings(
            METHODS[method], ["--model_name_or_path", str(path), *flags.split(), *more.split()]
        )
        expected = [problem.expected for problem in argument_problems(settings)]
        assert any("TRL adds a second adapter" in text for text in expected) == copies


def test_an_adapter_of_virtual_tokens_is_refused(path: Path, tmp_path: Path) -> None:
    base = transformers.AutoModelForCausalLM.from_pretrained(path)
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    peft.get_peft_model(base, config).save_pretrained(tmp_path / "adapter")
    with pytest.raises(UsageError, match="a PROMPT_TUNING adapter, which adds virtual tokens"):
        plan_of(*parse_options(["sft", "--model_name_or_path", str(tmp_path / "adapter")]))


def test_a_base_that_comes_quantized_is_refused_when_the_policy_is_known(path: Path) -> None:
    from isotype.train.initial_adapter import check_initial

    settings: Any = parse_settings(
        METHODS["sft"], ["--model_name_or_path", str(path), "--init_lora_weights", "pissa"]
    )
    policy = isotype.resolve_precision(path, "float32", "nf4", device="cpu")
    with pytest.raises(isotype.PrecisionError, match="pissa and a base in nf4"):
        check_initial(settings, policy)


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_what_begins_from_errors_of_4_bits_wants_4_bits(
    path: Path, tmp_path: Path, quantization: str | None
) -> None:
    more = ("--quantization", quantization) if quantization else ()
    with pytest.raises(isotype.PrecisionError, match="a base in 4 bits"):
        train(path, tmp_path / "out", "--init_lora_weights", "loftq", *more)


def test_an_adapter_on_int8_is_trained_further_on_int8(path: Path, tmp_path: Path) -> None:
    adapter = save_adapter(path, tmp_path / "adapter", "float32", "int8")
    settings = start_of(parse_settings(METHODS["sft"], ["--model_name_or_path", str(adapter)]))
    assert settings.start is not None
    request = settings.precision
    assert request.quant_storage is None  # of codes of 4 bits
    policy = isotype.resolve_precision(path, request.dtype, request.quantization, "cpu")
    assert policy.storage == "int8"


def begin(adapter: Path) -> Any:
    return start_of(
        parse_settings(METHODS["sft"], ["--model_name_or_path", str(adapter), "--dataset_name", "d"])
    )


@pytest.mark.parametrize(("method", "by"), [("corda", "covariances"), ("lora_ga", "gradients")])
def test_adapters_whose_base_cannot_be_rebuilt_are_refused_by_every_command(
    path: Path, tmp_path: Path, method: str, by: str
) -> None:
    adapter = save_adapter(path, tmp_path / "adapter", "float32", None)
    config = json.loads((adapter / "adapter_config.json").read_text())
    content = {**config, "init_lora_weights": method, f"{method}_config": {}}
    (adapter / "adapter_config.json").write_text(json.dumps(content))
    expected = f"a {method} adapter, whose initialisation changed the weights of the base with {by} that no file contains"
    for use in (begin, load_for_inference, lambda folder: merge_adapter(folder, tmp_path / "merged")):
        assert expected in refused(UsageError, use, adapter)
    poly = save_kind(path, tmp_path / "poly", peft.PolyConfig(r=4, **_Q))
    for use in (load_for_inference, lambda folder: merge_adapter(folder, tmp_path / "merged")):
        assert "a POLY adapter, which needs the number of each row's task (task_ids)" in refused(
            UsageError, use, poly
        )


def test_a_package_that_an_adapter_needs_is_named(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = save_adapter(path, tmp_path / "adapter", "float32", None)

    def lacking(*_: Any, **__: Any) -> None:
        raise ImportError("scikit-learn is required for AdaMSS")

    monkeypatch.setattr("isotype.checkpoint.formats.config.pretrained", lacking)
    assert "fix       install the package that the message names" in refused(CheckpointError, begin, adapter)


@pytest.mark.parametrize(
    ("config", "text", "note"),
    [
        (peft.LoraConfig(r=4, alora_invocation_tokens=[8, 9], **_Q), "w0 w1 w5", None),
        (peft.LoraConfig(r=4, alora_invocation_tokens=[8, 9], **_Q), "w1 w0 w5", "lack the tokens 'w0 w1'"),
        (
            peft.TrainableTokensConfig(
                token_indices=[8], target_modules=["embed_tokens"], task_type="CAUSAL_LM"
            ),
            "w5",
            "lack the tokens 'w0'",
        ),
        (peft.AdaLoraConfig(init_r=4, total_step=9, **_Q), "w5", "AdaLoRA keeps its ranks"),
    ],
)
def test_rows_in_which_an_adapter_learns_nothing_are_counted(
    path: Path, tmp_path: Path, config: peft.PeftConfig, text: str, note: str | None
) -> None:
    settings, tokenizer = begin(save_kind(path, tmp_path / "adapter", config)), processing_class(path)
    notes = adapter_notes(settings, tokenizer, [{"text": "w0 w1"}, {"prompt": "w3 ", "completion": text}])
    assert [note in shown for shown in notes] == [True] * (note is not None)
    if note is not None and "lack" in note:
        assert notes[0].startswith("1 of 2 rows ")
        message = refused(DataError, adapter_notes, settings, tokenizer, [{"text": text}])
        assert message.startswith("the adapter has an effect only with tokens that the rows lack\n")
    assert adapter_notes(parse_settings(METHODS["sft"], ["--model_name_or_path", "m"]), tokenizer, [{}]) == []


@pytest.mark.parametrize("targets", ["q_proj lm_head", ".*(q_proj|head)"])
def test_an_adapter_on_the_head_is_refused_by_check_and_run(path: Path, tmp_path: Path, targets: str) -> None:
    named = targets.split() if " " in targets else [targets]
    argv = ["--model_name_or_path", str(path), "--lora_target_modules", *named, "--device", "cpu"]
    plan = plan_of(*parse_options(["sft", *argv]))
    assert refused(UsageError, check_plan, plan, DEFAULT_PHASES) == refused(
        UsageError, train, path, tmp_path / "out", "--lora_target_modules", *named
    )


def test_a_pattern_that_leaves_the_head_out_is_checked(path: Path) -> None:
    argv = f"sft --model_name_or_path {path} --lora_target_modules (?!lm_head).*proj --device cpu".split()
    assert check_plan(plan_of(*parse_options(argv)), ("forward",)).ok


@pytest.mark.parametrize("more", ["--init_lora_weights loftq --dtype bfloat16", "--bf16 False"])
def test_arguments_that_contradict_the_decided_policy_are_refused_by_check_and_run(
    tmp_path: Path, more: str
) -> None:
    path = save_chat_model(tmp_path / "model", "bfloat16")
    flags = ["--dtype", "auto", "--device", "cpu-amx", *more.split()]
    plan = plan_of(*parse_options(["sft", "--model_name_or_path", str(path), *flags]))
    with pytest.raises(PrecisionError):
        check_plan(plan, ("forward",))
