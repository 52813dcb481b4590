"""A merged model in GGUF, read by llama.cpp, beside the same merge in safetensors, read by transformers.

The safetensors hold the dtype that the type of GGUF is rounded from (float16 for f16, float32 for blocks of codes), and transformers
computes in float32. *ids*: whether llama.cpp's tokenizer gives the prompt the same tokens. *greedy*: how many of the first tokens
that each writes are the same. Then the largest difference of two log-probabilities over the prompt, and the mean KL divergence in nats, once as
llama.cpp reads the file and once as isotype does, which computes in float32: blocks of few bits differ by what they have rounded. A type that llama.cpp alone writes is left out where `llama-quantize` is not on the PATH.

Needs xllamacpp (`pip install xllamacpp`: llama.cpp and its server in a wheel, nothing is compiled), which isotype itself does not.

Run: python benchmarks/gguf_readers.py ADAPTER [TYPE …] [--tokens 32]. Prints a table and one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import torch

import isotype
import results
from isotype.checkpoint.merge.merge import merge_adapter
from isotype.checkpoint.merge.report import compare_logits
from isotype.core.dtypes import GGUF_TYPES, LLAMA_CPP_TYPES

_ALL = 1_000_000
"""More than any vocabulary has."""
QUESTION = "How is a bfloat16 number laid out in bits?"


@dataclass(frozen=True)
class Result:
    """What one file was read as.

    Attributes:
        kind: type of GGUF.
        ids: whether the prompt has the same tokens.
        greedy: first tokens that are the same, of `tokens`.
        tokens: how many were written.
        largest: of the differences of log-probabilities.
        divergence: mean KL over the prompt's positions, in nats.
        here: the same where isotype reads the file.
        error: median error of a weight, as a part of its update.
    """

    kind: str
    ids: bool
    greedy: int
    tokens: int
    largest: float
    divergence: float
    here: float
    error: float


def by_transformers(directory: Path, tokens: int) -> tuple[list[int], torch.Tensor, list[int], str]:
    """Prompt, logits, answer and the prompt as text."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory)
    message = [{"role": "user", "content": QUESTION}]
    text: str = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    inputs = tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = model(inputs).logits[0].double()
        written = model.generate(
            inputs, max_new_tokens=tokens, do_sample=False, eos_token_id=None, pad_token_id=0
        )
    return inputs[0].tolist(), logits, written[0, inputs.shape[1] :].tolist(), text


def by_llama_cpp(path: Path, text: str, tokens: int) -> tuple[list[int], torch.Tensor, list[int]]:
    """Prompt, log-probabilities and answer, from llama.cpp's server: what comes after each beginning of the prompt."""
    import xllamacpp

    settings: Any = xllamacpp.CommonParams()
    settings.model.path, settings.n_ctx, settings.n_parallel, settings.warmup = str(path), 512, 1, False
    server = xllamacpp.Server(settings)

    def answer(place: str, **content: Any) -> Any:
        request = Request(
            server.listening_address + place,
            json.dumps(content).encode(),
            {"Content-Type": "application/json"},
        )
        with urlopen(request) as response:
            return json.load(response)

    prompt: list[int] = answer("/tokenize", content=text, add_special=False, parse_special=True)["tokens"]
    greedy = {"temperature": 0, "ignore_eos": True, "return_tokens": True, "cache_prompt": True}
    rows = []
    for end in range(1, len(prompt) + 1):
        step = answer("/completion", prompt=prompt[:end], n_predict=1, n_probs=_ALL, **greedy)
        chances = step["completion_probabilities"][0]["top_logprobs"]
        row = torch.empty(len(chances), dtype=torch.float64)
        row[[each["id"] for each in chances]] = torch.tensor(
            [each["logprob"] for each in chances], dtype=torch.float64
        )
        rows.append(row)
    written: list[int] = answer("/completion", prompt=prompt, n_predict=tokens, **greedy)["tokens"]
    return prompt, torch.stack(rows), written


def by_isotype(path: Path, prompt: list[int]) -> torch.Tensor:
    """Logits in float32."""
    model = isotype.load(path, isotype.resolve_precision(path, "float32", device="cpu"))
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([prompt])).logits[0].double()
    return logits


def main() -> None:
    """Merge, read both ways, compare."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("adapter", type=Path)
    parser.add_argument("types", nargs="*", default=["f32", "f16", "bf16", "q8_0", "q4_0", "q4_k_m"])
    parser.add_argument("--tokens", type=int, default=32)
    options = results.parsed(parser)
    read_back: list[Result] = []
    with tempfile.TemporaryDirectory() as scratch:
        dense_results: dict[torch.dtype, tuple[list[int], torch.Tensor, list[int], str]] = {}
        for kind in options.types:
            if kind in LLAMA_CPP_TYPES and shutil.which("llama-quantize") is None:
                print(f"{kind}: llama-quantize is not on the PATH")
                continue
            dtype, path = GGUF_TYPES[kind], Path(scratch) / f"{kind}.gguf"
            if dtype not in dense_results:
                dense = Path(scratch) / f"{dtype}"
                merge_adapter(options.adapter, dense, dtype=dtype)
                dense_results[dtype] = by_transformers(dense, options.tokens)
                shutil.rmtree(dense)
            prompt, logits, answer, text = dense_results[dtype]
            report = merge_adapter(options.adapter, path, stored=kind)
            ids, read, written = by_llama_cpp(path, text, options.tokens)
            same = next(
                (n for n, pair in enumerate(zip(answer, written, strict=True)) if len({*pair}) > 1),
                options.tokens,
            )
            difference = compare_logits(logits.log_softmax(-1), read)
            read_back.append(
                Result(
                    kind,
                    ids == prompt,
                    same,
                    options.tokens,
                    difference.max_abs,
                    difference.mean_kl,
                    compare_logits(logits, by_isotype(path, prompt)).mean_kl,
                    report.median_error,
                )
            )
            path.unlink()
    print(
        "type     ids  greedy    largest difference  KL          KL here     error of a weight / its update"
    )
    for each in read_back:
        print(
            f"{each.kind:7}  {'same' if each.ids else 'OTHER':5}{each.greedy:3} of {each.tokens:3}  {each.largest:18.3g}  "
            f"{each.divergence:<10.3g}  {each.here:<10.3g}  {each.error:.3g}"
        )
        if options.record:
            row = {**asdict(each), "ids": "same" if each.ids else "other"}
            results.append(
                f"gguf/{each.kind}", results.measured(row, **{key: "" for key in row if key != "kind"})
            )
    print(json.dumps([asdict(each) for each in read_back]))


if __name__ == "__main__":
    main()
