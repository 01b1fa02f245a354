"""Train a hybrid target from nothing on a corpus in its own ids.

    python train_target.py --data FOLDER --out FOLDER --seconds 540

FOLDER after --data is what train_tokenizer.py wrote. Every step draws its batch from (seed, step), so a run that was
stopped (--seconds) goes on with the same command as if nothing had happened. Without --steps the run takes as many as
will fit into --seconds, which is decided after step 200 and kept in curve.json.

In the folder that is written: a target that `ddlab.load_pair` loads (bfloat16), curve.json, and state.pt to go on from.
Where state.pt is gone, the run goes on from the bfloat16 weights with fresh optimizer states.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import torch
from corpus import Corpus
from fast_hybrid import fast_forms
from graphed import LossAndGradients
from norms import fuse_norms
from target_training import Trainer, fresh_target, optimizers, rates_of, save_target, schedule, step
from text_batches import HeldOut, TextBatches
from torch.nn import functional as F

CONFIG = Path(__file__).resolve().parent.parent / "tiny-hybrid" / "target" / "config.json"
WARM_UP = 200  # steps
MEASURED = (100, 200)  # steps between which the time of a step is taken: by then every width has been captured


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--config", type=Path, default=CONFIG, help="config.json of the target")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--seconds", type=float, default=math.inf, help="stop then, with a checkpoint")
    parser.add_argument("--tokens", type=int, default=32768, help="ids of a batch, padding included")
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--compile", action="store_true", help="torch.compile for parts of the linear layers")
    parser.add_argument("--every", type=int, default=100, help="steps between two points of the curve")
    parser.add_argument("--validate", type=int, default=1000, help="steps between two validations")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    if args.steps is None and args.seconds == math.inf:
        parser.error("give --steps or --seconds")
    return args


def main(argv: list[str] | None = None) -> None:
    args, started = parse(argv), time.time()
    from safetensors.torch import load_file
    from transformers import AutoTokenizer

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.backends.cuda.matmul.allow_tf32 = True
    model = fresh_target(args.config, args.seed).to(device)
    if device.type == "cuda":
        fuse_norms(model)
    tokenizer = AutoTokenizer.from_pretrained(args.data)
    batches = TextBatches(Corpus.load(args.data / "train.npz"), device, args.seed, args.tokens)
    held_out = HeldOut.read(args.data / "held_out.npz", tokenizer)
    trainer, optimizer = Trainer(model), optimizers(model, args.rate)
    rates = rates_of(optimizer)
    args.out.mkdir(parents=True, exist_ok=True)
    curve: dict[str, Any] = {
        "arguments": {k: str(v) for k, v in vars(args).items() if k not in ("seconds", "out")},
        "parameters": sum(p.numel() for p in model.parameters()),
        "texts": len(batches.corpus),
        "tokens_of_an_epoch": len(batches.corpus.tokens),
        "step": 0,
        "steps": args.steps,
        "tokens": 0,
        "seconds": 0.0,
        "points": [],  # [step, seconds, mean loss of a token, norm of the gradient]
        "validation": [],
    }
    state_file, weights = args.out / "state.pt", args.out / "model.safetensors"
    if state_file.is_file():
        state = torch.load(state_file, map_location=device, weights_only=True)
        model.load_state_dict(state["model"])
        for o, saved in zip(optimizer, state["optimizer"], strict=True):
            o.load_state_dict(saved)
        curve = json.loads(state["curve"])
    elif weights.is_file():  # they came back without state.pt
        model.load_state_dict(load_file(weights), strict=False)
        model.tie_weights()
        curve = json.loads((args.out / "curve.json").read_text())
    start, before = curve["step"], curve["seconds"]
    said = f"{curve['parameters']} parameters, {curve['texts']} texts of {curve['tokens_of_an_epoch']} tokens"
    print(f"{said}, from step {start}, ready after {time.time() - started:.0f} s", flush=True)

    began, at, measured = time.time(), start, 0.0
    compute = LossAndGradients(model, lambda ids, length: (trainer.likelihood(ids, length),))
    with fast_forms(model, args.compile):
        while time.time() - began < args.seconds and (curve["steps"] is None or at < curve["steps"]):
            ids, length = batches.draw(at)
            if device.type == "cuda":  # one shape for each width: empty rows fill a batch up
                empty = args.tokens // ids.shape[1] - len(ids)
                ids, length = F.pad(ids, (0, 0, 0, empty)), F.pad(length, (0, empty))
            (loss,) = compute(ids, length)
            norm = step(model, optimizer, rates, schedule(at, curve["steps"], WARM_UP))
            at += 1
            curve["step"] = at
            curve["tokens"] += int(batches.corpus.lengths[batches.rows].sum())
            curve["seconds"] = round(before + time.time() - began, 1)
            if curve["steps"] is None and at - start in MEASURED:
                loss.item()  # wait for the device
                if at - start == MEASURED[0]:
                    measured = time.time()
                else:
                    each = (time.time() - measured) / (MEASURED[1] - MEASURED[0])
                    left = args.seconds - (time.time() - began)
                    curve["steps"] = at + int(0.97 * left / each)  # the rest is validation
                    print(f"{1e3 * each:.1f} ms a step: {curve['steps']} steps", flush=True)
            if at % args.every == 0 or at == start + MEASURED[0]:
                point = [at, curve["seconds"], round(loss.item(), 4), round(norm.item(), 3)]
                curve["points"].append(point)
                speed = 1e3 * (time.time() - began) / (at - start)
                epochs = curve["tokens"] / curve["tokens_of_an_epoch"]
                said = f"step {at} {point[1]} s loss {point[2]} gradient {point[3]} {speed:.1f} ms, epoch {epochs:.2f}"
                print(said, flush=True)
                if not math.isfinite(point[2]):
                    raise SystemExit("the loss is not finite: lower --rate")
            if at % args.validate == 0:
                curve["validation"].append([at, held_out.bits_per_byte(trainer.losses, device)])
                print("validation", at, json.dumps(curve["validation"][-1][1]), flush=True)
        saved = save_target(model, tokenizer, args.out)
        curve["held_out"] = held_out.bits_per_byte(Trainer(saved).losses, device)  # of what was saved
    (args.out / "curve.json").write_text(json.dumps(curve) + "\n", encoding="utf-8")
    states = [o.state_dict() for o in optimizer]
    torch.save({"model": model.state_dict(), "optimizer": states, "curve": json.dumps(curve)}, state_file)
    print("held out, bfloat16 weights:", json.dumps(curve["held_out"]))
    print(f"{at} of {curve['steps']} steps, {curve['tokens']} tokens, {time.time() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main()
