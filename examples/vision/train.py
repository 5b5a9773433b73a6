"""Make the model that sees: tokenizer, tower, language model, measurement, and the files of both checkpoints.

    python examples/vision/train.py        # everything, about a quarter of an hour on one CPU core

It is a LLaVA of half a million parameters. First its tower learns, by a linear reading of the mean of a picture's
tokens, where a whole picture's numbers are, and which number a crop shows; then, with the tower as it is, the language
model learns the dialogues, with sums as text beside them.

What is measured is never scripted: `demo.py` measures as `make demo-vision` does, by rollouts.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers as t
from torch.nn.functional import cross_entropy

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path += [str(ROOT), str(HERE)]

from demo import scores, task  # noqa: E402

from benchmarks.train_model import build_tokenizer  # noqa: E402
from fsm_rollout.tools import tool_schema  # noqa: E402

IMAGE = "<image>"
PATCH = 8
MEASURED = 256
TEMPLATE = (ROOT / "fsm_rollout/model/chat_template.jinja").read_text("utf-8").replace(
    "part.text if part.text is defined else ''", f"'{IMAGE}' if part.type == 'image' else part.text"
)  # fmt: skip
SYSTEM = (ROOT / "configs/agents/looker.md").read_text("utf-8").strip()
TOOLS = [tool_schema(task.zoom)]
PICTURE = [{"type": "image"}]


# ------------------------------------------------------------------------------------------------ dialogues


def call(cell: int) -> dict[str, Any]:
    """Return the turn that zooms in on a cell, 0 to 15."""
    arguments = {"row": cell // task.CELLS + 1, "column": cell % task.CELLS + 1}
    return {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "zoom", "arguments": arguments}}]}


def dialogue(cells: Sequence[int], numbers: Sequence[int]) -> list[dict[str, Any]]:
    """Return the dialogue about a picture with numbers in two of its cells."""
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": [*PICTURE, {"type": "text", "text": task.QUESTION}]},
    ]
    for cell in cells:
        messages += [call(cell), {"role": "tool", "content": PICTURE}]
    return [*messages, {"role": "assistant", "content": answer(*numbers)}]


def answer(left: int, right: int) -> str:
    """Return the last turn."""
    return f"{left} + {right} = {left + right}"


def draw_pairs(rng: random.Random, number: int) -> list[tuple[int, int]]:
    """Draw pairs of numbers that are not held back."""
    pairs = ((rng.randint(10, 99), rng.randint(10, 99)) for _ in iter(int, 1))
    free = (pair for pair in pairs if not task.is_held_back(*pair))
    return [next(free) for _ in range(number)]


def processor(vocabulary: int) -> Any:
    """Return the model's processor: a tokenizer made for these dialogues, and what makes a picture 32 × 32."""
    rng = random.Random(0)
    bare = build_tokenizer(300, TEMPLATE, [""])  # only to render with
    texts = list[str]()
    for number, pair in enumerate(draw_pairs(rng, 200)):
        messages = dialogue(sorted(rng.sample(range(16), 2)), pair)
        shown = bare.apply_chat_template(messages, tools=TOOLS if number < 40 else None, tokenize=False)
        texts += str(shown).split(IMAGE)
    tokenizer = build_tokenizer(vocabulary - 1, TEMPLATE, texts)
    tokenizer.add_special_tokens({"additional_special_tokens": [IMAGE]})
    images = t.SiglipImageProcessorPil(
        size={"height": task.CELL, "width": task.CELL}, resample=4, image_mean=[0.5] * 3, image_std=[0.5] * 3
    )  # a mean over boxes
    return t.LlavaProcessor(
        images, tokenizer, patch_size=PATCH, vision_feature_select_strategy="full", chat_template=TEMPLATE
    )


def new_model(tokenizer: Any) -> Any:
    """Return the model before it has learnt anything."""
    common = {"initializer_range": 0.05, "dtype": "float32"}  # 0.02 is too small for models this narrow
    vision = t.SiglipVisionConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4, image_size=task.CELL,
        patch_size=PATCH, vision_use_head=False,
    )  # fmt: skip
    text = t.Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=96, intermediate_size=256, num_hidden_layers=3, num_attention_heads=3,
        num_key_value_heads=3, head_dim=32, max_position_embeddings=1024, tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0}, bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, **common,
    )  # fmt: skip
    config = t.LlavaConfig(
        vision_config=vision, text_config=text, image_token_id=tokenizer.convert_tokens_to_ids(IMAGE),
        vision_feature_layer=-1, vision_feature_select_strategy="full", image_seq_length=(task.CELL // PATCH) ** 2,
        tie_word_embeddings=True, dtype="float32",
    )  # fmt: skip
    model = t.LlavaForConditionalGeneration(config)
    model.generation_config = t.GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, do_sample=True, top_k=0
    )
    return model


# ------------------------------------------------------------------------------------------------ pictures


def seen(pixels: np.ndarray[Any, Any]) -> torch.Tensor:
    """Return pictures ``[n, side, side]`` as the processor gives them, ``[n, 3, 32, 32]``."""
    side = pixels.shape[1] // task.CELL
    small = pixels.reshape(len(pixels), task.CELL, side, task.CELL, side).astype(np.float32).mean((2, 4)).round()
    return torch.from_numpy(small / 127.5 - 1)[:, None].expand(-1, 3, -1, -1)


def draw(
    rng: np.random.Generator, pairs: np.ndarray[Any, Any]
) -> tuple[torch.Tensor, torch.Tensor, np.ndarray[Any, Any]]:
    """Draw pictures of pairs ``[n, 2]``: whole ``[n, 3, 32, 32]``, the two crops of each ``[2 n, …]``, the cells."""
    cells = np.sort(rng.random((len(pairs), 16)).argsort(1)[:, :2], 1)
    grid = np.full((len(pairs), 16), -1)
    np.put_along_axis(grid, cells, pairs, 1)
    pixels = task.pictures(rng, grid)
    crops = pixels.reshape(len(pairs), 4, task.CELL, 4, task.CELL).swapaxes(2, 3).reshape(len(pairs), 16, task.CELL, -1)
    chosen = np.take_along_axis(crops, cells[:, :, None, None], 1).reshape(-1, task.CELL, task.CELL)
    return seen(pixels), seen(chosen), cells


def features(model: Any, pixels: torch.Tensor) -> torch.Tensor:
    """Return pictures as the language model reads them, ``[n, 16, hidden]``."""
    return model.model.multi_modal_projector(model.model.vision_tower(pixels).last_hidden_state)


# ------------------------------------------------------------------------------------------------ training


def rate(step: int, steps: int, peak: float) -> float:
    """Return the learning rate of a step."""
    return peak * min(1.0, (step + 1) / 50, 0.02 + (1 - step / steps))


def stage(
    name: str, parts: Sequence[torch.nn.Module], steps: int, peak: float,
    losses: Iterator[tuple[torch.Tensor, dict[str, float]]],
) -> Iterator[int]:  # fmt: skip
    """Train modules on losses; yield after each step."""
    whole = torch.nn.ModuleList(parts)
    optimizer = torch.optim.AdamW(whole.parameters(), betas=(0.9, 0.98), weight_decay=0.01)
    started, figures = time.process_time(), list[dict[str, float]]()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = rate(step, steps, peak)
        loss, told = next(losses)
        figures.append(told)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(whole.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % 50 == 0:
            means = " ".join(f"{key} {np.mean([each[key] for each in figures[-50:]]):.4f}" for key in told)
            print(f"{name} {step + 1:5d}  {means}  {(time.process_time() - started) / 60:.1f} CPU min", flush=True)
        yield step + 1


def tower_losses(model: Any, reading: torch.nn.Module, size: int) -> Iterator[tuple[torch.Tensor, dict[str, float]]]:
    """Yield what a linear reading of pictures makes wrong: the cells of whole ones, the digits of crops."""
    rng = np.random.default_rng(0)
    while True:
        pairs = rng.integers(10, 100, (size // 2, 2))
        whole, crops, cells = draw(rng, pairs)
        read = reading(features(model, torch.cat([whole, crops])).mean(1)).split([16, 16, 10, 10], 1)
        digits = torch.from_numpy(np.stack(np.divmod(pairs.reshape(-1), 10)))
        truths = [*torch.from_numpy(cells).T, *digits]
        guesses = [part[: size // 2] if at < 2 else part[size // 2 :] for at, part in enumerate(read)]
        right = [guess.argmax(1) == truth for guess, truth in zip(guesses, truths, strict=True)]
        loss = torch.stack([cross_entropy(guess, truth) for guess, truth in zip(guesses, truths, strict=True)]).sum()
        yield (
            loss,
            {
                "loss": loss.item(),
                "cells": (right[0] & right[1]).float().mean().item(),
                "numbers": (right[2] & right[3]).float().mean().item(),
            },
        )


def tokens(eye: Any, messages: Sequence[Any]) -> list[int]:
    """Return a dialogue's ids, with a picture's placeholder as often as it has tokens."""
    text = eye.tokenizer.apply_chat_template(messages, tools=TOOLS, tokenize=False)
    return list(eye.tokenizer.encode(text.replace(IMAGE, IMAGE * 16), add_special_tokens=False))


def language_losses(model: Any, eye: Any, size: int) -> Iterator[tuple[torch.Tensor, dict[str, float]]]:
    """Yield the language model's loss on the assistant's tokens of dialogues and, beside them, of sums as text."""
    rng, drawing = random.Random(0), np.random.default_rng(0)
    pad, end, image = eye.tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_end|>", IMAGE])
    turn = eye.tokenizer.encode("<|im_start|>assistant\n", add_special_tokens=False)
    equals = eye.tokenizer.encode(" = ", add_special_tokens=False)
    language = model.model.language_model

    def predicted(rows: list[list[int]], start: list[int], pictures: torch.Tensor | None) -> Any:
        """Return the loss on what stands between ``start`` and a turn's end, and the share of rows all right."""
        ids = torch.full((len(rows), max(map(len, rows))), pad)
        trained = torch.zeros_like(ids, dtype=torch.bool)
        for at, row in enumerate(rows):
            ids[at, : len(row)] = torch.tensor(row)
            for first in range(len(start), len(row)):
                if row[first - len(start) : first] == start:
                    trained[at, first : row.index(end, first) + 1] = True
        embedded = language.embed_tokens(ids)
        if pictures is not None:
            embedded = embedded.masked_scatter((ids == image)[..., None], pictures)
        trained, truths = trained[:, 1:], ids[:, 1:]
        with torch.autocast("cpu", torch.bfloat16):
            hidden = language(inputs_embeds=embedded[:, :-1], use_cache=False).last_hidden_state
            logits = model.lm_head(hidden[trained]).float()
        wrong = torch.zeros(ids[:, 1:].shape)
        wrong[trained] = (logits.argmax(1) != truths[trained]).float()
        return cross_entropy(logits, truths[trained]), 1 - wrong.amax(1).mean().item()

    while True:
        # 1. Dialogues.
        pairs = draw_pairs(rng, size)
        whole, crops, cells = draw(drawing, np.array(pairs))
        with torch.no_grad():
            read = features(model, torch.cat([whole, crops]))
        shown = torch.cat([read[:size, None], read[size:].unflatten(0, (size, 2))], 1)
        rows = [tokens(eye, dialogue(cell, pair)) for cell, pair in zip(cells.tolist(), pairs, strict=True)]
        loss, right = predicted(rows, turn, shown)
        # 2. Sums.
        texts = [f"{answer(*pair)}<|im_end|>" for pair in draw_pairs(rng, 8 * size)]
        sums, right_sums = predicted(eye.tokenizer(texts, add_special_tokens=False)["input_ids"], equals, None)
        yield loss + sums, {"loss": loss.item(), "right": right, "sums": sums.item(), "right_sums": right_sums}


# ------------------------------------------------------------------------------------------------ the command


def save(folder: Path, model: Any, eye: Any) -> None:
    """Write a checkpoint as its makers' libraries do."""
    model.save_pretrained(folder)
    eye.save_pretrained(folder)
    for file in folder.iterdir():
        file.chmod(0o644)  # safetensors are written for their owner alone


def main() -> None:
    """Train, measure and write the checkpoints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("runs/vision"), help="folder of the checkpoints")
    parser.add_argument("--early", type=int, default=300, help="the step of the weaker checkpoint")
    parser.add_argument("--tower-steps", type=int, default=1500)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--tower-batch", type=int, default=384)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    eye = processor(640)
    model = new_model(eye.tokenizer)
    one = tokens(eye, dialogue([1, 6], (27, 45)))
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(one)} tokens a dialogue", flush=True)
    reading = torch.nn.Linear(model.config.text_config.hidden_size, 52)
    eyes = [model.model.vision_tower, model.model.multi_modal_projector]
    losses = tower_losses(model, reading, args.tower_batch)
    for _ in stage("tower", [*eyes, reading], args.tower_steps, 2e-3, losses):
        pass
    losses = language_losses(model, eye, args.batch)
    for step in stage("language", [model.model.language_model], args.steps, args.lr, losses):
        if step % 100 == 0 or step == args.steps:
            save(args.work / f"step_{step}", model, eye)
    card: dict[str, Any] = {"n": MEASURED, "vocabulary": len(eye.tokenizer)}
    for name, step in (("vision", args.steps), ("vision_early", args.early)):
        folder = args.work / f"step_{step}"
        card[name] = {"step": step, **scores(str(folder), MEASURED)}
        shutil.copytree(folder, ROOT / "fsm_rollout/model" / name, dirs_exist_ok=True)
    (ROOT / "fsm_rollout/model/vision.json").write_text(json.dumps(card, indent=2) + "\n", "utf-8")


if __name__ == "__main__":
    main()
