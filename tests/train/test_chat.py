"""`isotype chat`: questions, the turns that stay in the context, output, and how it is stopped."""

from __future__ import annotations

import argparse
import io
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from rich.console import Console
from tokenizers import Tokenizer, models, pre_tokenizers

from isotype.checkpoint.load import load
from isotype.checkpoint.resolve import resolve_precision
from isotype.cli.commands import options_of
from isotype.compat.interrupt import Terminated
from isotype.core.arguments import Parser
from isotype.core.errors import CheckpointError, UsageError
from isotype.model.adapters import add_lora
from isotype.precision.policy import PrecisionPolicy
from isotype.train.chat import (
    _questions,
    answer,
    chat,
    encode,
    load_for_inference,
    opened_picture,
    stream_answer,
)
from tests.adapters import save_adapter, save_trained
from tests.pairwise import pairwise
from tests.refusals import refused
from tests.zoo.processors import picture, save_vision_model

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

WORDS = ["[UNK]", "[PAD]", "[EOS]", "user", "assistant", *(f"w{i}" for i in range(59))]
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}assistant{% endif %}"
)


def save_model(directory: Path, template: str | None = TEMPLATE, **config: Any) -> Path:
    settings = {
        "vocab_size": len(WORDS),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "attention_bias": True,
        "eos_token_id": 2,
        "pad_token_id": 1,
        "initializer_range": 0.4,
        "max_position_embeddings": 256,
    }
    torch.manual_seed(3)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**(settings | config))).save_pretrained(directory)
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="[UNK]", pad_token="[PAD]", eos_token="[EOS]"
    )
    tokenizer.chat_template = template
    tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("chat") / "model")


def options(model: Path | str, *questions: str, **more: Any) -> argparse.Namespace:
    """Return the command's options, with answers of at most 8 tokens."""
    words = [str(model), "--device", "cpu", *(f"--ask={question}" for question in questions)]
    parsed = vars(Parser.of("chat").parse_args(words)) | {"max_new_tokens": 8}
    assert more.keys() <= parsed.keys()
    return argparse.Namespace(**(parsed | more))


def talk(*args: Any, **kwargs: Any) -> list[str]:
    """Return the lines that a chat prints."""
    file = io.StringIO()
    assert chat(options(*args, **kwargs), Console(file=file, width=200)) == 0
    return [line.strip() for line in file.getvalue().splitlines()]


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


# ------------------------------------------------------------------------------------------------ conversation


def test_each_question_goes_on_with_the_conversation(base: Path) -> None:
    header, first, second = talk(base, "w1 w2", "w3")
    assert header == f"{base} · compute float32 · storage float32 · greedy"
    model, tokenizer, _ = load_for_inference(base, device="cpu")
    assert first == answer(model, tokenizer, [user("w1 w2")], 8)
    asked = [user("w1 w2"), {"role": "assistant", "content": first}, user("w3")]
    assert second == answer(model, tokenizer, asked, 8)
    assert second != answer(model, tokenizer, [user("w3")], 8), (
        "the test needs an answer that depends on the first"
    )


def test_reset_forgets_and_exit_leaves(base: Path) -> None:
    _, alone = talk(base, "w3")
    lines = talk(base, "w1 w2", "/reset", "w3", "/exit", "w5")
    assert lines[2:] == ["(the conversation starts again)", alone]


def test_help_is_said_and_not_asked(base: Path) -> None:
    _, alone = talk(base, "w3")
    lines = talk(base, "/help", "w3")
    assert lines[1].startswith("/reset")
    assert lines[-1] == alone


def test_a_system_message_opens_every_conversation(base: Path) -> None:
    model, tokenizer, _ = load_for_inference(base, device="cpu")
    opening = {"role": "system", "content": "w7"}
    expected = answer(model, tokenizer, [opening, user("w3")], 8)
    _, first, _, again = talk(base, "w3", "/reset", "w3", system="w7")
    assert (first, again) == (expected, expected)
    assert expected != answer(model, tokenizer, [user("w3")], 8)


def test_a_pipe_is_read_by_lines(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = talk(base, "w1 w2", "w3")
    monkeypatch.setattr("sys.stdin", io.StringIO("w1 w2\n\nw3\n"))
    assert talk(base) == expected


def test_without_a_chat_template_it_continues_the_text(tmp_path: Path) -> None:
    bare = save_model(tmp_path / "bare", template=None)
    header, first, second = talk(bare, "w1 w2", "w3 w4")
    assert header.endswith(" · greedy · no chat template, so the model continues your text")
    model, tokenizer, _ = load_for_inference(bare, device="cpu")
    inputs = tokenizer("w3 w4", return_tensors="pt")
    ids = model.generate(**inputs, max_new_tokens=8, do_sample=False)
    assert second == tokenizer.decode(ids[0, 2:], skip_special_tokens=True)
    assert first != second


def test_what_no_longer_fits_is_forgotten_aloud(tmp_path: Path) -> None:
    short = save_model(tmp_path / "short", max_position_embeddings=24)
    lines = talk(short, "w1 w2 w3", "w4 w5 w6")
    assert lines[2] == "(the oldest messages no longer fit into the context and are omitted)"
    assert lines[3] == talk(short, "w4 w5 w6")[1]


def test_by_default_an_answer_takes_what_a_short_context_leaves(tmp_path: Path) -> None:
    short = save_model(tmp_path / "short", max_position_embeddings=64)
    file = io.StringIO()
    words = [str(short), "--device", "cpu", "--ask", "w1 w2", "--ask", "w3", "--ask", " ".join(["w7"] * 60)]
    assert chat(Parser.of("chat").parse_args(words), Console(file=file, width=200)) == 0
    lines = file.getvalue().splitlines()
    assert lines[1] == "(this model's context of 64 tokens leaves 60 for the answer)"
    assert lines[2] == talk(short, "w1 w2", max_new_tokens=60)[1]
    # The first answer filled the context: what it leaves is not enough for a second one.
    assert lines[3] == "(the oldest messages no longer fit into the context and are omitted)"
    assert lines[4] == "(this model's context of 64 tokens leaves 61 for the answer)"
    assert lines[5] == talk(short, "w3", max_new_tokens=61)[1]
    assert lines[7] == "(this model's context of 64 tokens leaves 2 for the answer)"
    assert lines[8] == talk(short, " ".join(["w7"] * 60), max_new_tokens=2)[1]


def test_by_default_an_answer_has_at_most_200_tokens(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def noted(*_: Any, max_new_tokens: int, **__: Any) -> tuple[str, bool]:
        asked.append(max_new_tokens)
        return "w1", True

    monkeypatch.setattr("isotype.train.chat.stream_answer", noted)
    assert len(talk(base, "w1 w2", max_new_tokens=None)) == 1
    assert asked == [200]


@pytest.mark.parametrize(
    ("words", "most", "given", "fix"),
    [
        (4, 60, "6 tokens, and --max_new_tokens 60", "--max_new_tokens 18 or less; or "),
        (22, 8, "24 tokens, and --max_new_tokens 8", ""),
        (22, None, "24 tokens", ""),
    ],
)
def test_a_question_that_does_not_fit_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: int, most: int | None, given: str, fix: str
) -> None:
    short = save_model(tmp_path / "short", max_position_embeddings=24)
    question = " ".join(["w7"] * words)
    message = (
        "the question and its answer do not fit into the model's context\n"
        f"  - a prompt of {given}\n"
        "    expected  at most 24 tokens with the answer\n"
        f"    fix       {fix}ask a shorter question"
    )
    assert refused(UsageError, talk, short, question, max_new_tokens=most) == message
    at_the_keyboard(monkeypatch, question, EOFError)  # who types may ask otherwise
    lines = talk(short, max_new_tokens=most)
    assert [line.removeprefix("> ") for line in lines[1:5]] == [line.strip() for line in message.splitlines()]


def test_an_answer_ends_where_learned_positions_do(tmp_path: Path) -> None:
    """GPT-2 has no embedding of a position beyond its context."""
    base = save_model(tmp_path / "gpt2")
    config = transformers.GPT2Config(
        vocab_size=len(WORDS), n_positions=64, n_embd=64, n_layer=1, n_head=4, bos_token_id=2, eos_token_id=2
    )
    model, tokenizer = transformers.GPT2LMHeadModel(config), load_for_inference(base, device="cpu")[1]
    prompt = [user(" ".join(["w7"] * 50))]  # 52 tokens of 64
    text = answer(model, tokenizer, prompt, 64, eos_token_id=None)
    assert text
    assert text == answer(model, tokenizer, prompt, 12, eos_token_id=None)


def test_the_system_message_is_never_forgotten(tmp_path: Path) -> None:
    short = save_model(tmp_path / "short", max_position_embeddings=26)
    lines = talk(short, "w1 w2 w3", "w4 w5", system="w7")
    assert lines[2] == "(the oldest messages no longer fit into the context and are omitted)"
    assert lines[3] == talk(short, "w4 w5", system="w7")[1]
    assert lines[3] != talk(short, "w4 w5")[1]


def test_a_temperature_samples(base: Path) -> None:
    torch.manual_seed(0)
    first = talk(base, "w1", temperature=5.0)
    second = talk(base, "w1", temperature=5.0)
    assert first[0].endswith(" · temperature 5")
    assert first[1] != second[1]
    assert talk(base, "w1") == talk(base, "w1")


# -------------------------------------------------------------------------------------------------- the keyboard


class Keyboard(io.StringIO):
    def isatty(self) -> bool:
        return True


def at_the_keyboard(monkeypatch: pytest.MonkeyPatch, *typed: str | type[BaseException]) -> None:
    keys = iter(typed)

    def press(prompt: str = "") -> str:
        key = next(keys)
        if isinstance(key, str):
            return key
        raise key

    monkeypatch.setattr("sys.stdin", Keyboard())
    monkeypatch.setattr("builtins.input", press)


def test_the_keyboard(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, alone = talk(base, "w3")
    at_the_keyboard(monkeypatch, "w3", KeyboardInterrupt, "/reset", "w3", EOFError)
    lines = [line.removeprefix("> ") for line in talk(base)]
    assert lines[0].endswith(" · greedy · /reset starts again, /exit leaves, Ctrl-C stops an answer")
    assert [line for line in lines[1:] if line not in ("", ">")] == [
        alone,
        "(/exit or Ctrl-D leaves)",
        "(the conversation starts again)",
        alone,
    ]


class Interrupting(io.StringIO):
    """A terminal in which Ctrl-C is pressed after `words` words of the first answer."""

    def __init__(self, words: int) -> None:
        super().__init__()
        self.words = words

    def write(self, text: str) -> int:
        written = super().write(text)
        if text.strip().startswith("w"):
            self.words -= 1
            if self.words == 0:
                signal.raise_signal(signal.SIGINT)
        return written


def test_ctrl_c_stops_only_the_answer(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, whole = talk(base, "w1 w2")
    at_the_keyboard(monkeypatch, "w1 w2", "/reset", "w1 w2", EOFError)
    file = Interrupting(2)
    assert chat(options(base), Console(file=file, width=200)) == 0
    lines = [line.removeprefix("> ").strip() for line in file.getvalue().splitlines()]
    answers = [line for line in lines[1:] if line.startswith("w")]
    assert answers[1] == whole
    assert 0 < len(answers[0].split()) < len(whole.split())
    assert whole.startswith(answers[0])


def test_ctrl_c_ends_a_chat_that_no_one_types_in(base: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        chat(options(base, "w1 w2", "w3"), Console(file=Interrupting(2), width=200))


def test_an_answer_is_written_while_it_is_generated(base: Path) -> None:
    model, tokenizer, _ = load_for_inference(base, device="cpu")
    pieces: list[str] = []

    class Watching(io.StringIO):
        def write(self, text: str) -> int:
            pieces.append(text)
            return super().write(text)

    text, whole = stream_answer(
        model,
        tokenizer,
        [user("w1 w2")],
        Console(file=Watching(), width=200),
        max_new_tokens=8,
        do_sample=False,
    )
    assert whole
    assert text == answer(model, tokenizer, [user("w1 w2")], 8)
    assert len([piece for piece in pieces if piece.strip()]) > 3


# ------------------------------------------------------------------------------------------ load_for_inference


@pairwise(
    "storage, dtype, lora",
    [None, "nf4", "fp4", "int8"],
    ["float32", "bfloat16"],
    [{}, {"use_dora": True, "bias": "all", "modules_to_save": ["lm_head"]}],
    strength=1,
)
def test_an_adapter_comes_back_as_it_was_trained(
    base: Path, tmp_path: Path, dtype: str, storage: str | None, lora: dict[str, Any]
) -> None:
    policy = resolve_precision(base, dtype, storage, "cpu")
    trained = add_lora(
        load(base, policy), policy, r=4, target_modules=["q_proj"], task_type="CAUSAL_LM", **lora
    )
    save_trained(trained, tmp_path / "adapter", seed=5)
    model, tokenizer, found = load_for_inference(tmp_path / "adapter", device="cpu")
    assert found == policy
    assert tokenizer.chat_template == TEMPLATE
    assert not model.training
    ids = torch.arange(3, 20)[None]
    with torch.no_grad():
        assert torch.equal(model(input_ids=ids).logits, trained.eval()(input_ids=ids).logits)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert torch.equal(parameter, trained.get_parameter(name)), name


def test_what_is_asked_for_goes_before_what_was_trained(base: Path, tmp_path: Path) -> None:
    adapter = save_adapter(base, tmp_path / "adapter", "bfloat16", "nf4")
    for asked, expected in (
        ({}, ("bfloat16", "nf4")),
        ({"dtype": "float32"}, ("float32", "nf4")),
        ({"quantization": "int8"}, ("bfloat16", "int8")),
        ({"quantization": "none"}, ("bfloat16", "bfloat16")),
        ({"dtype": "float32", "quantization": "none"}, ("float32", "float32")),
    ):
        _, _, policy = load_for_inference(adapter, device="cpu", **asked)
        assert (str(policy.compute).removeprefix("torch."), policy.storage) == expected


def test_a_model_whose_every_weight_was_trained_runs_in_its_compute_dtype(base: Path, tmp_path: Path) -> None:
    policy = resolve_precision(base, "bfloat16", None, "cpu", "full")
    model = load(base, policy)
    assert model.dtype == torch.float32
    model.save_pretrained(tmp_path / "full")
    policy.save(tmp_path / "full")
    loaded, tokenizer, found = load_for_inference(tmp_path / "full", device="cpu")
    assert (found.compute, found.storage, found.trainable) == (torch.bfloat16, "bfloat16", "lora")
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.bfloat16}
    assert tokenizer is None


def test_an_adapter_without_a_policy_takes_the_best_of_this_device(base: Path, tmp_path: Path) -> None:
    adapter = save_adapter(base, tmp_path / "adapter", "bfloat16", "nf4")
    (adapter / "precision_policy.json").unlink()
    _, _, policy = load_for_inference(adapter, device="cpu")
    assert policy == resolve_precision(base, device="cpu")
    assert isinstance(policy, PrecisionPolicy)


# ------------------------------------------------------------------------------------------------------- errors


def test_options_that_cannot_work() -> None:
    command = ("nowhere", "--max_new_tokens", "0", "--temperature", "-1")
    assert refused(UsageError, options_of, "chat", command) == (
        "invalid arguments\n"
        "  - --max_new_tokens 0\n"
        "    expected  at least 1\n"
        "    fix       give a larger one\n"
        "  - --temperature -1\n"
        "    expected  0 (greedy) or more\n"
        "    fix       0.7 is a common choice\n"
        "  = isotype chat --help lists the arguments"
    )


def test_a_model_without_a_tokenizer(tmp_path: Path) -> None:
    bare = save_model(tmp_path / "bare")
    for file in bare.glob("token*"):
        file.unlink()
    assert refused(CheckpointError, talk, bare, "w1") == (
        "no tokenizer in the checkpoint\n"
        f"  - {bare} has no tokenizer\n"
        "    expected  tokenizer.json and tokenizer_config.json in the directory of the weights\n"
        "    fix       copy these files from the original model of these weights"
    )


def test_a_model_that_writes_no_text(base: Path, tmp_path: Path) -> None:
    config = transformers.AutoConfig.from_pretrained(base, num_labels=1)
    transformers.LlamaForSequenceClassification(config).save_pretrained(tmp_path / "reward")
    assert refused(UsageError, talk, tmp_path / "reward", "w1") == (
        "this model does not generate text\n"
        f"  - {tmp_path}/reward: a LlamaForSequenceClassification\n"
        "    expected  a model with a language head\n"
        "    fix       give another model"
    )


def test_a_device_that_is_elsewhere(base: Path) -> None:
    with pytest.raises(UsageError) as caught:
        talk(base, "w1", device="h100")
    assert caught.value.problems[0].given == "device h100"
    assert caught.value.problems[0].expected == "a device of this machine"


def test_sigterm_ends_a_chat_that_ctrl_c_would_not(monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(*args: Any, **kwargs: Any) -> str:
        raise Terminated

    console = Console(file=io.StringIO())
    monkeypatch.setattr(console, "input", asked)
    with pytest.raises(Terminated):
        next(_questions(SimpleNamespace(ask=None), True, console))


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{% for m in messages %}\n{{ m['role' }}{% endfor %}", "line 2: unexpected '}', expected ']'"),
        ("{% break %}", "it cannot be compiled: 'break' outside loop"),
    ],
)
def test_a_template_that_is_damaged_is_named_with_its_place(
    base: Path, tmp_path: Path, template: str, said: str
) -> None:
    model, tokenizer, _ = load_for_inference(base, device="cpu")
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(template)
    damaged = transformers.AutoTokenizer.from_pretrained(tmp_path)
    with pytest.raises(UsageError) as caught:
        answer(model, damaged, [{"role": "user", "content": "w1"}])
    assert f"{tmp_path / 'chat_template.jinja'}: {said}" in str(caught.value)


# ------------------------------------------------------------------------------------------------ images


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("PIL", reason="needs the package pillow")
    folder = save_vision_model("gemma3", tmp_path_factory.mktemp("gemma3"))
    for number in (0, 1):
        picture(40, 30, seed=number).save(folder / f"{number}.png")
    return folder


def seen(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return the image inputs of each question."""
    found: list[Any] = []
    generate = transformers.Gemma3ForConditionalGeneration.generate

    def noting(self: Any, **inputs: Any) -> Any:
        found.append(inputs.get("pixel_values"))
        return generate(self, **inputs)

    monkeypatch.setattr(transformers.Gemma3ForConditionalGeneration, "generate", noting)
    return found


def test_pictures_go_with_the_next_question_and_stay_in_the_conversation(
    seeing: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = seen(monkeypatch)
    shown = talk(
        seeing, "w1 w2", f"/image {seeing / '1.png'}", "w3", "/reset", "w4", image=[str(seeing / "0.png")]
    )
    assert f"({seeing / '1.png'}: 40 x 30, with the next question)" in shown
    assert [None if each is None else len(each) for each in found] == [1, 2, None]


def test_an_answer_depends_on_the_picture(seeing: Path) -> None:
    model, processor, _ = load_for_inference(str(seeing), "float32", None, "cpu")
    answers = []
    for number in (0, 1):
        turn = {"type": "image", "image": opened_picture(str(seeing / f"{number}.png"), processor)}
        batch = encode(processor, [{"role": "user", "content": [turn, {"type": "text", "text": "w1"}]}])
        answers.append(model(**batch).logits[0, -1])
    assert not torch.equal(*answers)


@pytest.mark.parametrize(
    ("name", "what"),
    [("no.png", "no.png: No such file or directory"), ("config.json", "cannot identify image file")],
)
def test_a_picture_that_cannot_be_shown(seeing: Path, name: str, what: str) -> None:
    message = refused(
        UsageError, chat, options(seeing, "w1", image=[str(seeing / name)]), Console(file=io.StringIO())
    )
    assert "the image cannot be shown" in message
    assert what in message


def test_a_model_of_text_is_shown_none(base: Path) -> None:
    message = refused(UsageError, chat, options(base, "w1", image=["a.png"]), Console(file=io.StringIO()))
    assert message.startswith("the model accepts only text\n  - the image a.png")
