"""Trainable parameters that get no gradient: each set-up is run for real, too."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import peft
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import isotype
from isotype.records.reach import Unreached
from isotype.rules import ist307_no_gradient
from tests.reality import real_step
from tests.rules.samples import call, operand, trace, weight
from tests.rules.traces import BF16, FP16, FP32, WHOLE, batch, found, llama, of_llama, traced, verified
from tests.zoo import ARCHITECTURES

pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")

RULE = "ist307_no_gradient"
STEP = ("forward", "backward")
WORDS = {"input_ids": torch.arange(8).view(2, 4)}


class Adapted(nn.Module):
    """A frozen embedding and layer, an adapter beside it, a head; the layer is checkpointed, or runs without gradients."""

    def __init__(self, how: str, head: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.layer = nn.Embedding(8, 16), nn.Linear(16, 16)
        self.lora, self.head = nn.Linear(16, 16), nn.Linear(16, 8)
        self.how = how
        for frozen in (self.embed, self.layer, *([] if head else [self.head])):
            frozen.requires_grad_(False)

    def block(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.layer(hidden) + self.lora(hidden)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(input_ids)
        if self.how == "no_grad":
            with torch.no_grad():
                hidden = self.block(hidden)
        else:
            hidden = checkpoint(self.block, hidden, use_reentrant=self.how == "reentrant")
        out: torch.Tensor = self.head(hidden)
        return out


@pytest.mark.real_cpu
@pytest.mark.parametrize("autocast", [None, BF16])
def test_adapters_inside_of_a_reentrant_checkpoint_stand_still(autocast: torch.dtype | None) -> None:
    model = Adapted("reentrant")
    assert real_step(model, WORDS, autocast).error is None
    assert (model.lora.weight.grad is None, model.head.weight.grad is None) == (True, False)
    (finding,) = verified(Adapted("reentrant"), WORDS, "IST307", autocast=autocast)
    assert finding.severity == "warning"
    assert finding.message == "no gradient reaches 2 of 4 trainable parameters"
    assert finding.cause.startswith("CheckpointFunction runs lora.weight and others at test_ist307.py:")
    assert [(each.description, each.verified) for each in finding.fixes] == [
        ("let the outputs of embed require gradients", True),
        ("checkpoint with use_reentrant=False, or call model.enable_input_require_grads()", False),
    ]


@pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")
def test_a_tower_inside_of_a_reentrant_checkpoint_whose_language_model_alone_requires_gradients() -> None:
    """unslothai/unsloth #5039: the hook that makes inputs require gradients is on the text's embeddings alone."""
    sees = ARCHITECTURES["gemma3-vl"]
    model: Any = peft.get_peft_model(sees.build(FP32), peft.LoraConfig(r=4, target_modules="all-linear"))  # type: ignore[arg-type]
    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": True})
    model.disable_input_require_grads()  # PEFT's and transformers' own, which know towers
    model.get_input_embeddings().register_forward_hook(lambda module, args, output: output.requires_grad_())
    model(**sees.batch()).loss.backward()
    idle = [name for name, each in model.named_parameters() if each.requires_grad and each.grad is None]
    assert idle
    assert all("vision_tower" in name for name in idle)
    (finding,) = (
        each
        for each in isotype.check(model, sees.batch(), device="a100", phases=STEP, wiring=False).findings
        if each.code == "IST307"
    )
    assert finding.message == f"no gradient reaches {len(idle)} of 52 trainable parameters"
    assert finding.fixes[0].description.endswith("vision_tower.embeddings require gradients")
    assert finding.fixes[0].verified


@pytest.mark.real_cpu
def test_a_loss_of_several_elements_is_an_error() -> None:
    def losses(model: nn.Module) -> torch.Tensor:
        values: torch.Tensor = model(**WORDS).logsumexp(-1)
        return values

    model = Adapted("plain")
    error = real_step(model, losses).error
    (finding,) = isotype.check(model, losses, device="cpu", phases=STEP).errors
    assert (finding.code, finding.phase) == ("IST307", "backward")
    assert (finding.message, finding.cause[-6:]) == (
        "the loss has 8 elements: backward raises",
        "[2, 4]",
    )
    assert finding.notes == (f"the device raises: {error}",)
    assert isotype.check(model, lambda model: losses(model).mean(), device="cpu", phases=STEP).ok


@pytest.mark.real_cpu
def test_a_backward_without_anything_to_do_is_an_error_and_is_repaired() -> None:
    model = Adapted("reentrant", head=False)
    error = real_step(model, WORDS).error
    report = isotype.check(model, WORDS, device="cpu")
    (finding,) = report.errors
    assert (finding.code, finding.phase) == ("IST307", "backward")
    assert finding.message == "no gradient reaches 2 of 2 trainable parameters: backward raises"
    assert finding.notes == (f"the device raises: {error}",)
    repairs = isotype.repair(model, report)
    assert real_step(model, WORDS).error is None
    assert model.lora.weight.grad is not None
    repairs.undo()
    model.zero_grad()
    assert str(real_step(model, WORDS).error) == str(error)


class Switching(nn.Module):
    """A sum over two adapters: PEFT's `set_adapter` freezes the first when it activates the second."""

    def __init__(self, thaws: bool) -> None:
        super().__init__()
        self.thaws, config = thaws, peft.LoraConfig(target_modules=["body"], init_lora_weights=False)
        self.net = peft.get_peft_model(Pooled("ignored"), config, "first")  # type: ignore[arg-type]
        self.net.add_adapter("second", config)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        sums = torch.zeros(())
        for name in ("first", "second"):
            self.net.set_adapter(name)
            if self.thaws:
                self.net.requires_grad_(True)
            sums = sums + self.net(input_ids).mean()
        return sums


@pytest.mark.parametrize("thaws", [False, True])
def test_an_adapter_that_the_forward_freezes_after_its_use(thaws: bool) -> None:
    """huggingface/transformers #32084."""
    model = Switching(thaws)
    model(**WORDS).backward()
    assert all(
        (p.grad is None) != thaws for name, p in model.named_parameters() if "body.lora_A.first" in name
    )
    findings = [
        f for f in isotype.check(Switching(thaws), WORDS, device="cpu").findings if f.code == "IST307"
    ]
    assert [(f.severity, f.message) for f in findings if not thaws] == [
        ("warning", "2 parameters get no gradient: frozen before the backward")
    ][thaws:]
    for finding in findings[: not thaws]:
        assert finding.cause.startswith("the code at test_ist307.py:")
        assert "set_adapter() freezes all other adapters" in finding.fixes[0].description
        assert "first.weight" in finding.cause


def test_a_frozen_adapter_whose_inputs_require_gradients() -> None:
    """prepare_model_for_kbit_training after get_peft_model: the backward runs, and trains nothing."""
    model = frozen_adapter()
    model.enable_input_require_grads()
    inputs = {"input_ids": torch.ones(1, 4, dtype=torch.long)}
    inputs["labels"] = inputs["input_ids"]
    (finding,) = verified(model, inputs, "IST307")
    assert finding.message == "no parameter is trainable: the step trains nothing"
    assert finding.fixes[0].verified


def test_what_runs_under_no_grad() -> None:
    (finding,) = found(RULE, traced(Adapted("no_grad"), WORDS))
    assert finding.cause.startswith(
        "gradients are off where lora.weight and others is used at test_ist307.py:"
    )
    assert finding.fixes[0].description.startswith("run lora outside of torch.no_grad() at test_ist307.py:")


class WithPooler(nn.Module):
    """An embedding and a layer whose mean is used; as in BERT, a pooler runs, too, and its output is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layer, self.pooler = nn.Embedding(8, 16), nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, input_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.layer(self.embed(input_ids))
        return hidden.mean(1), self.pooler(hidden[:, 0])


def cached_loss(model: nn.Module) -> torch.Tensor:
    """GradCache, as in sentence-transformers' `CachedMultipleNegativesRankingLoss`: the backward runs the forward again."""
    with torch.no_grad():
        means = model(WORDS["input_ids"])[0]
    means.requires_grad_()
    loss = means.square().mean()
    (gradient,) = torch.autograd.grad(loss, means)

    def again(_: torch.Tensor) -> None:
        with torch.enable_grad():
            (model(WORDS["input_ids"])[0] * gradient).sum().backward()

    loss = loss.detach().requires_grad_()
    loss.register_hook(again)
    return loss


def test_a_forward_without_gradients_that_the_backward_runs_again() -> None:
    model = WithPooler()
    cached_loss(model).backward()
    assert (model.layer.weight.grad is None, model.pooler.weight.grad is None) == (False, True)
    assert found(RULE, traced(WithPooler(), cached_loss)) == []


def frozen_adapter() -> Any:
    return llama().requires_grad_(False)


def disabled_adapter() -> Any:
    model = llama()
    model.base_model.disable_adapter_layers()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)
    return model


def detached(model: nn.Module) -> torch.Tensor:
    return model(**batch()).loss.detach()  # type: ignore[no-any-return]


@pytest.mark.real_cpu
@pytest.mark.parametrize(
    ("build", "inputs", "cause", "verified_fixes"),
    [
        (frozen_adapter, batch(), "the adapter is frozen", ["train the adapter"]),
        (disabled_adapter, batch(), "the forward does not use base_model.", []),
        (
            llama,
            detached,
            "the loss is computed from detached values at test_ist307.py:",
            [],
        ),
    ],
)
def test_why_none_is_reached(
    build: Callable[[], Any], inputs: Any, cause: str, verified_fixes: list[str]
) -> None:
    error = real_step(build(), inputs, phases=("forward", "backward")).error
    assert "does not require grad and does not have a grad_fn" in str(error)
    (finding,) = verified(build(), inputs, "IST307")
    assert finding.severity == "error"
    assert finding.cause.startswith(cause)
    assert [each.description for each in finding.fixes if each.verified] == verified_fixes


def test_adapters_of_a_projector_need_pictures() -> None:
    config = peft.LoraConfig(target_modules=r".*multi_modal_projector.*linear_\d")
    model = peft.get_peft_model(ARCHITECTURES["llava-vl"].build(torch.float32), config)
    finding, *_ = [
        finding
        for finding in isotype.check(model, batch(), device="cpu").findings
        if finding.code == "IST307"
    ]
    assert finding.severity == "error"
    assert "rows with images" in str(finding.fixes)
    assert "enable_adapter_layers" not in str(finding.fixes)


@pytest.mark.real_cpu
def test_a_scaler_has_nothing_to_unscale() -> None:
    """The loss requires a gradient, by something that is no parameter of the model."""
    other = torch.zeros(1, requires_grad=True)

    def loss(model: nn.Module) -> torch.Tensor:
        return (model(**WORDS).detach() * other).sum()

    error = real_step(Adapted("plain"), loss, FP16, scaler=True).error
    (finding,) = verified(Adapted("plain"), loss, "IST307", autocast=FP16, phases=WHOLE)
    assert finding.message == "no gradient reaches 4 of 4 trainable parameters: GradScaler.step raises"
    assert finding.notes == (f"the device raises: {error}",)
    (silent,) = verified(Adapted("plain"), loss, "IST307", phases=WHOLE)
    assert silent.severity == "warning"


def test_steps_that_train_are_silent() -> None:
    def accumulated(model: nn.Module) -> torch.Tensor:
        out = model(**WORDS).mean()
        out.backward()
        return out.detach()  # type: ignore[no-any-return]

    assert found(RULE, traced(Adapted("plain"), WORDS)) == []
    assert found(RULE, traced(Adapted("plain"), accumulated)) == []
    assert found(RULE, of_llama()) == []
    assert found(RULE, traced(Adapted("plain").requires_grad_(False), WORDS)) == []


class Pooled(nn.Module):
    """Two linear layers behind a frozen embedding; of one the result is ignored, or it is run as `how` says."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.body, self.pool, self.head = (
            nn.Embedding(8, 16), nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 8)
        )  # fmt: skip
        self.how = how

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(input_ids)
        if self.how == "no_grad":
            with torch.no_grad():
                hidden = hidden + self.pool(hidden)
        elif self.how == "reentrant":
            hidden = hidden + checkpoint(self.pool, hidden, use_reentrant=True)
        else:
            self.pool(hidden + 1)
        out: torch.Tensor = self.head(self.body(hidden))
        return out


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(
    ("how", "severity", "cause"),
    [
        ("ignored", "note", "the loss does not depend on results that are computed with "),
        ("no_grad", "warning", "gradients are off where "),
        ("reentrant", "warning", "CheckpointFunction runs "),
    ],
)
def test_adapters_that_reach_no_loss_are_told_why(how: str, severity: str, cause: str, fused: bool) -> None:
    model = peft.get_peft_model(Pooled(how), peft.LoraConfig(target_modules=["body", "pool"]))
    if fused:
        assert len(isotype.fuse(model).fused) == 2
    report = isotype.check(model, WORDS, device="cpu", verify=False)
    (finding,) = [each for each in report.findings if each.code == "IST307"]
    assert (finding.severity, finding.message) == (
        severity,
        "no gradient reaches 2 of 4 trainable parameters",
    )
    assert finding.cause.startswith(cause)
    assert "pool.lora_" in finding.cause
    assert ("use_reentrant" in str(finding.fixes)) == (how == "reentrant")


class Siblings(Pooled):
    """Two layers that a fused model runs as one; of one the result is ignored."""

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(input_ids)
        used, _ = self.body(hidden), self.pool(hidden)
        out: torch.Tensor = self.head(used)
        return out


def test_of_fused_siblings_one_may_be_ignored() -> None:
    """torch calls the hooks of parameters whose gradient is undefined, too."""
    model = peft.get_peft_model(Siblings("siblings"), peft.LoraConfig(target_modules=["body", "pool"]))
    assert len(isotype.fuse(model).fused) == 2
    report = isotype.check(model, WORDS, device="cpu", verify=False)
    assert "IST199" not in [each.code for each in report.findings]


class Net:
    """What a training loop switches on around its forward."""

    active = False


class Switched(nn.Module):
    def __init__(self, net: Net) -> None:
        super().__init__()
        self.net, self.base = net, nn.Linear(8, 8).requires_grad_(False)
        self.down, self.up = nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.base(x)
        return made + self.up(self.down(x)) if self.net.active else made


class Checkpointed(nn.Module):
    """Blocks of adapters under gradient checkpointing."""

    def __init__(self, net: Net, reentrant: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.blocks = nn.ModuleList(Switched(net) for _ in range(2))
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(x)
        for block in self.blocks:
            hidden = torch.utils.checkpoint.checkpoint(block, hidden, use_reentrant=self.reentrant)
        return hidden


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("until", ["backward", "forward"])
def test_adapters_that_are_off_while_a_layer_is_computed_again(reentrant: bool, until: str) -> None:
    net = Net()
    model = Checkpointed(net, reentrant)

    def loss(module: nn.Module) -> torch.Tensor:
        net.active = True
        made: torch.Tensor = module(torch.ones(2, 8)).square().sum()
        net.active = until == "backward"
        return made

    report = isotype.check(model, loss, verify=False)
    codes = [(each.code, each.severity) for each in report.findings]
    if until == "backward":
        assert codes == []
    else:
        assert codes == [("IST307", "warning") if reentrant else ("IST107", "error")]
        assert (
            "but the recomputation of gradient checkpointing does not" in report.findings[0].cause
            or not reentrant
        )
    assert "active" not in vars(net)  # the trace leaves nothing behind
    made = loss(model)
    if until == "forward" and not reentrant:
        with pytest.raises(torch.utils.checkpoint.CheckpointError):
            made.backward()
        return
    made.backward()
    grads = [block.down.weight.grad is not None for block in model.blocks]  # type: ignore[union-attr]
    assert all(grads) == (until == "backward")


def test_a_model_that_another_optimizer_trains_is_not_counted() -> None:
    """SheldonTsui/GOF_NeurIPS2021 #2: the generator ran under torch.no_grad(), the discriminator has gradients."""
    both = [weight(f"{name}.weight", trainable=True) for name in ("generator", "discriminator")]
    used = call("aten.mm.default", operand(BF16, "parameter", "generator.weight"))
    step = trace(both, [used])
    step = replace(step, reached=0, unreached=(Unreached("generator.weight", "generator", ignored=True),))
    (finding,) = ist307_no_gradient.find(step)
    assert finding.message == "no gradient reaches 1 of 2 trainable parameters"
    assert "torch.no_grad()" in finding.fixes[0].description


def test_an_adapter_outside_of_the_checkpointed_layers_is_not_left_out_by_recomputation() -> None:
    """hiyouga/LLaMA-Factory #7755: adapters on all linear layers include the pooling head, whose output nothing uses."""

    class Tower(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
            self.head = nn.Linear(8, 8)

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                hidden = checkpoint(layer, hidden, use_reentrant=False)
            self.head(hidden)
            return hidden

    model = peft.get_peft_model(Tower(), peft.LoraConfig(target_modules="all-linear"))
    report = isotype.check(model, lambda module: module(torch.ones(2, 8)).sum(), verify=False)
    matches = [(f.code, f.severity) for f in report.findings if f.code == "IST307"]
    assert matches == [("IST307", "note")]
    assert report.findings[0].cause.startswith(
        "the loss does not depend on results that are computed with base_model.model.head."
    )
