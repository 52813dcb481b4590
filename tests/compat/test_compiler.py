"""torch's compiler is imported when something asks for it, and then it is told what it was to be told."""

from __future__ import annotations

import json
import random
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from isotype.compat.compiler import uncompiled
from tests.processes import printed

IMPORTED = "sys.modules.get('torch._dynamo.convert_frame') is not None"

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "bfloat16",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}


def test_a_check_of_a_checkpoint_imports_no_compiler_and_no_data_libraries(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    code = """if True:
        import json, sys
        from isotype.cli.main import main
        status = main(["check", sys.argv[1], "--device", "h200", "--length", "8", "--json"])
        heavy = ("torch._dynamo.convert_frame", "torch._inductor", "pandas", "sklearn", "scipy", "datasets", "trl")
        print()
        print(json.dumps([status, [name for name in heavy if name in sys.modules]]))
    """
    *_, last = printed(code, tmp_path).splitlines()
    assert json.loads(last) == [0, []]


USED = """if True:
    import sys
    import torch
    from isotype.compat.compiler import defer_compiler, uncompiled
    from torch._subclasses.fake_tensor import FakeTensorMode

    defer_compiler()
    imported = lambda: IMPORTED
    double = torch.compiler.disable(lambda x: 2 * x)
    later = torch.compiler.disable(recursive=False)(lambda x: 3 * x)
    constant = torch.compiler.assume_constant_result(lambda: 4)
    with FakeTensorMode():
        weight = torch.nn.Parameter(torch.ones(2))
        weight.grad = torch.ones(2)
        torch.optim.SGD([weight], lr=0.1).step()
    with uncompiled():
        pass
    print(imported(), int(double(torch.tensor(1))), hasattr(constant, "_dynamo_marked_constant"))
    frames = []
    def backend(graph, inputs):
        frames.append(graph)
        return graph
    with uncompiled():
        compiled = torch.compile(lambda x: x * 5, backend=backend)
        print(int(compiled(torch.tensor(1))), len(frames))
    print(int(compiled(torch.tensor(1))), len(frames))
    print(imported(), int(later(torch.tensor(1))), constant._dynamo_marked_constant, type(torch._dynamo).__name__)
    """


def test_it_is_imported_where_it_is_used_and_knows_what_was_marked_before() -> None:
    assert printed(USED.replace("IMPORTED", IMPORTED)).splitlines() == [
        "False 2 False",
        "5 0",
        "5 1",
        "True 3 True module",
    ]


@pytest.mark.exhaustive
def test_torch_and_transformers_still_import_it_without_compiling() -> None:
    """Once this fails `isotype.compat.compiler` can go, and `isotype check` need not ask for it."""
    fakes = f"import sys, torch._subclasses.fake_tensor as f; f.FakeTensorMode(); print({IMPORTED})"
    masks = f"import sys, transformers.masking_utils; print({IMPORTED})"
    assert [printed(code).strip() for code in (fakes, masks)] == ["True", "True"]


@pytest.mark.parametrize("stance", ["eager_on_recompile", None])
def test_a_stance_that_code_sets_stays(stance: str | None) -> None:
    before: Any = torch.compiler.set_stance("default")
    try:
        with uncompiled():
            if stance is not None:
                torch.compiler.set_stance(stance)
        after: Any = torch.compiler.set_stance("default")
        assert after.prev.stance == (stance or "default")
    finally:
        before.__exit__(None, None, None)


@pytest.mark.parametrize("seed", range(8))
def test_blocks_that_overlap_restore_the_stance_of_the_script(seed: int) -> None:
    """The blocks of a recorded step and of the search for averages end in any order."""
    draw, before, expected = random.Random(seed), torch.compiler.set_stance("default"), "default"
    blocks = list[ExitStack]()
    try:
        for _ in range(12):
            step = draw.choice(["begin", "end", "stance"])
            if step == "begin":
                blocks.append(ExitStack())
                blocks[-1].enter_context(uncompiled())
                assert _stance() == "force_eager"
            elif step == "end" and blocks:
                blocks.pop(draw.randrange(len(blocks))).close()
            elif step == "stance":
                expected = draw.choice(["eager_on_recompile", "fail_on_recompile", "default"])
                torch.compiler.set_stance(expected)
        while blocks:
            blocks.pop(draw.randrange(len(blocks))).close()
        assert _stance() == expected
    finally:
        before.__exit__(None, None, None)  # type: ignore[attr-defined]


def _stance() -> str:
    now: Any = torch.compiler.set_stance("default")
    now.__exit__(None, None, None)
    stance: str = now.prev.stance
    return stance
