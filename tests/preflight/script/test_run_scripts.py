"""`isotype run` on scripts that do other things than train first, or that an error does not end."""

from __future__ import annotations

import re
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from rich.console import Console

from isotype.cli.run import run
from isotype.model.walk import living
from isotype.preflight.script.diagnosis import Diagnosis
from tests.pairwise import pairwise

MODEL = """\
import sys
import torch
from torch import nn
import torch.nn.functional as F

class Net(nn.Module):
    def __init__(self, head=torch.bfloat16):
        super().__init__()
        self.embed = nn.Embedding(32, 8, dtype=torch.bfloat16)
        self.head = nn.Linear(8, 16, dtype=head)

    def forward(self, ids, labels=None):
        logits = self.head(self.embed(ids))
        if labels is None:
            return logits, None
        return logits, F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())

ids = torch.arange(12).reshape(2, 6)

def train(model, steps=2):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        _, loss = model(ids, ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print("trained")
"""

Runs = Callable[..., tuple[int, str, str]]


@pytest.fixture
def runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Runs]:
    """Runs a script that goes on after `MODEL`: its status, standard output and standard error."""
    monkeypatch.setenv("COLUMNS", "160")

    def run_it(script: str, *flags: str) -> tuple[int, str, str]:
        path = tmp_path / "train.py"
        path.write_text(MODEL + script)
        capsys.readouterr()
        try:
            status = run([*flags, str(path)], Console())
        except SystemExit as leaving:
            status = int(leaving.code or 0)
        out, err = capsys.readouterr()
        for scaler in living(torch.amp.GradScaler):
            scaler._enabled = False  # a scaler of this script would count as one of the next
        return status, out, err

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield run_it


# ------------------------------------------------------------------------------------------ before the first step


@pytest.mark.parametrize(
    "evaluation",
    [
        "with torch.no_grad(): model(ids, ids)\n",
        "with torch.inference_mode(): model.eval()(ids)\n",
        "with torch.no_grad():\n    for _ in range(5): model.embed(ids)\n    model(ids)\n",
    ],
    ids=["an evaluation", "in inference mode", "after many forwards"],
)
def test_a_crash_before_the_first_step_is_explained(runs: Runs, evaluation: str) -> None:
    status, out, err = runs(f"model = Net(torch.float32)\n{evaluation}train(model)\n")
    assert (status, out) == (1, "")
    after = err.partition("RuntimeError: mat1 and mat2 must have the same dtype")[2]
    assert err.count("error[IST101]") == 1
    assert "  --> head   aten.addmm.default   generate" in after
    assert "   = cause  head.weight is float32" in after
    assert "safe; verified: " in after
    assert "no training step was recorded" not in err


def test_a_training_after_the_recording_stopped_is_not_denied(runs: Runs) -> None:
    script = """
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    optimizer.step()
train(model)
"""
    _, _, err = runs(script)
    assert "no module with parameters that require a gradient was called before the recording stopped" in err


def test_a_parametrization_starts_no_step(runs: Runs) -> None:
    """huggingface/peft #3601: torch calls a parametrization, here of a low rank, when it is registered."""
    script = """
class Low(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.ones(32, 1)), nn.Parameter(torch.zeros(1, 8))

    def forward(self, weight):
        return weight + (self.a @ self.b).to(weight.dtype)

model = Net(torch.float32)
nn.utils.parametrize.register_parametrization(model.embed, "weight", Low())
train(model)
"""
    _, _, err = runs(script)
    assert "isotype: predicted before the step:" in err
    assert "   = cause  head.weight is float32" in err


def test_a_cpu_s_error_is_none_of_the_gpu_for_which_the_step_is_checked(runs: Runs) -> None:
    """huggingface/transformers #28868: a CPU has no bfloat16 kernel for this interpolation, CUDA has one."""
    script = """
class Tower(Net):
    def forward(self, ids, labels=None):
        grid = self.embed(ids)[None]
        return None, F.interpolate(grid, size=(4, 4), mode="bicubic", antialias=True).float().sum()

train(Tower())
"""
    _, _, err = runs(script, "--device", "h100")
    assert (
        "this CPU has no kernel for these dtypes, but a trace for NVIDIA H100 SXM 80 GB does not show the error:"
        in err
    )
    assert "fails on NVIDIA H100" not in err
    transform = script.replace(
        'F.interpolate(grid, size=(4, 4), mode="bicubic", antialias=True)',
        "torch.fft.rfft(grid.half()).abs()",
    )
    _, _, err = runs(transform, "--device", "h100")
    assert "this CPU has no kernel for these dtypes, but a trace for NVIDIA H100" in err
    _, _, err = runs("Net()(ids)[0].detach().numpy()\ntrain(Net())\n", "--device", "h100")
    assert "fails on NVIDIA H100" in err


@pytest.mark.exhaustive
def test_a_loss_that_the_gpu_refuses_as_well(runs: Runs) -> None:
    """speechbrain/speechbrain #1803: neither a CPU nor CUDA has a float16 kernel for CTC. The loss was not traced."""
    script = """
model = Net()
scores = model(ids)[0].half().transpose(0, 1)
F.ctc_loss(scores, ids % 3 + 1, (6, 6), (6, 6)).backward()
"""
    _, _, err = runs(script, "--device", "h100")
    after = err.partition("NotImplementedError")[2]
    assert "This step fails on NVIDIA H100 SXM 80 GB" in after
    assert "the device raises: \"ctc_loss_cuda\" not implemented for 'Half'" in after


@pytest.mark.parametrize(("step", "codes"), [("scaler.scale(loss).backward()\nscaler.step(optimizer)", ["IST302"]), ("loss.backward()\noptimizer.step()", [])])  # fmt: skip
def test_only_a_scaler_that_the_script_uses_is_superfluous(runs: Runs, step: str, codes: list[str]) -> None:
    """A flag of the script may decide whether the GradScaler is used."""
    script = f"""
model, scaler = Net(torch.float32).float(), torch.amp.GradScaler("cuda")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with torch.autocast("cuda", torch.bfloat16):
    _, loss = model(ids, ids)
{step}
"""
    _, _, err = runs(script, "--device", "h100")
    assert re.findall(r"\[(IST\d+)\]", err) == codes


def test_a_loss_module_that_the_script_calls_after_the_forward(runs: Runs) -> None:
    """Lightning-AI/pytorch-lightning #13871: the trace of the forward does not reach the loss, which is a part of the model."""
    script = """
class Scores(Net):
    def __init__(self):
        super().__init__(torch.float32)
        self.loss = nn.BCELoss()

    def forward(self, ids):
        return torch.sigmoid(self.head(self.embed(ids)))

model = Scores()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    with torch.autocast("cuda", torch.bfloat16):
        loss = model.loss(model(ids), torch.ones(2, 6, 16))
    loss.backward()
    optimizer.step()
"""
    _, _, err = runs(script, "--device", "h100")
    assert "error[IST109]: torch.binary_cross_entropy raises an error under autocast" in err
    assert "  --> loss   torch.binary_cross_entropy   forward" in err


def test_a_step_that_fails_in_its_forward_has_the_scaler_of_the_script(runs: Runs) -> None:
    script = """
model = nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cuda")
with torch.autocast("cuda", torch.float16):
    scores = model(torch.ones(2, 8))
    loss = scores.clamp(max=torch.quantile(scores.detach(), 0.9)).mean()
scaler.scale(loss).backward()
scaler.step(optimizer)
"""
    _, _, err = runs(script, "--device", "t4")
    assert "error[IST109]: torch.quantile has no kernel for float16 on this device" in err
    assert "   autocast float16   GradScaler   " in err


def test_the_autocast_of_a_gpu_promotes_the_operands_of_a_scatter(runs: Runs) -> None:
    """pytorch/pytorch #51730: the first result is bfloat16, the norm's is float32."""
    script = """
model, norm = nn.Linear(8, 8), nn.LayerNorm(8)
optimizer = torch.optim.SGD([*model.parameters(), *norm.parameters()], lr=0.1)
rows = torch.zeros(6, 8, dtype=torch.int64)
with torch.autocast("cuda", torch.bfloat16):
    y = model(torch.ones(6, 8, device="cuda"))
    loss = torch.zeros_like(norm(y.log())).scatter_add(0, rows, y).mean()
loss.backward()
optimizer.step()
print(loss.dtype)
"""
    status, out, err = runs(script, "--device", "a100")
    assert (status, out.split()) == (0, ["torch.float32"]), err
    assert "error[" not in err


def test_the_autocast_of_a_step_whose_operators_mostly_run_in_float32(runs: Runs) -> None:
    """Lightning-AI/pytorch-lightning #7078: a margin loss, whose weight alone is float16."""
    script = """
body, head = nn.Linear(8, 8), nn.Linear(8, 16, dtype=torch.float16)
optimizer = torch.optim.SGD([*body.parameters(), *head.parameters()], lr=0.1)
scaler = torch.amp.GradScaler("cuda")
with torch.autocast("cuda", torch.float16):
    scores = head(F.normalize(body(torch.ones(2, 8))))
    loss = sum(-F.log_softmax(scores.pow(power), -1).exp().norm() for power in range(1, 9))
scaler.scale(loss).backward()
scaler.step(optimizer)
"""
    _, _, err = runs(script, "--device", "t4")
    assert "   autocast float16   GradScaler   an optimizer" in err
    assert "error[IST301]" in err


def test_a_crash_in_the_first_step_may_be_fixed_by_autocast(runs: Runs) -> None:
    """Only an evaluation, which this script does not run, would still fail outside of autocast."""
    _, _, err = runs("train(Net(torch.float32))\n", "--no-preflight")
    assert "= help   run the step under autocast to bfloat16   (a setting; safe; verified: " in err
    assert "more operator" not in err


def test_what_an_evaluation_computes_outside_of_a_module_is_explained(runs: Runs) -> None:
    status, _, err = runs(
        "model = Net()\nwith torch.no_grad():\n    hidden = model.embed(ids)\n"
        "    hidden.float() @ model.head.weight.t()\n"
    )
    assert status == 1
    assert "error[IST101]" in err
    assert "   = cause  a cast to float32 at train.py:31" in err


def test_an_evaluation_leaves_the_first_step_to_be_watched(runs: Runs) -> None:
    status, out, err = runs(
        "model = Net()\nwith torch.no_grad():\n    for _ in range(2): model(ids, ids)\ntrain(model)\n"
        "assert not any(vars(p).get('_post_accumulate_grad_hooks') for p in model.parameters())\n",
        "--no-preflight",
    )
    assert (status, out) == (0, "trained\n")
    assert "isotype: step 1 watched: " in err
    assert "error[" not in err


def test_an_error_before_the_first_step_that_the_script_gets_over_is_none(runs: Runs) -> None:
    status, out, err = runs(
        "try:\n    with torch.no_grad(): Net(torch.float32)(ids)\nexcept RuntimeError: pass\ntrain(Net())\nsys.exit(3)\n",
        "--no-preflight",
    )
    assert (status, out) == (3, "trained\n")
    assert "error[" not in err
    assert "isotype: step 1 watched: " in err


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_moving_average_in_16_bits_is_reported(runs: Runs, dtype: str) -> None:
    script = f"""
model = Net()
average = [p.detach().clone().to(torch.{dtype}) for p in model.parameters()]
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    model(ids, ids)[1].backward()
    optimizer.step()
    for kept, p in zip(average, model.parameters()):
        p.data.add_(p.grad, alpha=-0.1)  # an update of the weights themselves
        kept.lerp_(p.detach().to(kept.dtype), 1e-4)
    optimizer.zero_grad()
"""
    status, _, err = runs(script)
    assert status == 0
    assert ("warning[IST503]: a bfloat16 tensor is changed in place" in err) == (dtype == "bfloat16")
    line = next(n for n, text in enumerate((MODEL + script).splitlines(), 1) if "lerp_" in text)
    assert (f"addition at train.py:{line}" in err) == (dtype == "bfloat16")


@pytest.mark.parametrize(
    ("dtype", "steps", "reported"), [("bfloat16", 2, True), ("bfloat16", 1, False), ("float32", 2, False)]
)
def test_a_merge_between_two_steps_is_reported(runs: Runs, dtype: str, steps: int, reported: bool) -> None:
    """A merge after the last step is no loss that the training repeats."""
    script = f"""
import peft
net = nn.Sequential(nn.Linear(8, 8)).to(torch.{dtype})
model = peft.get_peft_model(net, peft.LoraConfig(r=2, target_modules=["0"]), autocast_adapter_dtype=False)
optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
for _ in range({steps}):
    model(torch.ones(2, 8, dtype=torch.{dtype})).float().square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    model.merge_adapter()
    model.unmerge_adapter()
"""
    status, _, err = runs(script, "--no-preflight")
    assert status == 0
    assert ("warning[IST503]: adapters are merged into a bfloat16 weight" in err) == reported


@pytest.mark.parametrize(
    ("layer", "bits"),
    [("Linear4bit(64, 64)", "4-bit"), ("Linear8bitLt(64, 64, has_fp16_weights=False)", "int8")],
    ids=["4-bit", "int8"],
)
def test_a_merge_into_quantized_weights_is_reported(runs: Runs, layer: str, bits: str) -> None:
    """huggingface/peft #2501: GRPO with QLoRA merges the adapter before each rollout."""
    script = f"""
import bitsandbytes as bnb
import peft
net = nn.Sequential(bnb.nn.{layer}).to("cpu")
net.is_loaded_in_4bit = net.is_loaded_in_8bit = True
model = peft.get_peft_model(net, peft.LoraConfig(r=2, target_modules=["0"]))
optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
for _ in range(2):
    model(torch.ones(2, 64)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    MERGE
"""
    status, _, err = runs(
        script.replace("MERGE", "model.merge_adapter(); model.unmerge_adapter()"), "--no-preflight"
    )
    assert status == 0
    assert f"warning[IST503]: adapters are merged into {bits} weights: most of a small update is lost" in err
    assert "   = cause  at bnb.py:" in err
    status, _, err = runs(script.replace("MERGE", "pass"), "--no-preflight")
    assert (status, "IST503" in err) == (0, False)


@pytest.mark.parametrize(
    ("code", "cause"),
    [
        ("model.merge_and_unload()", "merge_and_unload() at train.py:{} has removed the adapters"),
        ("net = model.unload()", "unload() at train.py:{} has removed the adapters"),
        ("net.requires_grad_(False)", ""),
        ("model.merge_and_unload(); net.requires_grad_(True)", ""),
    ],
)
def test_a_backward_after_the_adapters_were_removed(runs: Runs, code: str, cause: str) -> None:
    script = f"""
import peft
net = nn.Sequential(nn.Linear(8, 8))
model = peft.get_peft_model(net, peft.LoraConfig(r=2, target_modules=["0"]))
model(torch.ones(2, 8)).sum().backward()
{code}
net(torch.ones(2, 8)).sum().backward()
"""
    status, _, err = runs(script, "--no-preflight")
    line = next(n for n, text in enumerate((MODEL + script).splitlines(), 1) if text == code)
    assert status == int("requires_grad_(True)" not in code)
    assert cause.format(line) in err
    assert ("has removed" in err) == bool(cause)


def test_the_default_dtype_is_named_before_the_step_and_after_the_crash(runs: Runs) -> None:
    script = """
torch.set_default_dtype(torch.bfloat16)
net = nn.Sequential(nn.Linear(8, 8))
torch.set_default_dtype(torch.float32)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
net(torch.ones(2, 8)).sum().backward()
"""
    line = len(MODEL.splitlines()) + 2
    status, _, err = runs(script)
    assert status == 1
    cause = f"is float32 (train.py:{line} sets torch's default dtype, so later weights are bfloat16)"
    before, _, after = err.partition("isotype: predicted before the step:")
    assert cause in " ".join(before.split())
    assert cause in " ".join(after.split())


def test_a_second_training_in_the_script_is_explained_by_its_own_model(runs: Runs) -> None:
    """The first training's model is not the one whose gradients the GradScaler refuses."""
    script = """
def train(net):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    dtype = net[0].weight.dtype
    scaler.scale(net(torch.ones(2, 8, dtype=dtype)).float().mean()).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    return net

first = train(nn.Sequential(nn.Linear(8, 8)))
train(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)).half())
"""
    status, _, err = runs(script)
    assert status == 1
    assert "the cause is outside of the step" not in err
    assert "the script has cast" not in err
    assert (
        "error[IST301]: GradScaler does not accept the float16 gradients of 4 of 4 trainable parameters"
        in err
    )


def test_a_method_that_raises_before_the_first_step_is_explained_by_its_model(runs: Runs) -> None:
    """`vae.encode` is no forward, so the forward of its convolution was recorded."""
    script = """
class Vae(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3).half()

    def encode(self, pixels):
        return self.conv(pixels)

vae = Vae().requires_grad_(False)
with torch.no_grad():
    vae.encode(torch.ones(1, 3, 8, 8))
"""
    status, _, err = runs(script)
    assert status == 1
    assert "isotype: a trace of the call of Vae explains the error:" in err
    assert "  --> conv   torch.conv2d" in err
    assert "= cause  the input pixels is float32" in err


def test_an_adapter_that_reads_packed_codes_is_predicted_and_named_after_the_crash(runs: Runs) -> None:
    script = """
import bitsandbytes as bnb
import peft
net = nn.Sequential(bnb.nn.Linear4bit(64, 64, bias=False, compute_dtype=torch.float32)).to("cpu")
model = peft.get_peft_model(net, peft.LoHaConfig(r=2, target_modules=["0"]))
optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
model(torch.ones(2, 64)).sum().backward()
"""
    status, _, err = runs(script)
    assert status == 1
    _, _, after = err.partition("isotype: predicted before the step:")
    assert "error[IST403]: packed codes are used as a weight" in after
    assert "train quantized layers with LoRA" in after


@pytest.mark.parametrize("flags", [(), ("--no-preflight",)])
def test_a_step_that_makes_float16_weights_nan_is_an_error(runs: Runs, flags: tuple[str, ...]) -> None:
    """afiaka87/glide-finetune #5: Adam's epsilon and the squares of small gradients are zero in float16."""
    script = """
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)).half()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
for _ in range(2):
    (model(torch.ones(2, 8).half()).float() * 1e-2).mean().backward()
    optimizer.step()
"""
    _, _, err = runs(script, *flags)
    assert err.count("error[IST303]: 4 float16 parameters are trained without loss scaling: the first") == 1


def test_an_embedding_that_no_optimizer_holds_is_not_trained(runs: Runs) -> None:
    """matanbt/TROPT #8: the embedding only gives a prompt its first values."""
    script = """
model = nn.Embedding(32, 8).half()
prompt = model(ids[0]).detach().clone().requires_grad_(True)
optimizer = torch.optim.Adam([prompt], lr=1e-2)
for _ in range(2):
    prompt.float().square().mean().backward()
    optimizer.step()
"""
    assert "error[" not in runs(script)[2]


def test_float32_masters_beside_a_float16_model_are_no_finding(runs: Runs) -> None:
    """openai/guided-diffusion #44: the script scales its loss itself, and its optimizer holds flat masters."""
    script = """
model = nn.Linear(8, 8).half()
master = nn.Parameter(torch.cat([p.detach().float().reshape(-1) for p in model.parameters()]))
optimizer = torch.optim.AdamW([master], lr=1e-4)
for _ in range(2):
    (model(torch.ones(2, 8).half()).float().mean() * 2.0**20).backward()
    master.grad = torch.cat([p.grad.float().reshape(-1) for p in model.parameters()]) / 2.0**20
    optimizer.step()
"""
    status, _, err = runs(script)
    assert (status, "IST30" in err) == (0, False)


def test_a_moving_average_in_a_frozen_weight_of_the_model_is_reported(runs: Runs) -> None:
    """AndreasBergmeister/ram #6: the average is an adapter that the model does not use."""
    script = """
model = Net()
model.old = nn.Linear(8, 16, dtype=torch.float16).requires_grad_(False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    model(ids, ids)[1].backward()
    optimizer.step()
    model.old.weight.data.mul_(0.999).add_(model.head.weight.detach(), alpha=0.001)
"""
    assert "warning[IST503]: a float16 tensor is changed in place" in runs(script)[2]


def test_a_default_dtype_of_the_step_also_holds_in_the_trace_after_a_crash(runs: Runs) -> None:
    """Lightning's `bf16-true` changes torch's default dtype for the step only."""
    script = """
class Timed(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(8, 8)
    def forward(self):
        return self.embed(torch.rand(2, 8).float())
torch.set_default_dtype(torch.bfloat16)
model = Timed()
try:
    model().sum().backward()
finally:
    torch.set_default_dtype(torch.float32)
"""
    status, _, err = runs(script)
    assert status == 1
    assert err.count("cause  a cast to float32 at train.py:34") == 2, (
        err
    )  # before the step, and after the crash
    assert "rand returns float32" not in err


def test_a_cast_that_fsdp_makes_is_named(runs: Runs) -> None:
    script = """
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from isotype.compat.torch_fsdp import fake_process_group

with fake_process_group(1) as mesh:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
    model = Net().float()
    fully_shard(model.embed, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    train(model)
"""
    status, _, err = runs(script)
    assert status == 1
    assert "error[IST101]: float32 instead of bfloat16" in err
    assert re.search(r"cause  FSDP's output_dtype returns float32 at train.py:\d+", err)
    assert "updates" not in err  # the masters are float32, although FSDP2 has gathered them in bfloat16


def test_the_refusal_of_fsdp2_to_reduce_several_dtypes_together_is_explained(runs: Runs) -> None:
    """huggingface/accelerate #3985: float32 norms in a bfloat16 model that is trained as a whole."""
    script = """
from torch.distributed.fsdp import fully_shard
from isotype.compat.torch_fsdp import fake_process_group

with fake_process_group(1) as mesh:
    model = Net().bfloat16()
    model.head.float()
    fully_shard(model, mesh=mesh)
    train(model)
"""
    status, _, err = runs(script, "--no-preflight")
    assert status == 1
    assert "isotype: a trace of the script's last known step explains the error:" in err
    raised = re.search(r"FSDP raises: (.*?)\n +(.*)\n", err)
    assert raised is not None
    assert "{torch.bfloat16, torch.float32}" in " ".join(raised.groups())


def test_weights_that_fsdp_has_gathered_at_the_error_are_not_cast_by_the_script(runs: Runs) -> None:
    script = """
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from isotype.compat.torch_fsdp import fake_process_group

with fake_process_group(1) as mesh:
    model = Net().float()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    fully_shard(model, mesh=mesh, mp_policy=policy, ignored_params={*model.head.parameters()})
    train(model)
"""
    status, _, err = runs(script, "--no-preflight")
    assert status == 1
    assert "cause  head.weight is float32" in err
    assert "IST305" not in err  # all trainable parameters are float32


def test_fsdp1_gathers_weights_and_casts_inputs_but_not_buffers(runs: Runs) -> None:
    """pytorch/pytorch #143900."""
    script = """
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
from isotype.compat.torch_fsdp import fake_process_group

class Blurred(Net):
    def __init__(self):
        super().__init__()
        self.float()
        self.register_buffer("kernel", torch.ones(8, 8))
    def forward(self, x):
        x = self.head.weight.sum() * x
        return x @ self.kernel

with fake_process_group(1):
    mixed = MixedPrecision(param_dtype=torch.bfloat16)
    model = FullyShardedDataParallel(Blurred(), device_id=torch.device("cpu"), mixed_precision=mixed)
    model(torch.ones(2, 8)).sum().backward()
"""
    status, _, err = runs(script)
    assert status == 1
    assert "isotype: the first step is not traced before it runs: FSDP1 has flattened the parameters" in err
    assert "error[IST101]: float32 instead of bfloat16" in err
    assert "cause  the buffer _fsdp_wrapped_module.kernel is float32" in err
    assert "in place of float" not in err
    assert "train.py:51   (a line" not in err  # of `model(…)`, where no line casts


def test_a_trace_must_not_change_the_optimizer_of_deepspeed(runs: Runs) -> None:
    """DeepSpeed 0.19.8: a trace of an engine emptied the real optimizer's buckets, and the script's backward failed."""
    script = """
import threading, types

class Zero:
    def __init__(self):
        self.lock, self.buckets = threading.Lock(), [1]

class DeepSpeedEngine(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module, self.zero = module, Zero()
    def forward(self, *args):
        logits, loss = self.module(*args)
        self.zero.buckets.pop()
        return logits, loss

sys.modules["deepspeed"] = types.SimpleNamespace(DeepSpeedEngine=DeepSpeedEngine)
train(DeepSpeedEngine(Net()), steps=1)
del sys.modules["deepspeed"]
"""
    status, out, err = runs(script)
    assert (status, out) == (0, "trained\n")
    assert "not traced before it runs: a copy of the model would share DeepSpeed's optimizer" in err
    assert "step 1 watched" in err


# ----------------------------------------------------------------------------------------------- caught by the script


@pytest.mark.parametrize("steps", ["1", "2", "3"])
def test_an_error_that_the_script_caught_in_a_step_that_ended_is_not_what_ended_it(
    runs: Runs, steps: str
) -> None:
    status, out, err = runs(
        "model = Net()\ntry: model.head(torch.ones(2, 8))\nexcept RuntimeError: pass\n"
        "try:\n    model(ids, ids)\n    model.head(torch.ones(2, 8))\nexcept RuntimeError as error: print('caught')\n"
        "train(model)\nsys.exit(7)\n",
        "--no-preflight",
        "--steps",
        steps,
    )
    assert (status, out) == (7, "caught\ntrained\n")
    assert "Traceback" not in err
    assert "the watch failed" not in err


def test_whatever_is_wrong_with_the_diagnosis_the_script_ends_as_it_does(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> bool:
        raise StopIteration("of ours")

    monkeypatch.setattr(Diagnosis, "left", fails)
    monkeypatch.setattr(Diagnosis, "crashed", fails)
    failed = "isotype: isotype failed, but the script did not: StopIteration: of ours\n"
    assert runs("sys.exit(5)\n") == (5, "", failed)
    status, _, err = runs("1 / 0\n")
    assert status == 1
    assert err.endswith(f"ZeroDivisionError: division by zero\n{failed}")


def test_a_head_that_only_the_loss_uses_has_its_name(runs: Runs) -> None:
    """A loss by chunks, as of torchtune and NeMo Automodel: the forward of the whole model does not run."""
    status, _, err = runs("""
class Whole(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Embedding(32, 8), nn.Linear(8, 8)).bfloat16()
        self.lm_head = nn.Linear(8, 32, bias=False)

model = Whole()
hidden = model.body(ids)
losses = [F.cross_entropy(F.linear(part, model.lm_head.weight), labels) for part, labels in zip(hidden, ids)]
""")
    assert status == 1
    assert "error[IST101]: float32 instead of bfloat16" in err
    assert re.search(r"cause  lm_head.weight in the loss function is float32 at train.py:\d+", err)
    assert "allocate" not in err


# ---------------------------------------------------------------------------------------------- outside of any step


@pytest.mark.parametrize(
    ("script", "lines"),
    [
        (
            "import copy\nmodel = Net()\naverage = copy.deepcopy(model.head).float()\ntrain(model)\n"
            "with torch.no_grad():\n    kept, new = average.weight, model.head.weight\n    kept.lerp_(new, 0.01)\n",
            (
                "|   kept  float32  [16, 8]",
                "|   new  bfloat16  [16, 8]   head.weight",
                "= help   cast the tensors to one dtype at train.py:",
            ),
        ),
        (
            "model = Net()\ntrain(model)\nmodel(ids)[0].detach().numpy()\n",
            ("= help   NumPy has no bfloat16: write .float() before .numpy() at train.py:",),
        ),
        (
            "from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn\n"
            "model = Net(torch.float32)\naverages = AveragedModel(model.float(), multi_avg_fn=get_ema_multi_avg_fn())\nmodel.bfloat16()\n"
            "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\nfor _ in range(2):\n    with torch.autocast('cpu', torch.bfloat16): loss = model(ids, ids)[1]\n"
            "    loss.backward(); optimizer.step(); averages.update_parameters(model)\n",
            (
                "|   average  float32  [32, 8]   module.embed.weight",
                "|   parameter  bfloat16  [32, 8]   embed.weight",
                "isotype: AveragedModel holds 3 of 3 parameters in another dtype than the model, but the update needs",
                "= help   pass avg_fn=get_ema_avg_fn(DECAY) or get_swa_avg_fn() to AveragedModel instead of multi_avg_fn",
            ),
        ),
        (
            "model = Net(torch.float32).float()\noptimizer = torch.optim.AdamW(model.parameters(), fused=True)\n"
            "for dtype in (torch.float32, torch.bfloat16):\n    model.to(dtype)(ids, ids)[1].backward()\n"
            "    optimizer.step()\n    optimizer.zero_grad()\n",
            (
                "|   parameter  bfloat16  [32, 8]   embed.weight",
                "|   exp_avg  float32  [32, 8]",
                "= help   create the optimizer after the last cast of the model, or cast its states to the dtypes",
            ),
        ),
        (  # jsikyoon/dreamer-torch #2, SheldonTsui/GOF_NeurIPS2021 #2
            "model, other = Net(torch.float32).float(), nn.Linear(8, 1)\noptimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, other)]\n"
            "scaler = torch.amp.GradScaler('cpu')\nscaler.scale(model(ids, ids)[1]).backward()\n"
            "for optimizer in optimizers: scaler.step(optimizer)\n",
            (
                "= help   no parameter of this optimizer ([1, 8] and others) has a gradient: compute the loss outside of",
            ),
        ),
    ],
    ids=[
        "a moving average",
        "a metric",
        "averages of another dtype",
        "an optimizer's state",
        "an optimizer without gradients",
    ],
)
def test_a_crash_between_steps_is_shown_with_what_met_there(
    runs: Runs, script: str, lines: tuple[str, ...]
) -> None:
    status, _, err = runs(script, "--no-preflight")
    assert status == 1
    caused = "the script has cast" in err or "AveragedModel holds" in err
    lead = "" if caused else "the cause is outside of the step; "
    assert f"{lead}a trace of the script's last known step runs clean --> " in " ".join(err.split())
    assert not caused or "= cause" not in err
    for line in lines:
        assert line in " ".join(err.split()) or line in err


def test_a_cast_for_a_validation_is_named_as_the_cause(runs: Runs) -> None:
    """huggingface/diffusers #13895: the pipeline of a validation shares the trained model, and casts it."""
    status, _, err = runs(
        "model = Net(torch.float32).float()\noptimizer = torch.optim.AdamW(model.parameters())\n"
        "for epoch in range(2):\n    model(ids, ids)[1].backward()\n    optimizer.step()\n"
        "    optimizer.zero_grad()\n    with torch.no_grad(): model.half()(ids)\n"
    )
    assert status == 1
    assert "the script has cast embed.weight and others from float32 to float16: cast at train.py:" in err
    assert "if only a validation needs the cast, cast a copy of the model" in " ".join(err.split())


def test_a_target_of_the_scripts_own_loss_is_no_scratch_tensor(runs: Runs) -> None:
    """67372a/LoRA_Easy_Training_Scripts #8: the loss accepts a float32 target, and its backward refuses it."""
    status, _, err = runs(
        "model, target = Net(), torch.zeros(2, 6, 16)\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "F.huber_loss(model(ids)[0], target).backward()\n"
    )
    assert status == 1
    assert "error[IST105]: float32 instead of bfloat16 in the backward" in err
    assert "   = cause  a tensor in the loss function is float32 at train.py:" in err
    assert (
        "   = help   compute the loss in float32: write .float() after the prediction and the target" in err
    )
    assert "IST406" not in err


def test_a_wrapper_of_the_evaluated_model_is_no_other_model(runs: Runs) -> None:
    """hiyouga/LlamaFactory #4139: a script that only predicts."""
    status, _, err = runs(
        "class Wrapper(nn.Module):\n    def __init__(self): super().__init__(); self.net, self.out = Net(), nn.Linear(32, 2)\n"
        "    def forward(self, ids): return self.out(self.net(ids)[0].bfloat16())\n"
        "with torch.no_grad(): Wrapper()(ids)\n"
    )
    assert status == 1
    assert "error[IST101]" in err
    assert "another model of the script" not in err


_UNDER_AUTOCAST = """
def loss(model):
    with torch.autocast("cpu", torch.bfloat16): return model(ids, ids)[1]
model = Net(torch.float32)
model.head.register_buffer("cache", torch.zeros(2, 6, 16), persistent=False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2): loss(model).backward(); optimizer.step()
"""


@pytest.mark.parametrize(
    ("script", "lines"),
    [
        (
            "with torch.no_grad(): model.head(model.embed(ids))\n",
            (
                "isotype: a trace of the call of Linear explains the error:",
                "isotype: the training step runs under autocast to bfloat16, but this call runs without autocast",
                "error[IST101]: bfloat16 instead of float32",
                "= cause  the argument input is bfloat16",
            ),
        ),
        (
            "class Cached(nn.Module):\n    def __init__(self, net): super().__init__(); self.net = net\n"
            "    def forward(self, ids): self.net.head.cache[ids > 0] = self.net(ids)[0][ids > 0]\n"
            "with torch.no_grad(), torch.autocast('cpu', torch.bfloat16): Cached(model)(ids)\n",
            (
                "isotype: a trace of the call of Cached explains the error:",
                "error[IST103]: ",
                "= cause  the buffer net.head.cache is float32",
            ),
        ),
        (  # unslothai/unsloth #1184: only the branch without gradients writes into a bfloat16 tensor
            "class Fast(nn.Module):\n    def __init__(self, net): super().__init__(); self.net = net\n"
            "    def forward(self, x):\n"
            "        if torch.is_grad_enabled(): return x @ self.net.embed.weight.float().T.bfloat16()\n"
            "        return torch.mm(x, self.net.embed.weight.float().T, out=torch.empty(4, 32, dtype=torch.bfloat16))\n"
            "with torch.no_grad(): Fast(model)(torch.zeros(4, 8))\n",
            (
                "isotype: a trace of the call of Fast explains the error:",
                "  --> the model   aten.mm.out   generate   ",
                "= note   the device raises: Expected out tensor to have dtype float, but got c10::BFloat16 instead",
            ),
        ),
    ],
    ids=["without autocast", "a cache", "a branch without gradients"],
)
def test_an_evaluation_that_fails_in_another_call_of_the_model_is_traced(
    runs: Runs, script: str, lines: tuple[str, ...]
) -> None:
    """Lightning-AI/litgpt #542: autocast returns bfloat16, which an evaluation writes into a float32 cache."""
    status, _, err = runs(f"{_UNDER_AUTOCAST}{script}", "--no-preflight")
    assert status == 1
    for line in lines:
        assert line in err


_BUFFER = """
BUFFERS = {}

def shared(layer):
    def forward(hidden, layer=layer):
        buffer = BUFFERS.setdefault(layer.weight.device.index, torch.empty_like(layer.weight.detach()))
        return F.linear(hidden, buffer.copy_(layer.weight.detach()))
    layer.forward = forward

first, second = Net().requires_grad_(), Net(torch.float16)
second.embed.half()
for model in (first, second): shared(model.head)
"""


@pytest.mark.parametrize(
    ("script", "lines"),
    [
        (
            "model = Net()\nreward = nn.Sequential(Net()).float()\nreward[0].head.bfloat16()\ntrain(model)\n"
            "with torch.no_grad(): reward[0](ids)\n",
            (
                "isotype: a trace of another model of the script, Net, explains the error:",
                "error[IST101]: bfloat16 instead of float32",
                "= cause  head.weight is bfloat16",
            ),
        ),
        pytest.param(  # huggingface/diffusers #9476, bghira/SimpleTuner #356
            "class Vae(nn.Module):\n"
            "    def __init__(self): super().__init__(); self.inner = nn.Linear(8, 8).bfloat16()\n"
            "    def decode(self, z): return self.inner(z)\n"
            "model, vae = Net(torch.float32).float(), Vae().requires_grad_(False)\n"
            "train(model)\n"
            "with torch.no_grad(): vae.decode(torch.ones(2, 8))\n",
            (
                "isotype: a trace of another model of the script, Vae, explains the error:",
                "  --> inner   aten.addmm.default   generate",
                "= cause  the input z is float32",
                "= help   pass z to the model in bfloat16   (safe; verified: ",
            ),
            marks=pytest.mark.exhaustive,
        ),
        *(
            (
                f"{_BUFFER}{calls}",
                (
                    "isotype: a trace of another model of the script, Net, explains the error:",
                    "error[IST406]: a tensor outside of the model is bfloat16, but the other operands are float16",
                    "= help   allocate that tensor in the dtype of the model that uses it (float16)",
                ),
            )
            for calls in (
                "first(ids, ids)[1].backward()\ndel first\nsecond(ids, ids)[1].backward()\n",
                "train(first)\ntrain(second)\n",
                "train(first)\ndel first\ntrain(second)\n",
            )
        ),
    ],
    ids=[
        "a reward model",
        "a method",
        "a second model, no optimizer",
        "a second model",
        "after the first was deleted",
    ],
)
def test_a_crash_of_another_model_is_explained_by_its_trace(
    runs: Runs, script: str, lines: tuple[str, ...]
) -> None:
    """unslothai/unsloth #4026: the buffer of dequantized weights keeps the dtype of the model that ran first."""
    status, _, err = runs(script, "--no-preflight")
    assert status == 1
    for line in lines:
        assert line in err


@pytest.mark.parametrize("flags", [(), ("--no-preflight",)], ids=["predicted", "afterwards"])
def test_a_model_that_the_script_deletes_is_freed(runs: Runs, flags: tuple[str, ...]) -> None:
    """Scripts delete one model before they load the next: both would not fit on the device."""
    script = """
import weakref
model = Net()
train(model)
known = weakref.ref(model), weakref.ref(model.head.weight)
del model
print([reference() for reference in known])
"""
    assert runs(script, *flags)[:2] == (0, "trained\n[None, None]\n")


@pytest.mark.parametrize("flags", [(), ("--no-preflight",)], ids=["predicted", "afterwards"])
def test_a_crash_in_a_thread_is_explained_at_the_end(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...]
) -> None:
    """unslothai/unsloth #4026, with models in two threads: Python prints the error, and the exit status stays 0."""
    monkeypatch.setattr(threading, "excepthook", threading.__excepthook__)
    script = """
from threading import Thread
for model in (Net(), Net(torch.float32)):
    thread = Thread(target=train, args=(model,))
    thread.start()
    thread.join()
print("joined")
"""
    status, out, err = runs(script, *flags)
    assert (status, out) == (0, "trained\njoined\n")
    printed, _, after = err.partition("RuntimeError: mat1 and mat2 must have the same dtype")
    assert "Exception in thread" in printed
    assert "isotype/trace" not in printed
    assert "error[IST101]" in after
    assert "= cause  head.weight is float32, created at train.py:10" in after


@pytest.mark.parametrize("error", ["SystemExit()", "ValueError('no more rows')"])
def test_other_errors_of_threads_keep_no_memory(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, error: str
) -> None:
    monkeypatch.setattr(threading, "excepthook", threading.__excepthook__)
    script = f"""
import gc, weakref
from threading import Thread
class Rows:
    pass
known = []
def work():
    rows = Rows()
    known.append(weakref.ref(rows))
    raise {error}
thread = Thread(target=work)
thread.start()
thread.join()
gc.collect()
print(known[0]())
train(Net())
"""
    assert runs(script)[:2] == (0, "None\ntrained\n")


def test_a_failed_forward_in_a_thread_is_not_one_without_a_backward(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threading, "excepthook", threading.__excepthook__)
    script = """
from threading import Thread
def fail(module, inputs, output):
    raise ValueError("out of patience")

model = Net()
model.head.register_forward_hook(fail)
thread = Thread(target=train, args=(model,))
thread.start()
thread.join()
"""
    status, _, err = runs(script)
    assert status == 0
    assert "ValueError: out of patience" in err
    assert "no backward" not in err


@pytest.mark.exhaustive
def test_a_check_in_the_model_s_own_code_is_traced_again(runs: Runs) -> None:
    """hiyouga/LlamaFactory #7141. The trace needs the values of integer inputs: they decide shapes."""
    script = """
class Checked(Net):
    def forward(self, ids, labels=None):
        hidden = self.embed(ids).float().view(int(labels.max()) + 1, 8)
        weight = self.head.weight
        assert hidden.dtype == weight.dtype, f"must have the same dtype, got {hidden.dtype} and {weight.dtype}"
        return None, F.cross_entropy(self.head(hidden).float(), labels.flatten())

train(Checked())
"""
    _, _, err = runs(script, "--no-preflight")
    after = err.partition("AssertionError")[2]
    assert "isotype: a trace of the script's last known step explains the error:" in after
    assert "error[IST199]: the model's own code does not accept float32" in after
    assert "= help   write bfloat16 instead of float32 at train.py:" in after


def test_a_crash_in_the_backward_of_a_second_model_is_explained(runs: Runs) -> None:
    """The discriminator of a GAN steps after the generator."""
    script = """
class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(weight)
        return x @ weight

    @staticmethod
    def backward(ctx, gradient):
        return gradient.float() @ ctx.saved_tensors[0], None

class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.weight = nn.Linear(16, 8), nn.Parameter(torch.ones(8, 8))

    def forward(self, x):
        return Product.apply(self.first(x), self.weight)

model, critic = Net(), Critic().bfloat16()
optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (model, critic)]
for step in range(2):
    logits, loss = model(ids, ids)
    loss.backward(), optimizers[0].step()
    critic(logits.detach()).float().mean().backward(), optimizers[1].step()
"""
    for flags in ((), ("--no-preflight",)):
        status, _, err = runs(script, *flags)
        assert status == 1
        assert "error[IST105]: float32 instead of bfloat16 in the backward\n  --> " in err
        assert "= help   cast the operands to bfloat16 at train.py:" in err
        assert "the cause is outside of the step" not in err


@pytest.mark.parametrize("new", [False, True])
def test_an_optimizer_of_a_second_training_that_changes_nothing_is_named(runs: Runs, new: bool) -> None:
    """huggingface/peft #1303: the second `trainer.train()` has another adapter, and the optimizer of the first."""
    script = f"""
model = Net()
optimizer = torch.optim.SGD(model.head.parameters(), lr=0.1)

def step():
    model(ids, ids)[1].backward()
    optimizer.step()
    optimizer.zero_grad()

model.embed.requires_grad_(False)
for _ in range(3): step()
model.embed.requires_grad_(True)
model.head.requires_grad_(False)
optimizer = torch.optim.SGD((model.embed if {new} else model.head).parameters(), lr=0.1) if {new} else optimizer
for _ in range(3): step()
"""
    status, _, err = runs(script)
    assert status == 0
    finding = "isotype: after a later step:\nwarning[IST309]: the optimizer's steps change nothing\n"
    assert err.count(finding) == (not new)
    assert ("= cause  none of the optimizer's 2 parameters has a gradient anymore" in err) == (not new)


@pytest.mark.parametrize(("flag", "first"), [("bf16_full_eval", "evaluates"), ("fp16_full_eval", "trains")])
def test_a_cast_in_an_evaluation_is_named(runs: Runs, flag: str, first: str) -> None:
    dtype = {"b": "bfloat16", "f": "float16"}[flag[0]]
    script = f"""
import transformers, types
from transformers import TrainingArguments
arguments = TrainingArguments("out", {flag}=True, use_cpu=True, report_to=[])

def evaluate():
    with torch.no_grad(): model.to(torch.{dtype})(ids)

# As if this were the method of a Trainer.
evaluate.__code__ = evaluate.__code__.replace(co_filename=transformers.__file__)
model = Net().float()
model.config = types.SimpleNamespace(dtype=torch.float32)
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
for _ in range(2):
    if "{first}" == "evaluates": evaluate()
    model(ids, ids)[1].backward()
    optimizer.step()
    optimizer.zero_grad()
    if "{first}" == "trains": evaluate()
"""
    status, _, err = runs(script)
    how = f"{flag}=True casts the model in evaluate()"
    if first == "evaluates":
        assert re.search(rf"\.weight is {dtype}.* \({re.escape(how)}\)", " ".join(err.split()))
    else:
        assert status == 1
        cast = f"the script has cast embed.weight and others from float32 to {dtype}: {how}"
        assert " ".join(err.split()).count(cast) == 1


def test_weights_that_were_cast_between_steps_are_named(runs: Runs) -> None:
    """zai-org/CogVideo #775: a validation casts the trained weights to float16, and the next step cannot unscale."""
    script = """
model = Net().float()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu")
for _ in range(2):
    with torch.autocast("cpu", torch.float16):
        loss = model(ids, labels=ids)[1]
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    model.half()
    model.register_forward_pre_hook(lambda _, args, kwargs: (args, {**kwargs, "labels": kwargs["labels"]}), with_kwargs=True)
"""
    _, _, err = runs(script)
    assert "IST199" not in err  # a forward without labels, as in a generation, is not a part of this step
    assert "the script has cast embed.weight and others from float32 to float16" in err
    assert "error[IST301]" in err


@pytest.mark.parametrize(
    ("after_backward", "cause"),
    [
        ("scaler.step(optimizer)", "scaler.update() did not run after the earlier call"),
        ("scaler.unscale_(optimizer)", "scaler.update() did not run after the earlier call"),
    ],
)
def test_a_call_that_the_gradscaler_refuses_is_explained(runs: Runs, after_backward: str, cause: str) -> None:
    script = (
        "model = Net().float()\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "scaler = torch.amp.GradScaler('cpu')\nfor _ in range(2):\n"
        f"    scaler.scale(model(ids, ids)[1]).backward()\n    {after_backward}\n"
    )
    status, _, err = runs(script, "--no-preflight")
    assert status == 1
    after = err.partition("Error: ")[2]
    line = (MODEL + script).splitlines().index(f"    {after_backward}") + 1
    assert "error[IST308]: a call of the GradScaler raises an error: " in after
    assert f"train.py:{line}" in after
    assert f"   = cause  {cause}" in after


def test_a_default_dtype_that_changes_before_the_recomputation_is_named(runs: Runs) -> None:
    """NVIDIA-NeMo/Automodel #2083: the script sets the default dtype around the forward alone."""
    script = (
        "from torch.utils.checkpoint import checkpoint\nmodel = Net()\nhead = model.head.forward\n"
        "scaled = lambda hidden: head((hidden.softmax(-1) * torch.full((8,), 0.5)).bfloat16())\n"
        "model.head.forward = lambda hidden: checkpoint(scaled, hidden, use_reentrant=False)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\ntorch.set_default_dtype(torch.bfloat16)\n"
        "loss = model(ids, ids)[1]\nCHANGE\nloss.backward()\noptimizer.step()\ntorch.set_default_dtype(torch.float32)\n"
    )
    status, _, err = runs(
        script.replace("CHANGE", "torch.set_default_dtype(torch.float32)"), "--no-preflight"
    )
    assert status == 1
    assert "the cause is outside of the step" not in err
    assert "error[IST107]: the recomputation of gradient checkpointing differs from the forward" in err
    assert "recomputation: torch's default dtype has changed after the forward" in err
    status, _, err = runs(script.replace("CHANGE", ""), "--no-preflight")
    assert (status, "IST107" in err) == (0, False)


def test_a_loss_that_is_not_scaled_beside_one_that_is(runs: Runs) -> None:
    """IAHispano/Applio #860, SheldonTsui/GOF_NeurIPS2021 #2: two optimizers share a GradScaler."""
    script = (
        "first, second = nn.Linear(8, 8), nn.Linear(8, 8)\nscaler = torch.amp.GradScaler('cpu')\n"
        "one, two = (torch.optim.SGD(net.parameters(), lr=0.1) for net in (first, second))\n"
        "with torch.autocast('cpu', torch.float16): loss = first(torch.ones(2, 8)).float().sum()\n"
        "scaler.scale(loss).backward()\nscaler.step(one)\n"
        "with torch.autocast('cpu', torch.float16): loss = second(torch.ones(2, 8)).float().sum()\n"
        "SCALED.backward()\nSTEP\n"
    )
    for scaled, step in (("loss", "two.step()"), ("scaler.scale(loss)", "scaler.step(two)")):
        _, _, err = runs(script.replace("SCALED", scaled).replace("STEP", step))
        assert err.count("warning[IST303]: the backward runs in float16 without loss scaling") == (
            scaled == "loss"
        )


def test_two_optimizers_step_after_the_same_backward(runs: Runs) -> None:
    """nanoGPT with Muon and AdamW: the second step has no forward, and its autocast is that of the first."""
    script = (
        "first, second = nn.Linear(8, 8), nn.Linear(8, 8)\nscaler = torch.amp.GradScaler('cpu', init_scale=8.0)\n"
        "optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (first, second)]\n"
        "with torch.autocast('cpu', torch.float16): loss = second(first(torch.ones(2, 8))).float().sum()\n"
        "scaler.scale(loss).backward()\nfor optimizer in optimizers: scaler.step(optimizer)\n"
    )
    _, _, err = runs(script)
    assert "steps 1-2 watched" in err
    assert "IST302" not in err


@pytest.mark.parametrize(
    ("script", "cause"),
    [
        (
            "model = Net().requires_grad_(False)\nlora = nn.Linear(8, 16, dtype=torch.bfloat16)\n"
            "model.lora_A = lora\nmodel(ids, ids)[1].backward()\n",
            "the forward does not use lora_A.",
        ),
        (
            "from torch.utils.checkpoint import checkpoint\nmodel = Net()\nmodel.embed.requires_grad_(False)\n"
            "head = model.head\nmodel.head = nn.Identity()\nmodel.inner = head\n"
            "model.head.forward = lambda hidden: checkpoint(head, hidden, use_reentrant=True)\n"
            "model(ids, ids)[1].backward()\n",
            "CheckpointFunction runs inner.weight",
        ),
    ],
    ids=["unused", "a reentrant checkpoint"],
)
def test_a_backward_without_gradients_is_explained(runs: Runs, script: str, cause: str) -> None:
    status, _, err = runs(script, "--no-preflight")
    assert status == 1
    after = err.partition("RuntimeError: element 0 of tensors does not require grad")[2]
    assert "error[IST307]" in after
    assert f"   = cause  {cause}" in after


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (
            "ImportError('kernels is either not installed or incompatible')",
            "this machine lacks a package, or has",
        ),
        ("AttributeError('no attribute unsqueeze')", "no finding explains this error"),
    ],
)
def test_an_error_that_nothing_explains_is_named_after_a_step(runs: Runs, error: str, why: str) -> None:
    """huggingface/transformers #46736: on a laptop without the package kernels, FP8 layers cannot run."""
    status, _, err = runs(f"train(Net())\nraise {error}\n", "--no-preflight")
    assert status == 1
    kind = error.partition("(")[0]
    assert f"isotype: {kind} at " in err
    assert f" ended the script: {why}" in err


# ---------------------------------------------------------------------------------------------------- time, and fixes


def test_a_model_that_returns_its_loss_in_a_tuple_is_traced_to_its_end(runs: Runs) -> None:
    status, _, err = runs("train(Net())\n")
    assert status == 0
    assert "returns no loss" not in err
    assert "was traced only up to" not in err


def test_a_look_ahead_ends_when_its_time_is_spent(runs: Runs) -> None:
    status, out, err = runs("train(Net(torch.float32))\n", "--preflight-seconds", "1e-9")
    before, _, after = err.partition("Traceback (most recent call last):\n")
    assert (status, out) == (1, "")
    assert before == (
        "isotype: the first step was traced only up to forward of embed: the limit of 1e-09 s (--preflight-seconds) was reached\n"
    )
    assert "error[IST101]" in after
    assert "safe; verified: " in after


def test_fixes_that_take_long_are_tried_after_the_crash(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("isotype.preflight.script.diagnosis.TRIED_BEFORE", 0.0)
    status, _, err = runs("train(Net(torch.float32))\n")
    before, _, after = err.partition("Traceback (most recent call last):\n")
    assert status == 1
    assert "; fixes were not tried yet):" in before
    assert "isotype: predicted before the step:" in after
    assert "not verified" in before
    assert "not verified" not in after


def test_a_watch_that_takes_long_ends(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("isotype.trace.live.watch.WATCH_SECONDS", 0.0)
    status, out, err = runs("train(Net())\n", "--no-preflight")
    assert (status, out) == (0, "trained\n")
    assert re.fullmatch(r"isotype: the recording stopped early: recording \d+ operators took 0 s\n", err)


def test_only_what_a_script_can_do_is_recommended(runs: Runs) -> None:
    status, _, err = runs("train(Net(torch.float32))\n")
    assert status == 1
    assert "check --fix" not in err
    assert "isotype run   Net on " in err
    assert (
        "repair     in the script, before the first step: isotype.repair(model, isotype.check(model, inputs))"
        in err
    )


# ---------------------------------------------------------------------------------------------- after the first step

SWITCHED = """
from torch.utils.checkpoint import checkpoint

class Adapted(nn.Module):
    def __init__(self):
        super().__init__()
        self.on, self.base = False, nn.Linear(8, 8).requires_grad_(False)
        self.up = nn.Linear(8, 8, bias=False)
    def forward(self, hidden):
        made = self.base(hidden)
        return made + self.up(hidden) if self.on else made

class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(32, 8), nn.Linear(8, 16)
        self.layers = nn.ModuleList(Adapted() for _ in range(2))
    def forward(self, ids, labels):
        hidden = self.embed(ids)
        for layer in self.layers:
            hidden = checkpoint(layer, hidden, use_reentrant=True)
        logits = self.head(hidden)
        return logits, F.cross_entropy(logits.flatten(0, 1), labels.flatten())

model = Checkpointed()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    for layer in model.layers:
        layer.on = True
    _, loss = model(ids, ids % 16)
    for layer in model.layers:
        layer.on = KEPT
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize("kept", [True, False])
def test_adapters_that_the_backward_computes_without_are_named_after_the_first_step(
    kept: bool, runs: Runs
) -> None:
    status, _, err = runs(SWITCHED.replace("KEPT", str(kept)))
    assert status == 0
    assert ("isotype: after the first step:" in err) != kept
    if not kept:
        assert "warning[IST307]: no gradient reaches 2 of 5 trainable parameters" in err
        assert "but the recomputation of gradient checkpointing does not" in err


def test_the_line_that_calls_a_layer_is_named(runs: Runs) -> None:  # huggingface/diffusers #4619
    _, _, err = runs("with torch.no_grad(): nn.Conv2d(3, 4, 2)(torch.ones(1, 3, 4, 4).half())\n")
    assert re.search(r"--> the model   torch.conv2d   generate   \S*train.py:\d+\n", err)


def test_a_function_that_refuses_16_bits_outside_of_the_model_is_named(runs: Runs) -> None:
    """huggingface/trl #3666: `torch.quantile` raises before it runs an operator."""
    script = "model = Net()\nlogits = model(ids, ids)[0]\ntorch.quantile(logits.detach(), 0.2)\n"
    err = runs(script, "--no-preflight")[2]
    assert "error[IST109]: torch.quantile has no kernel for bfloat16" in err
    assert re.search(r"help   cast the operands to float32 at train.py:\d+", err)


def test_a_step_that_runs_in_a_closure_of_the_optimizer(runs: Runs) -> None:
    """Lightning calls `optimizer.step(closure)`: forward and backward are no part of the update."""
    script = """
model = Net()
loss_of = nn.MSELoss()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
def closure():
    optimizer.zero_grad()
    loss = loss_of(model(ids)[0].float(), torch.zeros(1))
    loss.backward()
    return loss
for _ in range(2):
    optimizer.step(closure)
"""
    status, _, err = runs(script, "--no-preflight")
    assert (status, re.findall(r"IST801|IST305|IST307", err)) == (0, ["IST801"])
    one = runs(script.replace("range(2)", "range(1)"), "--no-preflight")[2]
    fit = """
scale = nn.Parameter(torch.ones(()))
def error():
    scale.grad = None
    value = (scale - 3) ** 4
    value.backward()
    return value
torch.optim.LBFGS([scale], max_iter=9).step(error)
"""  # one step without a module, of many closures
    fitted = runs(f"{fit}{script}", "--no-preflight")[2]
    assert [re.findall(r"step 1 watched: \d+", text) for text in (one, fitted)] == [
        re.findall(r"step 1 watched: \d+", err) or ["none"]
    ] * 2


def test_a_transform_of_torch_func_is_named_as_the_reason_without_a_record(runs: Runs) -> None:
    """`vmap(grad(...))` for gradients of single examples."""
    status, out, err = runs(
        "from torch.func import functional_call, grad\nmodel = Net()\n"
        "loss = lambda values: functional_call(model, values, (ids, ids))[1]\n"
        "grad(loss)({name: p.detach() for name, p in model.named_parameters()})\nprint('done')\n"
    )
    assert (status, out) == (0, "done\n")
    assert err == (
        "isotype: no training step was recorded: transforms of torch.func (vmap, grad) call the modules, and isotype does not "
        "record such calls\n"
    )


FLAT = """
class Flat:
    def __init__(self, parameters, dtype):
        self.parameters = [p for p in parameters]
        self.copy = nn.Parameter(torch.cat([p.detach().flatten() for p in self.parameters]).to(dtype))
        self.inner = torch.optim.AdamW([self.copy], lr=1e-5)
    def step(self):
        self.copy.grad = torch.cat([p.grad.flatten() for p in self.parameters]).to(self.copy.dtype)
        self.inner.step()
model = Net()
optimizer = Flat(model.parameters(), DTYPE)
model(ids, ids)[1].backward()
optimizer.step()
"""


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_flat_copies_in_16_bits_lose_updates(runs: Runs, dtype: str) -> None:
    """As in a ZeRO of one's own: the optimizer has none of the model's parameters."""
    status, _, err = runs(FLAT.replace("DTYPE", f"torch.{dtype}"), "--no-preflight")
    assert status == 0
    said = (
        "warning[IST801]: the step of AdamW does not change most values of its 16-bit copies of the weights"
    )
    assert err.count(said) == (dtype == "bfloat16")


REFERENCE = """
class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(32, 8), nn.Linear(8, 300)
    def forward(self, ids):
        return self.head(self.embed(ids))
policy, reference = Policy(), Policy().bfloat16()
with torch.no_grad():
    before = reference(ids)CAST.log_softmax(-1)[..., 0].sum(-1)
optimizer = torch.optim.AdamW(policy.parameters())
(policy(ids).log_softmax(-1)[..., 0].sum(-1) - before).mean().backward()
optimizer.step()
"""


@pytest.mark.parametrize("cast", ["", ".float()"])
def test_log_probabilities_of_a_reference_in_16_bits_are_found(runs: Runs, cast: str) -> None:
    """A DPO of one's own calls its frozen reference before the policy, without gradients."""
    status, _, err = runs(REFERENCE.replace("CAST", cast))
    assert status == 0
    assert err.count("warning[IST805]: log_softmax over 300 values returns bfloat16") == (not cast)


_THREADS = """
from concurrent.futures import ThreadPoolExecutor
pool = ThreadPoolExecutor(2)

class Branches(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.branches = nn.ModuleList(nn.Linear(8, 8, dtype=dtype) for _ in range(2))

    def run(self, branch, hidden):
        INSIDE
            return branch(hidden)

    def forward(self, x):
        hidden = self.first(x)
        return sum(future.result() for future in [pool.submit(self.run, b, hidden) for b in self.branches]).float()

model = Branches(torch.DTYPE)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
OUTSIDE
    loss = model(torch.ones(2, 8)).sum()
loss.backward()
optimizer.step()
print("trained")
"""
_AUTOCAST = 'with torch.autocast("cpu", torch.bfloat16):'


@pytest.mark.parametrize(
    ("outside", "inside", "dtype", "says"),
    [
        (
            _AUTOCAST,
            "if True:",
            "float32",
            "branches.0 runs without autocast, because the step enters autocast to bfloat16",
        ),
        (
            _AUTOCAST,
            _AUTOCAST,
            "float32",
            "the operators that the model ran in other threads were not recorded",
        ),
        (
            _AUTOCAST,
            "if True:",
            "bfloat16",
            "the operators that the model ran in other threads were not recorded",
        ),
        (
            "if True:",
            "if True:",
            "float32",
            "the operators that the model ran in other threads were not recorded",
        ),
        ("if True:", "if True:", "bfloat16", "dtype"),
    ],
)
def test_layers_in_threads_do_not_get_the_autocast_of_the_step(
    outside: str, inside: str, dtype: str, says: str, runs: Runs
) -> None:
    script = _THREADS.replace("INSIDE", inside).replace("OUTSIDE", outside).replace("DTYPE", dtype)
    status, out, err = runs(script)
    breaks = "RuntimeError: mat1 and mat2" in err
    assert (status == 0, "trained" in out) == (not breaks, not breaks)
    assert breaks == (says not in _NOT_RECORDED)
    assert says in err
    assert ("runs without autocast, because" in err) == ("autocast" in says)
    assert "error[" not in err  # nothing is stated about operators that were not traced
    assert "OtherThreadError: aten." in err


_NOT_RECORDED = "the operators that the model ran in other threads were not recorded"


@pytest.mark.parametrize("flags", [(), ("--no-preflight",)])
@pytest.mark.parametrize("codes", ["layer.weight.to(x.dtype)", "weight + scale"])
def test_codes_that_a_forward_casts_are_named(codes: str, flags: tuple[str, ...], runs: Runs) -> None:
    """unslothai/unsloth-zoo #1132, MNoorFawi/curlora #5: the shapes raise the error, whatever the dtypes are."""
    status, _, err = runs(
        f"""
import bitsandbytes as bnb
class Reads(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = bnb.nn.Linear4bit(64, 64, bias=False).to("cpu")
        self.scale = nn.Parameter(torch.zeros(1))
        self.register_buffer("weight", self.layer.weight.data)
    def forward(self, x):
        layer, weight, scale = self.layer, self.weight, self.scale
        return x * scale.to(x.dtype) @ ({codes}).T
net = Reads()
optimizer = torch.optim.SGD([net.scale], lr=0.1)
net(torch.ones(2, 64, dtype=torch.float16)).sum().backward()
""",
        *flags,
    )
    assert status == 1
    assert "error[IST403]: packed codes are used as a weight" in err
    assert "holds packed codes of shape [2048, 1]" in err
    assert "not the cause" not in err
    assert "IST102" not in err
    assert "Params4bit" not in err


@pytest.mark.parametrize("broken", [True, False])
def test_any_error_of_a_layer_with_a_replaced_4bit_weight_was_predicted(broken: bool, runs: Runs) -> None:
    """bitsandbytes raises an AssertionError without a message."""
    weight = "nn.Parameter(torch.randn(64, 64), requires_grad=False)" if broken else "net[0].weight"
    status, _, err = runs(f"""
import bitsandbytes as bnb
net = nn.Sequential(bnb.nn.Linear4bit(64, 64), nn.Linear(64, 4)).to("cpu")
net[0].weight = {weight}
net[1].register_forward_hook(lambda *_: 1 / 0)
optimizer = torch.optim.SGD(net[1].parameters(), lr=0.1)
net(torch.ones(2, 64)).sum().backward()
""")
    assert status == 1
    assert ("isotype: predicted before the step:\nerror[IST403]" in err) == broken
    assert ("no finding explains this error" in err) != broken


@pairwise(
    "method, frozen, guard",
    ["generate", "predict"],
    [True, False],
    ["no_grad", "inference_mode", "enable_grad"],
)
def test_a_method_that_returns_tokens_is_traced_to_its_end(
    runs: Runs, method: str, frozen: bool, guard: str
) -> None:
    """Tokens are no loss, but the crash of `generate` is no reason to say that the trace ended there."""
    status, _, err = runs(f"""\
class Other(Net):
    def {method}(self, ids):
        with torch.{guard}():
            return self(ids)[0].argmax(-1)

train(Net())
other = Other(torch.float32).requires_grad_({not frozen})
other.{method}(ids)
""")
    assert (status, "error[IST101]" in err, "IST199" in err) == (1, True, False)
    assert "head.weight is float32, created at train.py" in err


@pytest.mark.parametrize("cache", ["dynamic", "static", "encoder-decoder"])
def test_a_trace_has_the_cache_from_before_the_failed_forward(cache: str, runs: Runs) -> None:
    """unslothai/unsloth #3043: the keys of a failed forward stay in the cache of its first layer."""
    status, _, err = runs(f"""
import transformers
sizes = dict(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64)
if "{cache}" == "encoder-decoder":
    config = transformers.BartConfig(vocab_size=64, d_model=32, encoder_layers=1, decoder_layers=1, pad_token_id=0,
        encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32)
    model, arguments = transformers.BartForConditionalGeneration(config), {{}}
    layer = model.model.decoder.layers[0].self_attn.k_proj
else:
    config = transformers.Gemma3TextConfig(**sizes, num_key_value_heads=2, head_dim=16, sliding_window=8, pad_token_id=0)
    model, arguments = transformers.Gemma3ForCausalLM(config), {{"cache_implementation": "{cache}"}}
    layer = model.model.layers[0].self_attn.k_norm
model = model.to(torch.bfloat16).eval()
layer.register_forward_hook(lambda module, args, out: out.float())
model.generate(torch.ones(1, 12, dtype=torch.long), max_new_tokens=2, **arguments)
""")
    keys = "[1, 2, 1, 16]" if cache == "encoder-decoder" else "[1, 2, 12, 16]"
    assert (status, "error[IST104]" in err, "IST199" in err) == (1, True, False)
    assert f"|   [1]  float32    {keys}" in err


@pytest.mark.parametrize("wrapped", [True, False])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_scaler_of_accelerates_optimizer_is_used_whatever_the_script_does(
    wrapped: bool, dtype: str, runs: Runs
) -> None:
    wrap = "optimizer = AcceleratedOptimizer(optimizer, scaler=scaler)" if wrapped else ""
    step = "scaler.unscale_(optimizer), scaler.step(optimizer), scaler.update()"
    _, _, err = runs(f"""
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
accelerator = Accelerator(cpu=True)
net = nn.Linear(8, 4).to(torch.{dtype})
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
{wrap}
with torch.autocast("cpu", torch.float16):
    loss = net(torch.ones(2, 8, dtype=torch.{dtype})).sum()
scaler.scale(loss).backward()
{"optimizer.step()" if wrapped else step}
""")
    before, _, after = err.partition("after the first step")
    gets = "[IST302]: GradScaler gets the bfloat16 gradients"
    assert (gets in before) == (wrapped and dtype == "bfloat16")
    assert (gets in after) == (not wrapped and dtype == "bfloat16")


def test_rules_check_a_step_on_jagged_tensors(runs: Runs) -> None:
    """A jagged tensor has a size that is no number."""
    status, _, err = runs("""
net = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64).requires_grad_(False))
optimizer = torch.optim.SGD(net[0].parameters(), lr=0.1)
rows = torch.nested.nested_tensor([torch.randn(3, 64), torch.randn(5, 64)], layout=torch.jagged)
with torch.autocast("cpu", torch.bfloat16):
    loss = net(rows).values().float().sum()
loss.backward()
optimizer.step()
""")
    assert status == 0
    assert "IST199" not in err
    assert "warning[IST202]: frozen float32 weights are cast to bfloat16 at every step" in err


@pytest.mark.parametrize("scaled", [False, True])
def test_a_gradient_that_is_not_finite_beside_a_finite_loss_is_named(runs: Runs, scaled: bool) -> None:
    """unslothai/unsloth-zoo #866: only the backward overflows; a GradScaler skips such a step."""
    step = (
        "scaler = torch.amp.GradScaler('cpu')\nscaler.scale(loss).backward(); scaler.step(optimizer); scaler.update()\n"
        if scaled
        else "loss.backward(); optimizer.step()\n"
    )
    _, _, err = runs(
        "model = Net(torch.float32)\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "model.head.weight.register_hook(lambda gradient: gradient * float('inf'))\n"
        "loss = model.float()(ids, ids)[1]\n" + step,
        "--no-preflight",
    )
    sentence = "isotype: the loss of the first step is finite, but the gradient of head.weight is not; `isotype run --watch`"
    assert (sentence in err) is not scaled
