"""Train a DFlash drafter on a corpus of the target's own answers, the target frozen.

    python train_drafter.py --pair smollm2 --target FOLDER --corpus corpus.npz --out FOLDER --steps 12600

A step is one batch of answers: one forward of the target gives features and teacher, one forward of the drafter
drafts `--anchors` blocks an answer. Two steps in three take answers cut early and anchors within their first 128
tokens, where drafting is hardest; the others take whole answers. Every step draws its batch from (seed, step), so a
run that was stopped (`--seconds`) goes on with the same command as if nothing had happened.

In FOLDER: model.safetensors and config.json (z-lab's format), curve.json, and state.pt to go on from. Where state.pt is
gone, the run goes on from the bfloat16 weights with fresh optimizer states.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from batches import Batches, system_turn
from blocks import KeptPasses, block_hidden, target_pass
from configs import fresh_state, pair_config, zlab_state
from corpus import Corpus
from fast_hybrid import fast_forms
from graphed import LossAndGradients
from losses import Distill, check_fused
from norms import fuse_norms
from safetensors.torch import load_file, save_file
from target_training import rates_of, schedule, step

from ddlab.checkpoint import rename
from ddlab.drafter import Drafter
from ddlab.pair import Pair, load_pair

WARM_UP = 100  # steps
KEPT_SHARE = 0.8  # of the free memory that the target's passes over the corpus may take


@dataclass
class Trainer:
    pair: Pair
    drafter: Drafter
    fused: bool
    kept: KeptPasses | None = None
    soft: float = 0.5
    chunk: int = 12288  # slots whose logits are in memory at a time

    @property
    def amp(self) -> torch.dtype:
        return torch.bfloat16 if self.pair.device.type == "cuda" else torch.float32

    def loss(
        self, ids: torch.Tensor, length: torch.Tensor, anchors: torch.Tensor, rows: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """A `Batch` -> mean loss of a block; cross entropy, hit and validity [b * a, depth]."""
        s, embed = self.drafter.settings, self.pair.embed
        if self.kept is not None:
            features, last = self.kept(rows, ids.shape[1])
        else:
            with torch.no_grad():
                features, last = target_pass(self.pair, ids, s.target_layer_ids)
        with torch.autocast(self.pair.device.type, self.amp, enabled=self.amp != torch.float32):
            hidden = block_hidden(self.drafter, features, ids, anchors, embed, self.amp)
        offsets = torch.arange(s.block_size - s.depth, s.block_size, device=ids.device)
        position = anchors[:, :, None] + offsets + (s.drafts_from == "anchor")  # [b, a, depth]
        valid = position < length[:, None, None]
        position = position.clamp(max=ids.shape[1] - 1).flatten(1)
        labels = ids.gather(1, position).view(-1, s.depth)
        teacher = last.gather(1, (position - 1)[:, :, None].expand(-1, -1, last.shape[-1]))
        teacher = teacher.view(-1, s.depth, last.shape[-1])
        valid = valid.view(-1, s.depth)
        head = self.pair.target.get_output_embeddings().weight  # type: ignore[union-attr]
        loss, entropy, hit = Distill.apply(
            hidden.flatten(0, 1), teacher, head, labels, valid, self.soft, self.chunk, self.fused
        )
        return loss, entropy, hit, valid


def validate(compute: LossAndGradients, batches: Batches) -> dict[str, Any]:
    """On held-out answers: accepted drafts + 1 of a chain, at anchors in the first EARLY tokens and anywhere."""
    result: dict[str, Any] = {}
    for name, width in (("early", batches.early), ("anywhere", batches.longest)):
        rng, hits, valids, losses = np.random.default_rng(5), [], [], []
        size = min(batches.tokens // width, len(batches.held_out))  # as in training, where shapes are compiled
        for i in range(0, len(batches.held_out) - size + 1, size):
            loss, _, hit, valid = compute(*batches.make(batches.held_out[i : i + size], width, rng))
            hits.append(hit * valid)
            valids.append(valid.clone())
            losses.append(loss.item())
        hit, valid = torch.cat(hits), torch.cat(valids)
        slots = (hit.sum(0) / valid.sum(0).clamp(min=1)).tolist()
        result[name] = {
            "loss": round(float(np.mean(losses)), 4),
            "accepted_plus_1": round(1 + hit.cumprod(1).sum(1).mean().item(), 3),
            "slot_accuracy": [round(a, 3) for a in slots],
        }
    return result


def optimizers(model: torch.nn.Module, rate: float, kind: str) -> list[torch.optim.Optimizer]:
    """Matrices by Muon (steps of AdamW's size) or AdamW, gains of the norms by AdamW."""
    matrices = [p for p in model.parameters() if p.ndim == 2]
    gains = [p for p in model.parameters() if p.ndim != 2]
    adam = {"lr": rate, "betas": (0.9, 0.98)}
    if kind == "adamw":
        groups = [{"params": matrices, "weight_decay": 0.05}, {"params": gains, "weight_decay": 0.0}]
        return [torch.optim.AdamW(groups, **adam)]
    muon = torch.optim.Muon(matrices, lr=2 * rate, weight_decay=0.05, adjust_lr_fn="match_rms_adamw")
    return [muon, torch.optim.AdamW(gains, weight_decay=0.0, **adam)]


def save_drafter(drafter: Drafter, config: dict[str, Any], folder: Path) -> None:
    state = {k: v.detach().to("cpu", torch.bfloat16) for k, v in drafter.model.state_dict().items()}
    save_file(zlab_state(state), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pair", choices=("smollm2", "tiny-hybrid"), required=True)
    parser.add_argument("--target", required=True)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--seconds", type=float, default=math.inf, help="stop then, with a checkpoint")
    parser.add_argument("--anchors", type=int, default=24, help="blocks of an answer")
    parser.add_argument("--tokens", type=int, default=24576, help="target tokens of a batch")
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--optimizer", choices=("muon", "adamw"), default="muon")
    parser.add_argument("--compile", action="store_true", help="torch.compile for the drafter")
    parser.add_argument("--every", type=int, default=100, help="steps between two points of the curve")
    parser.add_argument("--validate", type=int, default=1000, help="steps between two validations")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args, started = parse(argv), time.time()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(args.seed)
    torch.backends.cuda.matmul.allow_tf32 = True
    config = pair_config(args.pair)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    drafter = Drafter.from_state(config, fresh_state(config, args.seed), dtype=torch.float32)
    pair = load_pair(args.target, drafter, dtype=dtype, device=device)
    pair.target.requires_grad_(False)
    drafter.model.requires_grad_(True)
    if device.type == "cuda":
        fuse_norms(pair.target)
        fuse_norms(drafter.model)
    difference = check_fused(pair.target.get_output_embeddings().weight)  # type: ignore[union-attr]
    trainer = Trainer(pair, drafter, fused=difference < 0.02)
    corpus = Corpus.load(args.corpus)
    prefix = system_turn(list(pair.encode("x").ids), corpus.sequence(0))
    batches = Batches(corpus, prefix, device, args.seed, args.anchors, args.tokens)
    taps = drafter.settings.target_layer_ids
    if device.type == "cuda" and KeptPasses.size(pair, batches, taps) < KEPT_SHARE * torch.cuda.mem_get_info()[0]:
        with fast_forms(pair.target):
            trainer.kept = KeptPasses(pair, batches, taps)
    if args.compile:
        drafter.model.compile(fullgraph=True, dynamic=False)

    args.out.mkdir(parents=True, exist_ok=True)
    optimizer = optimizers(drafter.model, args.rate, args.optimizer)
    rates = rates_of(optimizer)
    curve: dict[str, Any] = {
        "arguments": {k: str(v) for k, v in vars(args).items() if k != "seconds"},
        "parameters": sum(p.numel() for p in drafter.model.parameters()),
        "sequences": len(batches.rows),
        "step": 0,
        "points": [],  # [step, seconds, loss, cross entropy of slot 1, norm of the gradient]
        "validation": [],
        "seconds": 0.0,
        "blocks": 0,
    }
    state_file = args.out / "state.pt"
    if state_file.is_file():
        state = torch.load(state_file, map_location=device, weights_only=True)
        drafter.model.load_state_dict(state["model"])
        for o, saved in zip(optimizer, state["optimizer"], strict=True):
            o.load_state_dict(saved)
        curve = json.loads(state["curve"])
    elif (args.out / "curve.json").is_file():  # the weights came back without state.pt: fresh optimizers
        drafter.model.load_state_dict(rename(load_file(args.out / "model.safetensors")))
        curve = json.loads((args.out / "curve.json").read_text())
    start = curve["step"]
    print(
        f"{args.pair}: {curve['parameters']} parameters, {len(batches.rows)} sequences, fused loss "
        f"{trainer.fused} (difference {difference:.4f}), passes kept {trainer.kept is not None}, from step {start}, "
        f"ready after {time.time() - started:.0f} s",
        flush=True,
    )
    began, at, before = time.time(), start, curve["seconds"]
    compute = LossAndGradients(drafter.model, trainer.loss)
    with fast_forms(pair.target):
        while at < args.steps and time.time() - began < args.seconds:
            batch = batches.draw(at)
            loss, entropy, _, valid = compute(*batch)
            norm = step(drafter.model, optimizer, rates, schedule(at, args.steps, WARM_UP))
            at += 1
            curve["step"] = at
            curve["blocks"] += batch.anchors.numel()
            curve["seconds"] = round(before + time.time() - began, 1)
            if at % args.every == 0 or at == start + 20:
                first = (entropy * valid)[:, 0].sum() / valid[:, 0].sum()
                point = [at, curve["seconds"], round(loss.item(), 4), round(first.item(), 4), round(norm.item(), 3)]
                curve["points"].append(point)
                speed = 1e3 * (time.time() - began) / (at - start)
                print(
                    f"step {at} {point[1]} s loss {point[2]} slot 1 {point[3]} gradient {point[4]} {speed:.1f} ms",
                    flush=True,
                )
                if not math.isfinite(point[2]):
                    raise SystemExit("the loss is not finite: lower --rate")
            if at % args.validate == 0 or at == args.steps:
                curve["validation"].append([at, validate(compute, batches)])
                print("validation", at, json.dumps(curve["validation"][-1][1]), flush=True)
    save_drafter(drafter, config, args.out)
    (args.out / "curve.json").write_text(json.dumps(curve) + "\n", encoding="utf-8")
    saved = [o.state_dict() for o in optimizer]
    torch.save({"model": drafter.model.state_dict(), "optimizer": saved, "curve": json.dumps(curve)}, state_file)
    print(f"{at} of {args.steps} steps, {time.time() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main()
