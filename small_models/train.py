"""``python -m small_models.train gdn kda``: train the small models within a given time and write their checkpoints."""

from __future__ import annotations

import argparse
import math
import os
import platform
import random
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench_rag.accuracy import recall, text
from bench_rag.accuracy.recall import RecallFormat
from bench_rag.errors import BenchError

from . import checkpoint, data, gdn, kda

os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")  # said aloud, its threads and our processes go together
MODELS: dict[str, ModuleType] = {"gdn": gdn, "kda": kda}
# Share of the time, and tokens per sequence: most of it on short sequences, the end on what the models are for.
LESSONS = ((0.15, 256), (0.45, 1024), (0.2, 4096), (0.2, 16384))
_WARM_UP, _LAST = 0.04, 0.03  # share of the time until the full learning rate; what is left of it at the end


def main(argv: list[str] | None = None) -> int:
    """Train each named model; exit status 2 for options that do not fit."""
    options = _parser().parse_args(argv)
    if options.seconds <= 0 or options.tokens < 64 or options.longest < 64:
        print("train: --seconds is above 0, --tokens and --longest are at least 64", file=sys.stderr)
        return 2
    device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        seen, unseen = text.sources(held_out=False), text.sources(held_out=True)
    except BenchError as e:
        print(f"train: {e}", file=sys.stderr)
        return 2
    if options.modules:
        seen, unseen = seen[: options.modules], unseen[: options.modules]
    tokenizer = data.train_tokenizer(seen)
    corpus, held_out = data.encode(tokenizer, seen), data.encode(tokenizer, unseen)
    print(f"{len(seen)} modules, {len(corpus)} tokens; held out: {len(unseen)}, {len(held_out)}", flush=True)
    for name in dict.fromkeys(options.models):
        torch.manual_seed(options.seed)
        config = MODELS[name].config(data.VOCABULARY)
        model = MODELS[name].build(config).to(device)
        form = RecallFormat.of(tokenizer.token_to_id)
        facts: dict[str, Any] = dict(
            parameters=sum(p.numel() for p in model.parameters()),
            python=platform.python_version(),
            torch=torch.__version__,
            device=torch.cuda.get_device_name() if device == "cuda" else "CPU",
            seed=options.seed,
            seconds=options.seconds,
        )
        facts |= fit(model, corpus, form, options, device)
        folder = options.out / name
        checkpoint.save(folder, config, model, tokenizer, facts)
        # What the checkpoint holds is judged, not what was trained: its weights are rounded.
        checkpoint.load(folder, model, device)
        facts |= judge(model, held_out, form, options.longest, device)
        checkpoint.save(folder, config, model, tokenizer, facts)
        print(f"{name}: {folder}, {(folder / 'model.safetensors').stat().st_size} bytes: {facts}", flush=True)
    return 0


def _parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="python -m small_models.train", description=__doc__)
    p.add_argument("models", nargs="+", choices=tuple(MODELS))
    p.add_argument("--out", type=Path, default=Path(__file__).parent, help="folder for the checkpoint folders")
    p.add_argument("--seconds", type=float, default=75.0, help="training time per model (default 75)")
    p.add_argument("--tokens", type=int, default=16384, help="tokens per step (default 16384)")
    p.add_argument("--longest", type=int, default=16384, help="most tokens per sequence (default 16384)")
    p.add_argument("--rate", type=float, default=3e-3, help="largest learning rate (default 0.003)")
    p.add_argument(
        "--modules", type=int, default=0, help="learn from so many modules of the library only (default all)"
    )
    p.add_argument("--workers", type=int, default=min(8, (os.cpu_count() or 2) // 2), help="processes that make data")
    p.add_argument("--seed", type=int, default=1)
    return p


def fit(
    model: nn.Module, corpus: np.ndarray, form: RecallFormat, options: argparse.Namespace, device: str
) -> dict[str, Any]:
    """Train for ``options.seconds``: lessons and learning rate follow the clock, so that it ends in time everywhere."""
    matrices = [p for p in model.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if p.dim() != 2]
    groups = [{"params": matrices, "weight_decay": 0.05}, {"params": others, "weight_decay": 0.0}]
    optimiser = torch.optim.AdamW(groups, lr=options.rate, betas=(0.9, 0.98), fused=device == "cuda")
    began, steps, tokens, shown = time.monotonic(), 0, 0, 0.0
    finished, skipped = 0.0, 0
    for number, (share, length) in enumerate(LESSONS):
        length = min(length, options.longest, options.tokens)
        size = max(1, options.tokens // length)
        lessons = data.Lessons(corpus, form, length, 1000 * options.seed + number)
        stream = data.batches(lessons, size, options.workers)
        finished += share
        if steps == 0:
            began = time.monotonic()  # making data has started
        while (progress := (time.monotonic() - began) / options.seconds) < finished or steps == 0:
            ids, weights = (x.to(device, non_blocking=True) for x in next(stream))
            for group in optimiser.param_groups:
                group["lr"] = options.rate * _schedule(progress)
            loss = _loss(model, ids, weights, device)
            optimiser.zero_grad(set_to_none=True)
            loss.backward()
            # Reading the norm also waits for the device: the clock decides, and the queue must not run away from it.
            if nn.utils.clip_grad_norm_(model.parameters(), 1.0).isfinite():
                optimiser.step()
            else:
                skipped += 1
            steps, tokens = steps + 1, tokens + size * length
            if time.monotonic() - shown > 5:
                shown = time.monotonic()
                print(f"{100 * progress:3.0f}% step {steps}, length {length}: loss {loss.item():.3f}", flush=True)
        del stream
    return dict(steps=steps, skipped_steps=skipped, tokens=tokens)


def _schedule(progress: float) -> float:
    """Learning rate as a share of the largest: up in a line, down in half a cosine."""
    if progress < _WARM_UP:
        return (progress + 1e-3) / (_WARM_UP + 1e-3)
    down = min(1.0, (progress - _WARM_UP) / (1 - _WARM_UP))
    return _LAST + (1 - _LAST) * 0.5 * (1 + math.cos(math.pi * down))


def _loss(model: nn.Module, ids: Tensor, weights: Tensor, device: str) -> Tensor:
    """Mean cross-entropy over the tokens that can be learnt, nats."""
    with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
        logits = model(ids[:, :-1])
    losses = F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    return (losses * weights[:, 1:].flatten()).sum() / weights[:, 1:].sum().clamp(min=1.0)


@torch.inference_mode()
def judge(model: nn.Module, held_out: np.ndarray, form: RecallFormat, length: int, device: str) -> dict[str, Any]:
    """Perplexity of held-out text and recall by quartile of position, both teacher-forced over ``length`` tokens.

    Recall is the share of answers whose tokens are all the model's first choice; facts are stated in the first eighth
    of the text, questions stand anywhere behind it.
    """
    rng = random.Random(7)
    nats, right, asked = np.zeros(4), np.zeros(4), np.zeros(4)
    rows = 4
    for _ in range(rows):
        ids = _window(held_out, rng, length + 1)
        logits = model(torch.tensor(ids[None, :-1], device=device)).float()
        losses = F.cross_entropy(logits[0], torch.tensor(ids[1:], device=device), reduction="none")
        nats += np.array([part.mean().item() for part in losses.tensor_split(4)]) / rows
        ids, spans = _exam(held_out, form, length, rng)
        choice = model(torch.tensor(ids[None, :-1], device=device)).argmax(-1)[0].cpu().numpy()
        for at in spans:
            quartile = min(3, 4 * at // length)
            asked[quartile] += 1
            right[quartile] += bool(
                (choice[at - 1 : at - 1 + recall.VALUE_LEN] == ids[at : at + recall.VALUE_LEN]).all()
            )
    return dict(
        perplexity_by_quartile=[round(float(np.exp(n)), 3) for n in nats],
        recall_by_quartile=[round(float(r / n), 3) if n else None for r, n in zip(right, asked, strict=True)],
        judged_tokens=length,
    )


def _exam(held_out: np.ndarray, form: RecallFormat, length: int, rng: random.Random) -> tuple[np.ndarray, list[int]]:
    """A text with facts and questions, ``length`` tokens and one more, and where its answers start."""
    facts = form.draw(rng, max(2, min(32, length // 256)))
    gap = length // 8 // len(facts)
    ids: list[int] = []
    for fact in facts:
        filler = max(1, gap - len(form.stated(fact)))
        ids += [*_window(held_out, rng, filler), *form.stated(fact)]
    spans = []
    step = max(40, length // 80)
    while len(ids) + step + 2 * recall.VALUE_LEN < length:
        fact = rng.choice(facts)
        ids += [*_window(held_out, rng, step), *form.question(fact)]
        spans.append(len(ids))
        ids += fact.value
    ids += [int(t) for t in _window(held_out, rng, length + 1 - len(ids))]
    return np.array(ids, np.int64), spans


def _window(tokens: np.ndarray, rng: random.Random, size: int) -> np.ndarray:
    at = rng.randrange(max(1, len(tokens) - size))
    return tokens[at : at + size].astype(np.int64)


if __name__ == "__main__":
    sys.exit(main())
