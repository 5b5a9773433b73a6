"""Make the embedded model: tokenizer, training, evaluation, and the files of both checkpoints, in one command.

    python benchmarks/train_model.py                # everything, about twenty minutes on two CPU cores
    python benchmarks/train_model.py --evaluate     # only measure the checkpoints that are there

Nothing is written before the last measurement is done; then the two checkpoint directories, `card.json` and the
held-back prompts are put in place together. The same seed, thread count, library versions and processor give the
same weights (torch promises no more than that).

What is measured is never scripted: the model samples every token, its calls are parsed and run by the real
calculator, and what it sampled stays in its context token by token.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers  # noqa: E402
from transformers import (  # noqa: E402
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from benchmarks import arithmetic  # noqa: E402
from fsm_rollout.tools.calculator import calculate  # noqa: E402

MODEL_DIR = ROOT / "fsm_rollout" / "model"
PROMPTS = ROOT / "configs" / "data" / "arithmetic.jsonl"

CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKERS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")

# Other system prompts under which the model still has its calculator; None is no system message at all.
OTHER_SYSTEMS = (
    None,
    None,
    None,
    "You are a helpful assistant.",
    "Use the calculator for every operation.",
    "Solve the task step by step with the tools.",
)
NO_TOOL_SYSTEMS = (None, None, "You are a helpful assistant.", "Answer briefly.", arithmetic.SYSTEM_PROMPT)

ERRORS = (
    "error: ConnectionError; try again",
    "error: TimeoutError: no result within 5 s; try again",
    "error: the call could not be read; try again",
    "error: calculate failed: ValueError; try again",
    "error: invalid arguments for calculate; try again",
    "Error: bad call: not a valid JSON object; try again",
)


# ------------------------------------------------------------------------------------------------ tokenizer


def build_tokenizer(vocabulary: int, template: str, texts: Sequence[str]) -> PreTrainedTokenizerFast:
    """Train a lossless byte-level BPE in which digits, brackets, operators and newlines stay single tokens.

    What lies between those is one piece for BPE, spaces included, so that constant text (the head of a call, the
    lines of the tools block) becomes few tokens.

    Args:
        vocabulary: Number of tokens, control tokens and markers included.
        template: The chat template to store with it.
        texts: Rendered dialogues.
    """
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"[0-9()+*\n-]"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    # Cut at the control tokens and markers: BPE must learn the pieces as the tokenizer will meet them.
    cut = re.compile("|".join(re.escape(token) for token in (*CONTROL, *MARKERS)))
    pieces = [piece for text in texts for piece in cut.split(text) if piece]
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary - len(CONTROL) - len(MARKERS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    core.train_from_iterator(pieces, trainer)
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in CONTROL])
    core.add_tokens([AddedToken(token, special=False, normalized=False) for token in MARKERS])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
        model_max_length=2048,
        padding_side="left",
    )
    tokenizer.chat_template = template
    return tokenizer


# ------------------------------------------------------------------------------------------------ training text


@dataclass
class Sample:
    """A dialogue to train on: chat messages, whether the tools block is shown, which turns carry no loss."""

    messages: list[arithmetic.Message]
    tools: bool = True
    untrained: set[int] = field(default_factory=set)


def draw_sample(rng: random.Random, operations: int | None, follow_ups: int | None) -> Sample:
    """Draw one training dialogue; 85 % are the plain task under its own system prompt."""
    kind = rng.random()
    if kind < 0.06:
        question, answer = arithmetic.small_sum(rng)
        messages = [
            {"role": "user", "content": question},
            {"role": "assistant", "content": arithmetic.answer_text(answer)},
        ]
        return Sample(with_system(messages, rng.choice(NO_TOOL_SYSTEMS)), tools=False)
    messages = arithmetic.dialogue(rng, False, operations, follow_ups).messages()
    system = rng.choice(OTHER_SYSTEMS) if kind < 0.15 else arithmetic.SYSTEM_PROMPT
    sample = Sample(with_system(messages, system))
    if rng.random() < 0.04:
        break_one_call(rng, sample)
    return sample


def with_system(messages: list[arithmetic.Message], system: str | None) -> list[arithmetic.Message]:
    return messages if system is None else [{"role": "system", "content": system}, *messages]


def break_one_call(rng: random.Random, sample: Sample) -> None:
    """Let one call fail and be made again: the tool's fault, or a malformed call, which carries no loss."""
    at = rng.choice([i for i, message in enumerate(sample.messages) if message.get("tool_calls")])
    good = sample.messages[at]
    arguments = dict(good["tool_calls"][0]["function"]["arguments"])
    fault = rng.randrange(4)
    if fault == 0:
        arguments.pop(rng.choice(list(arguments)))
        broken = arithmetic.call_message(arguments)
    elif fault == 1:
        arguments["operator"] = rng.choice("/%^")
        broken = arithmetic.call_message(arguments)
    elif fault == 2:
        text = json.dumps({"name": "calculate", "arguments": arguments})
        broken = {"role": "assistant", "content": f"<tool_call>\n{text[: -rng.randrange(1, 12)]}\n</tool_call>"}
    else:
        broken = good
    if broken is not good:
        sample.untrained.add(at)
    sample.messages[at:at] = [broken, {"role": "tool", "content": rng.choice(ERRORS)}]


def render(tokenizer: PreTrainedTokenizerFast, sample: Sample) -> str:
    tools = [arithmetic.TOOL_SCHEMA] if sample.tools else None
    return str(tokenizer.apply_chat_template(sample.messages, tools=tools, tokenize=False))


def encode(tokenizer: PreTrainedTokenizerFast, samples: Sequence[Sample]) -> list[tuple[list[int], list[int]]]:
    """Tokenize dialogues; give ids and labels, -100 where there is no loss: all but the assistant's own tokens."""
    start, end = tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
    header = [start, *tokenizer.encode("assistant\n", add_special_tokens=False)]
    rows = tokenizer([render(tokenizer, sample) for sample in samples], add_special_tokens=False)["input_ids"]
    encoded = []
    for ids, sample in zip(rows, samples, strict=True):
        labels = [-100] * len(ids)
        turns = (i for i, message in enumerate(sample.messages) if message["role"] == "assistant")
        for at in range(len(ids)):
            if ids[at] == start and ids[at : at + len(header)] == header:
                first = at + len(header)
                after = ids.index(end, first) + 1
                if next(turns) not in sample.untrained:
                    labels[first:after] = ids[first:after]
        encoded.append((ids, labels))
    return encoded


def batches(
    tokenizer: PreTrainedTokenizerFast, rng: random.Random, size: int, warm_up: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield ids and labels `[size, T]`, right-padded, dialogues of similar length together, for ever.

    The first `warm_up` batches are single operations without follow-ups.
    """
    pool = 20
    made = 0
    pad = tokenizer.pad_token_id
    while True:
        easy = made < warm_up
        drawn = [draw_sample(rng, 1 if easy else None, 0 if easy else None) for _ in range(size * pool)]
        rows = sorted(encode(tokenizer, drawn), key=lambda row: len(row[0]))
        order = list(range(pool))
        rng.shuffle(order)
        for at in order:
            chosen = rows[at * size : (at + 1) * size]
            width = max(len(ids) for ids, _ in chosen)
            ids = torch.tensor([ids + [pad] * (width - len(ids)) for ids, _ in chosen])
            labels = torch.tensor([labels + [-100] * (width - len(labels)) for _, labels in chosen])
            yield ids, labels
        made += pool


# ------------------------------------------------------------------------------------------------ training


def new_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=2048,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=True,
        initializer_range=0.05,  # the default of 0.02 is too small for a model this narrow
        use_cache=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        do_sample=True,
        temperature=1.0,
        top_k=0,  # transformers' default of 50 would change the distribution
        top_p=1.0,
    )
    return model


def learning_rate(step: int, steps: int, peak: float) -> float:
    return peak * min(1.0, (step + 1) / 100) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * step / steps)))


def train(
    args: argparse.Namespace, tokenizer: PreTrainedTokenizerFast
) -> tuple[Qwen3ForCausalLM, dict[str, torch.Tensor], int]:
    """Train; give the final model, the weights of the early checkpoint and the step they are from."""
    model = new_model(tokenizer)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, vocabulary {len(tokenizer)}", flush=True)
    decayed = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.01}, {"params": rest, "weight_decay": 0.0}], betas=(0.9, 0.98)
    )
    validation = [arithmetic.dialogue(random.Random(f"early {i}"), True, None, 1) for i in range(args.early_n)]
    early: dict[str, torch.Tensor] = {}
    early_step, early_miss, searching = 0, 1.0, True
    started, losses, seen = time.monotonic(), [], 0
    stream = batches(tokenizer, random.Random(args.seed), args.batch, args.warm_up)
    for step in range(args.steps):
        model.train()
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, args.steps, args.lr)
        ids, labels = next(stream)
        targets = labels[:, 1:]
        trained = targets != -100
        with torch.autocast("cpu", torch.bfloat16):
            hidden = model.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
            logits = model.lm_head(hidden[trained])
        loss = torch.nn.functional.cross_entropy(logits.float(), targets[trained])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        seen += ids.numel()
        done = step + 1
        if done % 50 == 0:
            pace = seen / (time.monotonic() - started)
            minutes = (time.monotonic() - started) / 60
            mean = sum(losses[-50:]) / 50
            print(f"step {done:5d}  loss {mean:.4f}  {minutes:5.1f} min  {pace:,.0f} tokens/s", flush=True)
        if searching and done >= args.early_from and done % args.early_every == 0:
            # The search draws from torch's generator; training draws nothing from it after the initialisation.
            success = evaluate(model, tokenizer, validation, greedy=False, seed=args.seed)
            print(f"step {done:5d}  success {success:.3f} of {len(validation)} at T=1", flush=True)
            if abs(success - args.early_target) < early_miss:
                early_miss, early_step = abs(success - args.early_target), done
                early = {name: value.detach().clone() for name, value in model.state_dict().items()}
            searching = success < 0.75
    return model, early, early_step


# ------------------------------------------------------------------------------------------------ evaluation

_CALL = re.compile(r"<tool_call>\n(.*?)\n</tool_call>", re.DOTALL)


def run_call(text: str) -> int | None:
    """Parse one assistant turn as one calculator call and run it; None if it is malformed."""
    found = _CALL.fullmatch(text)
    if found is None:
        return None
    try:
        call = json.loads(found[1])
        arguments = call["arguments"]
        whole = all(type(arguments[key]) is int for key in ("left", "right"))
        fits = call["name"] == "calculate" and whole and arguments["operator"] in ("+", "-", "*")
        return calculate(**arguments) if fits else None
    except (ValueError, TypeError, KeyError):
        return None


@dataclass
class Attempt:
    """One dialogue while it is played: the model's context as ids, and how far it has come."""

    dialogue: arithmetic.Dialogue
    ids: list[int]
    turn: int = 0
    result: int | None = None
    assistant_turns: int = 0
    solved: bool = False
    over: bool = False
    text: str = ""


def advance(attempt: Attempt, text: str) -> str | None:
    """Take one assistant turn; give what the environment writes next (role and text), None when it is over."""
    attempt.assistant_turns += 1
    turn = attempt.dialogue.turns[attempt.turn]
    if "<tool_call>" in text:
        attempt.result = run_call(text)
        said = ERRORS[2] if attempt.result is None else str(attempt.result)
        reply = f"<tool_response>\n{said}\n</tool_response>"
    elif text != arithmetic.answer_text(turn.answer) or attempt.result != turn.answer:
        attempt.over = True  # a wrong answer, or one that no call gave
        return None
    else:
        attempt.turn += 1
        attempt.result = None
        if attempt.turn == len(attempt.dialogue.turns):
            attempt.solved = attempt.over = True
            return None
        reply = attempt.dialogue.turns[attempt.turn].text
    if attempt.assistant_turns >= 20:
        attempt.over = True
        return None
    return f"\n<|im_start|>user\n{reply}<|im_end|>\n<|im_start|>assistant\n"


@torch.no_grad()
def evaluate(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    dialogues: Sequence[arithmetic.Dialogue],
    *,
    greedy: bool,
    seed: int,
    batch: int = 256,
    show: int = 0,
) -> float:
    """Play dialogues with the model; give the share in which every answer is right and came from real calls.

    A turn that is neither a well-formed call nor the right answer ends a dialogue unsolved; a malformed call is
    answered with an error, from which the model may recover.
    """
    model.eval()
    torch.manual_seed(seed)
    attempts = []
    for dialogue in dialogues:
        messages = with_system([{"role": "user", "content": dialogue.turns[0].text}], arithmetic.SYSTEM_PROMPT)
        text = tokenizer.apply_chat_template(
            messages, tools=[arithmetic.TOOL_SCHEMA], tokenize=False, add_generation_prompt=True
        )
        attempts.append(Attempt(dialogue, tokenizer.encode(text, add_special_tokens=False)))
    end = tokenizer.eos_token_id
    while open_now := sorted((a for a in attempts if not a.over), key=lambda a: len(a.ids)):
        for at in range(0, len(open_now), batch):
            chosen = open_now[at : at + batch]
            padded = tokenizer.pad({"input_ids": [a.ids for a in chosen]}, return_tensors="pt")
            sampling = {"do_sample": False} if greedy else {"temperature": 1.0, "top_p": 1.0, "top_k": 0}
            grown = model.generate(**padded, max_new_tokens=64, **sampling)
            width = padded["input_ids"].shape[1]
            for attempt, row in zip(chosen, grown[:, width:].tolist(), strict=True):
                if end not in row:
                    attempt.over = True
                    continue
                sampled = row[: row.index(end) + 1]
                glue = advance(attempt, tokenizer.decode(sampled[:-1], skip_special_tokens=False))
                attempt.ids += sampled
                if glue is not None:
                    attempt.ids += tokenizer.encode(glue, add_special_tokens=False)
    for attempt in attempts[:show]:
        print(f"--- solved: {attempt.solved}\n{tokenizer.decode(attempt.ids)}")
    return sum(attempt.solved for attempt in attempts) / len(attempts)


def shipped_dialogues() -> list[arithmetic.Dialogue]:
    return arithmetic.held_back_dialogues(512)


def measure(
    directory: Path, tokenizer: PreTrainedTokenizerFast, dialogues: Sequence[arithmetic.Dialogue], seed: int
) -> dict[str, float]:
    """Load a checkpoint from its files and measure it."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    figures = {}
    for name, greedy in (("success_t1", False), ("success_greedy", True)):
        figures[name] = round(evaluate(model, tokenizer, dialogues, greedy=greedy, seed=seed), 4)
        print(f"{directory.name}: {name} {figures[name]:.4f} of {len(dialogues)}", flush=True)
    return figures


# ------------------------------------------------------------------------------------------------ the command


def save(directory: Path, model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    for file in directory.iterdir():
        file.chmod(0o644)  # safetensors are written for their owner alone


def put_in_place(source: Path, target: Path) -> None:
    """Replace a directory or a file by a rename, so that nobody sees half of it."""
    if target.is_dir():
        shutil.rmtree(target)
    os.replace(source, target)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train, measure and write the embedded model.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--out", type=Path, default=MODEL_DIR, help="directory that gets final/, early/, card.json")
    parser.add_argument("--prompts", type=Path, default=PROMPTS, help="file that gets the held-back prompts")
    parser.add_argument("--evaluate", action="store_true", help="train nothing: measure what is in --out")
    parser.add_argument("--show", type=int, default=0, help="dialogues to print after the evaluation")
    parser.add_argument("--seed", type=int, default=0, help="of weights, training dialogues and sampling")
    parser.add_argument("--steps", type=int, default=2900, help="optimizer steps")
    parser.add_argument("--batch", type=int, default=32, help="dialogues a step")
    parser.add_argument("--warm-up", type=int, default=300, help="steps with single operations only")
    parser.add_argument("--lr", type=float, default=2e-3, help="peak learning rate")
    parser.add_argument("--vocabulary", type=int, default=704, help="tokens, markers included")
    parser.add_argument("--threads", type=int, default=2, help="torch threads")
    parser.add_argument("--early-from", type=int, default=500, help="step of the first look for the early checkpoint")
    parser.add_argument("--early-every", type=int, default=50, help="steps between looks")
    parser.add_argument("--early-n", type=int, default=128, help="dialogues a look")
    parser.add_argument("--early-target", type=float, default=0.5, help="success at T=1 the early checkpoint aims at")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    torch.set_num_threads(args.threads)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # a debugging aid that costs time
    torch.manual_seed(args.seed)
    dialogues = shipped_dialogues()
    if args.evaluate:
        for name in ("final", "early"):
            tokenizer = AutoTokenizer.from_pretrained(args.out / name)
            measure(args.out / name, tokenizer, dialogues, args.seed)
        if args.show:
            model = AutoModelForCausalLM.from_pretrained(args.out / "final")
            evaluate(model, tokenizer, dialogues[: args.show], greedy=False, seed=args.seed, show=args.show)
        return

    started = time.monotonic()
    template = (MODEL_DIR / "chat_template.jinja").read_text(encoding="utf-8")
    bare = build_tokenizer(300, template, [""])  # only to render with
    corpus = random.Random(f"corpus {args.seed}")
    samples = [draw_sample(corpus, None, None) for _ in range(2000)]
    for sample in samples[400:]:
        # In every text the constant tools block would outweigh all else and take nearly all merges.
        sample.tools = False
    texts = [render(bare, sample) for sample in samples]
    tokenizer = build_tokenizer(args.vocabulary, template, texts)
    lengths = [len(ids) for ids, _ in encode(tokenizer, [draw_sample(corpus, None, None) for _ in range(1000)])]
    system = tokenizer.apply_chat_template(
        [{"role": "system", "content": arithmetic.SYSTEM_PROMPT}], tools=[arithmetic.TOOL_SCHEMA], tokenize=False
    )
    print(
        f"{sum(lengths) / len(lengths):.0f} tokens a dialogue, at most {max(lengths)}; "
        f"the system turn takes {len(tokenizer.encode(system, add_special_tokens=False))}",
        flush=True,
    )
    model, early, early_step = train(args, tokenizer)
    minutes = (time.monotonic() - started) / 60

    with tempfile.TemporaryDirectory(dir=args.out, prefix=".new-") as name:
        new = Path(name)
        save(new / "final", model, tokenizer)
        card: dict[str, Any] = {
            "task": "512 held-back dialogues, one follow-up each; both answers right by real calculator calls",
            "n": len(dialogues),
            "seed": args.seed,
            "steps": args.steps,
            "minutes": round(minutes, 1),
            "threads": args.threads,
            "parameters": sum(p.numel() for p in model.parameters()),
            "bytes": (new / "final" / "model.safetensors").stat().st_size,
            "vocabulary": len(tokenizer),
            "torch": str(torch.__version__),
            "final": {"step": args.steps},
            "early": {"step": early_step},
        }
        card["final"] |= measure(new / "final", tokenizer, dialogues, args.seed)
        if early:
            model.load_state_dict(early)
            save(new / "early", model, tokenizer)
            card["early"] |= measure(new / "early", tokenizer, dialogues, args.seed)
        (new / "card.json").write_text(json.dumps(card, indent=2) + "\n", encoding="utf-8")
        lines = [json.dumps(dialogue.prompt()) + "\n" for dialogue in dialogues]
        (new / "prompts.jsonl").write_text("".join(lines), encoding="utf-8")
        for part in ("final", "early", "card.json"):
            if (new / part).exists():
                put_in_place(new / part, args.out / part)
        args.prompts.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(new / "prompts.jsonl", args.prompts)
    print(json.dumps(card, indent=2))


if __name__ == "__main__":
    main()
