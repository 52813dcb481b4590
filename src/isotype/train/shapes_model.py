"""The model of `isotype demo --pictures`: SmolLM2 with a small vision tower that was trained to name shapes.

No package that isotype can depend on contains a vision-language model. Therefore isotype trains a vision tower (0.4
million parameters) and a projector on drawn images for half a minute. The outputs of the projector become similar to the
embeddings of matching words ("three", "red", "circles"). This training does not change the weights of SmolLM2.
"""

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import nn
from torch.nn import functional

from isotype.compat.transformers import without_bars
from isotype.core.threads import one_thread
from isotype.data.drawn import CELL, COLOURS, CONTENTS, FORMS, HELD_BACK, NUMBERS, SIDE, Content, draw

STEPS = 300
_ROWS = 64
_RATE = 2e-3
_WIDTH = 96
_TOKENS = (SIDE // CELL) ** 2
IMAGE = "<image>"
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_NAMES = ((*NUMBERS,), (*COLOURS,), tuple(f"{form}s" for form in FORMS))
"""Image tokens learn the embeddings of these words. Three successive tokens stand for number, colour and form."""


def make_shapes_model(folder: Path, say: Callable[[str], object]) -> Path:
    """Train the model and save it with its processor in `folder`, unless `folder` already has a model."""
    if (folder / "config.json").is_file():
        return folder
    from transformers import LlavaForConditionalGeneration

    from isotype.checkpoint.adapter import load
    from isotype.checkpoint.checkpoint import open_checkpoint
    from isotype.checkpoint.resolve import resolve_precision

    checkpoint = open_checkpoint("embedded:smollm2")
    policy = resolve_precision("embedded:smollm2", dtype="float32", device="cpu", trainable="full")
    language = load("embedded:smollm2", policy)
    tokenizer: Any = checkpoint.tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": [IMAGE]})
    language.resize_token_embeddings(len(tokenizer), pad_to_multiple_of=64, mean_resizing=False)
    torch.manual_seed(0)
    config = _config(language.config, tokenizer.convert_tokens_to_ids(IMAGE))
    model = LlavaForConditionalGeneration(config)
    model.model.language_model.load_state_dict(language.model.state_dict())
    model.tie_weights()
    say(f"training a vision tower to name shapes, in {STEPS} steps of {_ROWS} drawn images")
    with one_thread():
        _teach(model, tokenizer)
    part = folder.with_name(f"{folder.name}.part")  # renamed when it is complete
    shutil.rmtree(part, ignore_errors=True)
    _processor(tokenizer).save_pretrained(part)
    with without_bars():
        model.to(torch.bfloat16).save_pretrained(part)
    return part.replace(folder)


def _config(language: Any, image: int) -> Any:
    from transformers import LlavaConfig, SiglipVisionConfig

    vision = SiglipVisionConfig(
        hidden_size=_WIDTH,
        intermediate_size=3 * _WIDTH,
        num_hidden_layers=2,
        num_attention_heads=3,
        image_size=SIDE,
        patch_size=CELL,
        vision_use_head=False,
    )
    return LlavaConfig(
        vision_config=vision,
        text_config=language,
        image_token_index=image,
        image_seq_length=_TOKENS,
        vision_feature_select_strategy="full",
        vision_feature_layer=-1,
        tie_word_embeddings=True,
    )


def _processor(tokenizer: Any) -> Any:
    from transformers import LlavaProcessor, SiglipImageProcessorPil

    pictures = SiglipImageProcessorPil(size={"height": SIDE, "width": SIDE})
    return LlavaProcessor(
        pictures,
        tokenizer,
        patch_size=CELL,
        vision_feature_select_strategy="full",
        num_additional_image_tokens=0,
        chat_template=TEMPLATE,
        image_token=IMAGE,
    )


def _teach(model: Any, tokenizer: Any) -> None:
    """Train vision tower and projector so that the tokens of an image become the embeddings of words in `_NAMES`."""
    trained = [model.model.vision_tower, model.model.multi_modal_projector]
    parameters = [parameter for part in trained for parameter in part.parameters()]
    words = [[tokenizer(f" {name}").input_ids[0] for name in names] for names in _NAMES]
    targets = [model.get_input_embeddings().weight[torch.tensor(ids)].detach() for ids in words]
    scale = torch.cat(targets).std()
    optimizer = torch.optim.AdamW(parameters, lr=_RATE, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, _RATE, total_steps=STEPS, pct_start=0.1)
    contents = [content for content in CONTENTS if content not in HELD_BACK]
    rng = random.Random(0)
    with torch.enable_grad():
        for _ in range(STEPS):
            drawn = [rng.choice(contents) for _ in range(_ROWS)]
            pictures = numpy.stack([draw(content, rng) for content in drawn])
            pixels = torch.from_numpy(pictures).permute(0, 3, 1, 2).float() / 127.5 - 1
            features = torch.stack(model.model.get_image_features(pixels).pooler_output)
            loss = features.new_zeros(())
            for kind, target in enumerate(targets):
                right = torch.tensor([_indices(content)[kind] for content in drawn])
                part = features[:, kind::3]
                logits = part @ functional.normalize(target, dim=-1).T / scale
                wanted = right[:, None].expand(-1, part.shape[1])
                loss = loss + functional.cross_entropy(logits.transpose(1, 2), wanted)
                loss = loss + functional.mse_loss(part, target[right][:, None].expand_as(part)) / scale**2
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            schedule.step()


def _indices(content: Content) -> tuple[int, int, int]:
    return content.number - 1, list(COLOURS).index(content.colour), FORMS.index(content.form)
