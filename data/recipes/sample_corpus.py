"""Questions and answers of a dense chat model (SmolLM2-135M-Instruct): the text that a target is trained on.

    python sample_corpus.py --model FOLDER --out FOLDER --seconds 300

First questions: most the model writes itself when it is given the header of a user turn and nothing else, the others
come from templates in six kinds (questions.py). They are kept in questions.json and made once. Then answers, each
question once at T = 0 and once more (--sampled) at T = 0.6 to 0.9, in an order drawn from --seed. The same command
again goes on with the answers that are missing, and appends them. Another --seed needs another --out.

In the folder that is written: questions.json, tokens.u16 and meta.npz, which corpus.py reads.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from corpus import KINDS
from decoders import StaticDecoder
from norms import fuse_norms
from questions import key, templated, usable
from sampler import Job, Sampler

QUESTION = 72  # ids of a self-written question at most
TURN = 96  # ids of a user turn at most, the headers included
TEMPERATURES = (0.6, 0.7, 0.8, 0.9)


class Chat:
    """A chat template's pieces around a user's text, as ids: system turn, header of the user turn, what follows."""

    def __init__(self, tokenizer: Any) -> None:
        message = [{"role": "user", "content": "CONTENT"}]
        text = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
        self.tokenizer = tokenizer
        before, self.after = (self.ids(part) for part in text.split("CONTENT"))
        user = max(i for i, token in enumerate(before) if token == before[0])  # the id that opens a turn
        self.system, self.user = before[:user], before[user:]

    def ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def turns(self, questions: list[str]) -> list[list[int]]:
        asked = self.tokenizer(questions, add_special_tokens=False)["input_ids"]
        return [[*self.user, *ids, *self.after] for ids in asked]


def self_written(sampler: Sampler, chat: Chat, n: int, seconds: float) -> list[str]:
    """What the model says in the place of a user, where it came to an end and `questions.usable` lets it pass."""
    jobs = [Job(chat.user, QUESTION, 1.0 if i % 3 == 0 else 0.85) for i in range(n)]
    found = sampler.run(jobs, seconds, "questions")
    ended = [ids[len(chat.user) : -1].tolist() for _, ids in sorted(found.items()) if ids[-1] == sampler.stop]
    return [text for raw in chat.tokenizer.batch_decode(ended) if (text := usable(raw)) is not None]


def make_questions(sampler: Sampler, chat: Chat, args: argparse.Namespace) -> list[tuple[str, str]]:
    """Different questions as (kind, text): from the templates, and self-written."""
    found = {key(text): (kind, text) for kind, text in templated(args.templates, args.seed)}
    for text in self_written(sampler, chat, args.self_written, args.seconds / 2):
        found.setdefault(key(text), (KINDS[0], text))
    return list(found.values())


def make_jobs(questions: list[tuple[str, str]], chat: Chat, args: argparse.Namespace) -> tuple[list[Job], list[int]]:
    """Jobs in a random order, and the kind of each as an index into KINDS."""
    draw = random.Random(args.seed)
    jobs = []
    for (kind, _), ids in zip(questions, chat.turns([text for _, text in questions]), strict=True):
        if len(ids) <= TURN:
            sampled = int(args.sampled) + (draw.random() < args.sampled % 1)
            warm = [draw.choice(TEMPERATURES) for _ in range(sampled)]
            jobs += [(Job(ids, args.new_tokens, t), KINDS.index(kind)) for t in (0.0, *warm)]
    draw.shuffle(jobs)
    return [job for job, _ in jobs], [kind for _, kind in jobs]


class AnswerFiles:
    """tokens.u16 and meta.npz of a folder, to which answers are appended."""

    TYPES = {"job": np.int32, "lengths": np.uint16, "plen": np.uint16, "temp": np.float16, "kind": np.uint8}  # noqa: RUF012

    def __init__(self, folder: Path) -> None:
        self.tokens, self.file = folder / "tokens.u16", folder / "meta.npz"
        self.meta = {name: np.zeros(0, dtype=kind) for name, kind in self.TYPES.items()}
        if self.file.is_file():
            with np.load(self.file) as kept:
                self.meta = {name: kept[name] for name in self.TYPES}

    def append(self, found: dict[int, np.ndarray], jobs: list[Job], kinds: list[int]) -> None:
        """found: index of a job -> prompt and answer."""
        rows = sorted(found)
        with self.tokens.open("r+b" if len(self.meta["job"]) else "wb") as out:
            out.seek(2 * int(self.meta["lengths"].sum(dtype=np.int64)))
            out.truncate()  # what meta.npz does not know of is of a call that was cut off
            out.write(b"".join(found[i].astype(np.uint16).tobytes() for i in rows))
        more = {
            "job": rows,
            "lengths": [len(found[i]) for i in rows],
            "plen": [len(jobs[i].ids) for i in rows],
            "temp": [jobs[i].temperature for i in rows],
            "kind": [kinds[i] for i in rows],
        }
        for name, kind in self.TYPES.items():
            self.meta[name] = np.concatenate([self.meta[name], np.array(more[name], dtype=kind)])
        np.savez(self.file, **self.meta)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder of a dense chat model")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=math.inf, help="for the sampling of this call")
    parser.add_argument("--rows", type=int, default=4096, help="answers at a time")
    parser.add_argument("--self-written", type=int, default=120000, help="questions to let the model write")
    parser.add_argument("--templates", type=int, default=30000, help="questions from templates")
    parser.add_argument("--sampled", type=float, default=1.0, help="answers at T > 0 a question, in the mean")
    parser.add_argument("--new-tokens", type=int, default=320)
    parser.add_argument("--seed", type=int, default=0)
    args, started = parser.parse_args(argv), time.time()
    file = args.out / "questions.json"
    asked_for = {name: getattr(args, name) for name in ("self_written", "templates", "sampled", "new_tokens", "seed")}
    if file.is_file() and (before := json.loads(file.read_text(encoding="utf-8"))["arguments"]) != asked_for:
        raise SystemExit(f"{args.out} was begun with {before}: give these again, or another --out")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(args.seed)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype).to(device).eval()
    if device.type == "cuda":
        fuse_norms(model)
    chat = Chat(AutoTokenizer.from_pretrained(args.model))
    decoder = StaticDecoder(model, args.rows, len(chat.system) + TURN + args.new_tokens, chat.system)
    sampler = Sampler(decoder, chat.tokenizer.eos_token_id)
    args.out.mkdir(parents=True, exist_ok=True)
    print(f"{args.rows} rows, fused {decoder.fused}, ready after {time.time() - started:.0f} s", flush=True)

    began = time.time()
    if not file.is_file():
        made = {"arguments": asked_for, "questions": make_questions(sampler, chat, args)}
        file.write_text(json.dumps(made, ensure_ascii=False, indent=0) + "\n", encoding="utf-8")
    made = json.loads(file.read_text(encoding="utf-8"))
    jobs, kinds = make_jobs([(kind, text) for kind, text in made["questions"]], chat, args)
    said = sum(kind == 0 for kind in kinds)
    print(f"{len(jobs)} answers to give, {said} of them to self-written questions", flush=True)

    files = AnswerFiles(args.out)
    missing = np.setdiff1d(np.arange(len(jobs)), files.meta["job"]).tolist()
    torch.manual_seed(args.seed + len(files.meta["job"]))  # a later call is not to repeat the noise of this one
    if missing:
        found = sampler.run([jobs[i] for i in missing], args.seconds - (time.time() - began), "answers")
        files.append({missing[i]: ids for i, ids in found.items()}, jobs, kinds)
    meta = files.meta
    answer_tokens = int((meta["lengths"].astype(np.int64) - meta["plen"]).sum())
    greedy = int((meta["temp"] == 0).sum())
    print(
        f"{len(meta['job'])} of {len(jobs)} answers, {greedy} of them at T = 0; {answer_tokens} answer tokens; "
        f"{time.time() - started:.0f} s"
    )


if __name__ == "__main__":
    main()
