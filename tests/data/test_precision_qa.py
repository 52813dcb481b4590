"""Checks of the shipped data set: form, no leak from test to train, and the numbers it states."""

import inspect
import json
import math
import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "src" / "isotype" / "data" / "precision_qa"
SPLITS = {"train": 150, "test": 25}

FORMATS = {
    name: getattr(torch, name)
    for name in ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
}
NUMBER = r"(-?\d+(?:\.\d+)?(?:e-?\d+)?)"


def load(split):
    """The rows of a split as (question, answer)."""
    lines = (DATA / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    return [(row["prompt"][0]["content"], row["completion"][0]["content"]) for row in rows]


def everything():
    return load("train") + load("test")


def words(text):
    return re.sub(r"[^a-z0-9]+", " ", text.lower()).split()


def normalized(text):
    return " ".join(words(text))


def overlap(a, b):
    a, b = set(words(a)), set(words(b))
    return len(a & b) / len(a | b)


# ---------------------------------------------------------------- form


@pytest.mark.parametrize("split", SPLITS)
def test_schema(split):
    for line in (DATA / f"{split}.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        assert set(row) == {"prompt", "completion"}
        for key, role in (("prompt", "user"), ("completion", "assistant")):
            (message,) = row[key]
            assert set(message) == {"role", "content"}
            assert message["role"] == role
            assert message["content"]
            assert message["content"] == message["content"].strip()


@pytest.mark.parametrize("split", SPLITS)
def test_counts_and_ascii(split):
    raw = (DATA / f"{split}.jsonl").read_bytes()
    assert raw.isascii()
    assert b"\r" not in raw
    assert raw.endswith(b"\n")
    assert raw.count(b"\n") == len(load(split)) >= SPLITS[split]


def test_length_and_style():
    for question, answer in everything():
        assert question[-1] in "?.", question
        assert answer[-1] == ".", answer
        assert 4 <= len(answer.split()) <= 40, answer
        assert len(question.split()) <= 25, question
        assert not re.search(r"\n|`|\*\*[A-Za-z]|^#|^- ", answer), answer


def test_no_duplicate_questions():
    questions = [normalized(question) for question, _ in everything()]
    assert len(set(questions)) == len(questions)


def test_no_test_question_leaks_into_train():
    train = [question for question, _ in load("train")]
    for question, _ in load("test"):
        for other in train:
            assert normalized(question) not in normalized(other), (question, other)
            assert normalized(other) not in normalized(question), (question, other)
            assert sorted(words(question)) != sorted(words(other)), (question, other)
            assert overlap(question, other) < 0.7, (question, other)


def test_demo_row_and_its_training_rows():
    question, answer = load("test")[0]
    assert "bfloat16" in question
    assert "8 exponent bits" in answer
    assert "7 mantissa bits" in answer
    support = [
        a
        for _, a in load("train")
        if a.startswith("bfloat16 has") and re.search(r"\b[78] (exponent|mantissa)", a)
    ]
    assert len(support) >= 6


# ---------------------------------------------------------------- numbers


def layout(dtype):
    """Exponent and mantissa bits of a dtype, from its size and eps."""
    info = torch.finfo(dtype)
    mantissa = round(-math.log2(info.eps))
    return info.bits - 1 - mantissa, mantissa


def next_up(value, dtype):
    """The gap above value, by stepping the bit pattern of a 16-bit float."""
    bits = torch.tensor(value, dtype=dtype).view(torch.int16)
    return (bits + 1).view(dtype).double().item() - value


def subnormal(dtype):
    return torch.tensor(1, dtype=torch.int16).view(dtype).double().item()


def last_exact_integer(dtype):
    return 2 ** (layout(dtype)[1] + 1)


def default(function, name):
    return inspect.signature(function).parameters[name].default


def facts():
    """(regular expression with one number, its true value, relative tolerance, least number of matches)."""
    table = []
    for name, rows in (("float16", 4), ("float8_e4m3fn", 2), ("float8_e5m2", 2)):
        table.append((rf"largest {name} value is {NUMBER}", torch.finfo(FORMATS[name]).max, 0, rows))
    for name, rows in (("bfloat16", 3), ("float32", 2)):
        table.append((rf"largest {name} value is about {NUMBER}", torch.finfo(FORMATS[name]).max, 2e-3, rows))
    half, brain, single = torch.float16, torch.bfloat16, torch.float32
    table += [
        (rf"maximum of {NUMBER}", torch.finfo(half).max, 0, 1),
        (rf"float16 runs out of range at {NUMBER}", torch.finfo(half).max, 0, 1),
        (rf"is {NUMBER} for float16", torch.finfo(half).min, 0, 1),
        (rf"exceed {NUMBER}, the largest float16", torch.finfo(half).max, 0, 1),
        (
            rf"smallest normal float16 value is 2\*\*-14, about {NUMBER}",
            torch.finfo(half).smallest_normal,
            1e-3,
            3,
        ),
        (
            rf"smallest normal bfloat16 value is (?:2\*\*-126, )?about {NUMBER}",
            torch.finfo(brain).smallest_normal,
            4e-3,
            4,
        ),
        (rf"smallest positive float16 value is about {NUMBER}", subnormal(half), 1e-3, 2),
        (rf"eps of float16 is 2\*\*-10, about {NUMBER}", torch.finfo(half).eps, 1e-3, 2),
        (rf"eps of bfloat16 is 2\*\*-7, which is {NUMBER}", torch.finfo(brain).eps, 0, 2),
        (rf"eps of float32 is (?:2\*\*-23, )?about {NUMBER}", torch.finfo(single).eps, 2e-3, 3),
        (rf"next bfloat16 number after 1\.0 is {NUMBER}", 1 + next_up(1.0, brain), 0, 1),
        (rf"They are {NUMBER} apart", next_up(1.0, brain), 0, 1),
        (rf"the gap above 1 is {NUMBER}", next_up(1.0, brain), 2e-3, 1),
        (rf"\bfloat16 holds every integer exactly (?:only )?up to {NUMBER}", last_exact_integer(half), 0, 4),
        (rf"bfloat16 holds every integer exactly (?:only )?up to {NUMBER}", last_exact_integer(brain), 0, 4),
        (rf"2049 rounds to {NUMBER}", torch.tensor(2049.0).to(half).item(), 0, 2),
        (rf"257 rounds (?:back )?to {NUMBER}", torch.tensor(257.0).to(brain).item(), 0, 3),
        (rf"float32 holds .* 2\*\*24, which is {NUMBER}", last_exact_integer(single), 0, 4),
        (rf"nearest bfloat16 number(?: to 0\.1)? is {NUMBER}", torch.tensor(0.1).to(brain).item(), 0, 3),
        (rf"It prints {NUMBER}, the nearest bfloat16", torch.tensor(0.1).to(brain).item(), 0, 1),
        (rf"exp overflows float16 above about {NUMBER}", math.log(torch.finfo(half).max), 1e-3, 1),
        (rf"exponent bias of float16 is {NUMBER}", 2 ** (layout(half)[0] - 1) - 1, 0, 2),
        (rf"exponent bias of bfloat16 is {NUMBER}", 2 ** (layout(brain)[0] - 1) - 1, 0, 1),
        (rf"int8 holds integers from {NUMBER} to 127", torch.iinfo(torch.int8).min, 0, 3),
        (rf"int8 holds integers from -128 to {NUMBER}", torch.iinfo(torch.int8).max, 0, 3),
        (rf"GradScaler starts at {NUMBER}", default(torch.amp.GradScaler, "init_scale"), 0, 2),
        (rf"doubled after {NUMBER} good steps", default(torch.amp.GradScaler, "growth_interval"), 0, 1),
        (rf"32 / 64 = {NUMBER} bits", 32 / 64, 0, 1),
        (rf"from 0\.5 to {NUMBER} bits", 8 / 64 + 32 / (64 * 256), 1e-3, 2),
        (rf"saves about {NUMBER} bits", 32 / 64 - (8 / 64 + 32 / (64 * 256)), 1e-2, 4),
        (rf"It takes {NUMBER} bits per weight: 4 for the code", 4 + 32 / 64, 0, 1),
        (rf"MXFP4 takes {NUMBER} bits", 4 + 8 / 32, 0, 1),
        (rf"largest e2m1 value is {NUMBER}", 2.0**2 * 1.5, 0, 2),
        (rf"It adds {NUMBER} parameters: 16 times \(4096 \+ 4096\)", 16 * (4096 + 4096), 0, 1),
        (rf"{NUMBER} GB: 7 billion parameters times 4 bytes", 28, 0, 1),
        (rf"{NUMBER} GB: 7 billion parameters times 2 bytes", 14, 0, 2),
        (rf"{NUMBER} GB: 7 billion parameters times half a byte", 3.5, 0, 2),
        (rf"needs {NUMBER} bytes: 2 for the weight, 2 for the gradient, 4 .* and 8", 2 + 2 + 4 + 8, 0, 1),
    ]
    return table


def wrong(rows):
    """Answers that state a number of the table wrongly."""
    found = []
    for pattern, truth, tolerance, _ in facts():
        for _, answer in rows:
            for number in re.findall(pattern, answer):
                if not math.isclose(float(number), truth, rel_tol=tolerance):
                    found.append((answer, truth))
    return found


def test_numbers():
    assert wrong(everything()) == []
    answers = [answer for _, answer in everything()]
    hits = {pattern: sum(len(re.findall(pattern, each)) for each in answers) for pattern, *_ in facts()}
    assert [pattern for pattern, _, _, least in facts() if hits[pattern] < least] == []


def test_the_number_check_can_fail():
    rows = everything()
    assert wrong(rows) == []
    for right, bad in (
        ("65504", "65505"),
        ("0.0078125", "0.0078"),
        ("57344", "57345"),
        ("3.39e38", "3.49e38"),
        ("14 GB", "15 GB"),
    ):
        spoiled = [(question, answer.replace(right, bad)) for question, answer in rows]
        assert wrong(spoiled), right


def test_bit_layouts():
    seen = dict.fromkeys(FORMATS, 0)
    pattern = r"\b(float\w+|bfloat16) has (?:1 sign bit, )?(\d+) exponent bits and (\d+) mantissa bits"
    for _, answer in everything():
        for name, exponent, mantissa in re.findall(pattern, answer):
            assert (int(exponent), int(mantissa)) == layout(FORMATS[name]), answer
            seen[name] += 1
    assert min(seen.values()) >= 1, seen
    assert seen["bfloat16"] >= 6


def test_powers_of_two_next_to_their_value():
    count = 0
    for _, answer in everything():
        for power, number in re.findall(rf"2\*\*(-?\d+),? (?:about|which is) {NUMBER}", answer):
            assert math.isclose(2.0 ** int(power), float(number), rel_tol=5e-3), answer
            count += 1
        for number, power in re.findall(rf"{NUMBER}(?: apart)?, which is 2\*\*(-?\d+)", answer):
            assert float(number) == 2.0 ** int(power), answer
            count += 1
    assert count >= 15


def answers_with(phrase):
    found = [(q, a) for q, a in everything() if phrase in q or phrase in a]
    assert found, phrase
    return found


def test_behaviour_of_torch_that_answers_describe():
    half, brain = torch.float16, torch.bfloat16

    answers_with("70000 overflows to inf")
    assert torch.tensor(70000.0).to(half).isinf()
    answers_with("What happens to a gradient of 1e-8 in float16?")
    assert torch.tensor(1e-8).to(half) == 0
    assert torch.tensor(1e-8).to(brain) != 0
    answers_with("float16 rounds to zero at 2**-25 and below")
    assert torch.tensor(2.0**-25).to(half) == 0
    assert torch.tensor(2.0**-24).to(half) != 0
    for phrase, step in (("1.0 plus 0.001 in bfloat16", 0.001), ("add 0.002 to 1.0 in bf16", 0.002)):
        answers_with(phrase)
        assert torch.tensor(1.0, dtype=brain) + torch.tensor(step, dtype=brain) == 1
    answers_with("adding 1e-8 to 1 changes nothing")
    assert torch.tensor(1.0) + torch.tensor(1e-8) == 1
    answers_with("the square of 256 is already inf")
    assert (torch.tensor(256.0, dtype=half) ** 2).isinf()
    assert (torch.tensor(255.0, dtype=half) ** 2).isfinite()
    answers_with("The float32 minimum becomes -inf in float16")
    assert torch.tensor(torch.finfo(torch.float32).min).to(half) == -math.inf
    answers_with("a row of only -inf gives NaN")
    assert torch.full((3,), -math.inf).softmax(0).isnan().all()
    answers_with("torch.promote_types")
    assert torch.promote_types(half, brain) == torch.float32
    answers_with("A Python number does not promote a floating-point tensor")
    assert (torch.ones(2, dtype=brain) * 2.5).dtype == brain
    answers_with("A matrix multiply needs both operands in the same dtype")
    with pytest.raises(RuntimeError):
        torch.ones(2, 2) @ torch.ones(2, 2, dtype=brain)
    answers_with("Autocast uses float16 by default on CUDA and bfloat16 on CPU")
    assert torch.get_autocast_dtype("cuda") == half
    assert torch.get_autocast_dtype("cpu") == brain
    answers_with("float8_e5m2 has both infinity and NaN")
    assert torch.tensor(math.inf).to(torch.float8_e5m2).float().isinf()
    answers_with("float8_e4m3fn has no infinity")
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    assert not codes.isinf().any()
    assert codes.isnan().any()
    counter = torch.tensor(0.0, dtype=brain)
    for _ in range(300):
        counter = counter + 1
    answers_with("It stops at 256")
    assert counter == 256
