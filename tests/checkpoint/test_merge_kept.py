"""What a merge reports as kept: compared with the adapter on its base, in float32, on training rows."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from isotype.checkpoint.adapter import load_for_inference
from isotype.checkpoint.load import load
from isotype.checkpoint.merge import merge
from isotype.checkpoint.merge.layers import WrittenModel, codes, unbiased
from isotype.checkpoint.merge.merge import merge_adapter
from isotype.checkpoint.resolve import resolve_precision
from isotype.checkpoint.values import held_weight
from isotype.core.errors import CheckpointError
from isotype.model.adapters import add_lora
from isotype.ranges.measure import Rows
from tests.adapters import save_trained
from tests.checkpoint.test_merge import TARGETS, save_base, tokenizer
from tests.pairwise import few

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
Adapted = Callable[..., Path]


@pytest.fixture
def adapted(tmp_path: Path) -> Adapted:
    """Save an adapter with random values so small that 4-bit rounding loses them."""

    def made(storage: str | None = "nf4", dtype: str = "bfloat16", scale: float = 0.002, **lora: Any) -> Path:
        base = save_base(tmp_path / "base", torch.bfloat16)
        policy = resolve_precision(base, dtype, storage, "cpu")
        settings = {"r": 4, "target_modules": TARGETS, "task_type": "CAUSAL_LM"} | lora
        model = add_lora(load(base, policy), policy, **settings)
        return save_trained(model, tmp_path / "adapter", seed=1, scale=scale)

    return made


def by_hand(adapter: Path, merged: Path, rows: Rows) -> tuple[float, float]:
    """Return (kept, fraction of the loss's decrease) from plain forwards in float32 and sums in float64, one text at a time."""
    live, _, _ = load_for_inference(adapter, dtype="float32")
    models = [live, transformers.AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32)]
    nats, losses, count = [0.0, 0.0], [0.0, 0.0, 0.0], 0
    for ids, labels in rows.texts:
        text = torch.tensor([ids])
        with torch.no_grad():
            with live.disable_adapter():
                base = live(input_ids=text).logits[0].double().log_softmax(-1)
            trained, other = (each(input_ids=text).logits[0].double().log_softmax(-1) for each in models)
        for at, each in enumerate((other, base)):
            nats[at] += float((trained.exp() * (trained - each)).sum())
        learned = [(at, label) for at, label in enumerate(labels[1:]) if label != -100]
        for at, each in enumerate((base, trained, other)):
            losses[at] -= sum(float(each[place, label]) for place, label in learned)
        count += len(learned)
    return 1 - nats[0] / nats[1], (losses[0] - losses[2]) / (losses[0] - losses[1])


def test_what_is_kept_is_that_of_plain_forwards(adapted: Adapted, tmp_path: Path) -> None:
    adapter = adapted(dtype="float32")
    texts = tuple((list(range(3, 3 + n)), [-100] * 4 + list(range(7, 3 + n))) for n in (9, 30, 17))
    rows = Rows(texts, "held-back rows of t.jsonl (3)")
    report = merge_adapter(adapter, tmp_path / "merged", rows=rows, dtype="bfloat16")
    assert report.logits is not None
    assert report.logits.losses is not None
    kept, fall = by_hand(adapter, tmp_path / "merged", rows)
    # The divergences are differences of about 1e-6 between float32 logits.
    assert report.logits.kept == pytest.approx(kept, abs=1e-2)
    assert report.logits.tokens == 56
    base, trained, merged = report.logits.losses
    assert (base - merged) / (base - trained) == pytest.approx(fall, rel=1e-2)


@pytest.mark.usefixtures("every_format")
@few("storage", [None, "nf4", "int8"], "nf4")
def test_a_merge_that_loses_nothing_says_so(adapted: Adapted, tmp_path: Path, storage: str | None) -> None:
    report = merge_adapter(adapted(storage), tmp_path / "merged", dtype="float32")
    assert report.logits is not None
    assert report.logits.mean_kl < 1e-9
    assert report.cheapest is not None
    assert report.logits.kept == pytest.approx(1, abs=1e-3)


@few("storage", ["nf4", "fp4", "int8"], "nf4")
def test_back_in_the_format_of_the_training_an_update_is_there_on_average(
    adapted: Adapted, tmp_path: Path, storage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A merge into dequantized weights, which are on the format's grid, kept 1 % of this update in nf4 and 10 % in fp4."""
    monkeypatch.setattr(merge, "LEAST", -torch.inf)  # updates below the step of 4-bit formats
    adapter = adapted(storage, scale=0.01)
    report = merge_adapter(adapter, tmp_path / "merged", stored=storage)
    assert any("merged into the weights in the base's files" in note for note in report.notes)
    written = WrittenModel(transformers.LlamaForCausalLM, tmp_path / "merged", storage)
    live, _, _ = load_for_inference(adapter)
    part = whole = 0.0
    for name, layer in live.base_model.model.named_modules():
        if hasattr(layer, "get_delta_weight"):
            update = layer.get_delta_weight("default").detach().double()
            before = held_weight(layer.get_base_layer(), torch.float32)
            part += float(((written.read(f"{name}.weight")[0] - before) * update).sum())
            whole += float((update * update).sum())
    # 12,288 entries are rounded by up to about 30 times their update: standard deviation 0.05.
    assert part / whole == pytest.approx(1, abs=0.2)


@pytest.mark.parametrize("scale", [0.002, 0.0])
def test_the_base_again_is_refused_and_nothing_is_written(tmp_path: Path, scale: float) -> None:
    """A base stored in nf4 has no dense original: rounding to its own grid again does not change the codes."""
    dense = save_base(tmp_path / "dense", torch.bfloat16)
    policy = resolve_precision(dense, "bfloat16", "nf4", "cpu")
    load(dense, policy).save_pretrained(tmp_path / "base")
    tokenizer().save_pretrained(tmp_path / "base")
    policy = resolve_precision(tmp_path / "base", "bfloat16", None, "cpu")
    settings: dict[str, Any] = {"r": 4, "target_modules": TARGETS, "task_type": "CAUSAL_LM"}
    model = add_lora(load(tmp_path / "base", policy), policy, **settings)
    adapter = save_trained(model, tmp_path / "adapter", seed=1, scale=scale)
    there = sorted(tmp_path.iterdir())
    headline = "would lose what was learned" if scale else "nothing was merged"
    with pytest.raises(CheckpointError, match=headline) as caught:
        merge_adapter(adapter, tmp_path / "merged", stored="nf4")
    assert sorted(tmp_path.iterdir()) == there
    if scale:
        (problem,) = caught.value.problems
        assert (
            "of what was learned is kept; 100.0 % of the changed entries have the same codes as in the base"
            in problem.given
        )
        command = problem.fix.removeprefix("merge with ").partition(" (")[0]
        form = dict(zip(*[iter(command.split())] * 2, strict=True))
        assert form.keys() <= {"--dtype", "--gguf", "--quantization"}
        kept = merge_adapter(
            adapter, tmp_path / "kept", dtype=form.get("--dtype", "auto"), stored=form.get("--quantization")
        )
        assert kept.logits is not None
        assert kept.logits.kept is not None
        assert kept.logits.kept >= 0.98


def test_an_update_below_half_a_step_is_kept_on_average() -> None:
    base = torch.ones(100_000)
    step = 2**-7
    stored = unbiased("w", base + step / 10, torch.bfloat16).float()
    assert set(stored.tolist()) == {1.0, 1.0 + step}
    # 100,000 draws with probability 1 in 10: standard deviation 0.001
    assert float((stored - base).mean()) == pytest.approx(step / 10, abs=5e-3 * step)
    assert torch.equal(unbiased("w", base + step, torch.bfloat16), (base + step).bfloat16())
    half = unbiased("w", base + 2**-13, torch.float16).float()
    assert float((half - base).mean()) == pytest.approx(2**-13, abs=2**-10 * 8e-3)
    assert torch.equal(unbiased("w", base + 1e-5, torch.float32), base + 1e-5)


@pytest.mark.parametrize("form", ["nf4", "int8", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1"])
def test_codes_are_the_same_where_nothing_changes_but_the_scale(form: str) -> None:
    values = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    assert codes(values, form).numel() >= values.numel()
    assert torch.equal(codes(values, form), codes(values * 2, form))
    others = values.roll(1, -1)
    assert (codes(values, form) != codes(others, form)).float().mean() > 0.5


@few("positions", [16, 128], 16)
def test_a_model_of_few_positions_is_merged(tmp_path: Path, positions: int) -> None:
    config = transformers.GPT2Config(vocab_size=64, n_embd=64, n_layer=1, n_head=2, n_positions=positions)
    torch.manual_seed(0)
    base = tmp_path / "base"
    transformers.GPT2LMHeadModel(config).save_pretrained(base)
    tokenizer().save_pretrained(base)
    policy = resolve_precision(base, "float32", "nf4", "cpu")
    model = add_lora(load(base, policy), policy, r=4, target_modules=["c_attn"])
    adapter = save_trained(model, tmp_path / "adapter", seed=1, scale=0.05)
    report = merge_adapter(adapter, tmp_path / "merged", rows=Rows((([5] * 200, [5] * 200),), "rows of t"))
    assert report.logits is not None
    assert report.logits.tokens == positions
    assert report.logits.kept == pytest.approx(1, abs=1e-4)


def test_olora_on_a_quantized_base_is_merged_into_what_is_left_of_it(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base")
    policy = resolve_precision(base, "float32", "nf4", "cpu")
    model = add_lora(load(base, policy), policy, r=4, target_modules=TARGETS, init_lora_weights="olora")
    adapter = save_trained(model, tmp_path / "adapter", seed=1, scale=0.05)
    text = torch.arange(3, 20)[None]
    with torch.no_grad():
        wanted = model.eval()(input_ids=text).logits
        report = merge_adapter(adapter, tmp_path / "merged")
        merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
        torch.testing.assert_close(merged(input_ids=text).logits, wanted, atol=2e-5, rtol=0)
    assert report.logits is not None
    assert report.logits.max_abs < 2e-5


def test_the_command_measures_on_the_rows_that_were_held_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from isotype.cli.main import main

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("isotype.train.callback.before_first_step", lambda *_: None)
    save_base(tmp_path / "base")
    rows = [{"prompt": "a careful engineer ", "completion": f"decides {'dtype ' * n}"} for n in range(1, 21)]
    Path("t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = (
        "sft --model_name_or_path base --dataset_name t.jsonl --quantization nf4 --max_steps 1 --device cpu --dtype float32"
        " --eval_split 5 --output_dir run --learning_rate 1e-2 --report_to none --save_strategy no"
    )
    assert main(command.split()) == 0
    monkeypatch.chdir("/")
    assert main(["merge", str(tmp_path / "run"), "-o", str(tmp_path / "merged")]) == 0
    from isotype.train.rows.measurement_rows import rows_of_training

    held, why_not = rows_of_training(tmp_path / "run")
    assert why_not is None
    assert held is not None
    assert held.source == f"held-back rows of {tmp_path}/t.jsonl (5)"
    assert [labels[:3] for _, labels in held.texts] == [[-100] * 3] * 5
    (tmp_path / "t.jsonl").unlink()
    assert rows_of_training(tmp_path / "run")[0] is None
    assert "were not read again" in str(rows_of_training(tmp_path / "run")[1])
