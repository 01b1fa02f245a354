"""A byte-level BPE for the target, and the corpus in its ids: train.npz and held_out.npz.

    python train_tokenizer.py corpus.npz --source FOLDER --out FOLDER --cut-loops

corpus.npz comes from corpus.py, FOLDER after --source is the model whose ids are in it. One question in a hundred is
held out with all its answers (`text_batches.is_held_out`). --cut-loops ends looping answers of train.npz where they
begin to repeat themselves; held_out.npz keeps them, so that figures before and after speak of the same text. Runs on
the CPU.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from corpus import KINDS, Corpus
from loops import NGRAM, before_repeats, loops
from text_batches import split

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>"]  # ids 0 to 3
CHAT_TEMPLATE = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content']"
    " + '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# contractions, a word with the space before it, a digit, punctuation, line ends, other space
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
Pair = tuple[str, str]  # user turn and answer, special tokens included


def texts(corpus: Corpus, rows: np.ndarray, tokenizer: Any, chunk: int = 4096) -> Iterator[Pair]:
    """User turn with the answer's header, and answer, of each row."""
    plain = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
    for i in range(0, len(rows), chunk):
        part = [corpus.sequence(row) for row in rows[i : i + chunk]]
        begins = corpus.plen[rows[i : i + chunk]]
        heads = tokenizer.batch_decode([s[:n] for s, n in zip(part, begins, strict=True)], **plain)
        tails = tokenizer.batch_decode([s[n:] for s, n in zip(part, begins, strict=True)], **plain)
        yield from zip(heads, tails, strict=True)


def cut(corpus: Corpus, rows: np.ndarray, pairs: list[Pair], tokenizer: Any) -> tuple[np.ndarray, list[Pair]]:
    """Looping answers up to the last word before what they repeat, where that leaves two n-grams or more."""
    answers = [corpus.sequence(row)[corpus.plen[row] :] for row in rows]
    ends = [before_repeats(ids) for ids in answers]
    kept = [i for i, end in enumerate(ends) if end >= 2 * NGRAM]
    tails = tokenizer.batch_decode([answers[i][: ends[i]] for i in kept], clean_up_tokenization_spaces=False)
    found = [(pairs[i][0], tail.rpartition(" ")[0]) for i, tail in zip(kept, tails, strict=True)]
    return rows[kept], found


def train_bpe(pairs: list[Pair], size: int) -> Any:
    """A tokenizer of at most `size` ids for Transformers, with the chat template."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    lines = ("".join(pair).replace("<|im_start|>", "").replace("<|im_end|>", "") for pair in pairs)
    bpe.train_from_iterator(lines, trainer)
    bpe.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=SPECIAL[1:],
        model_max_length=4096,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def retokenised(corpus: Corpus, rows: np.ndarray, pairs: list[Pair], tokenizer: Any, longest: int) -> Corpus:
    """The texts `pairs` of `rows` in the ids of `tokenizer`, cut after `longest` ids."""
    heads, tails = zip(*pairs, strict=True)
    tokenized = [tokenizer(list(part), add_special_tokens=False)["input_ids"] for part in (heads, tails)]
    sequences = [np.array((a + b)[:longest], np.uint16) for a, b in zip(*tokenized, strict=True)]
    begins = np.array([min(len(a), longest) for a in tokenized[0]])
    lengths = np.array([len(s) for s in sequences])
    return Corpus(np.concatenate(sequences), lengths, begins, corpus.temp[rows], corpus.kind[rows])


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus", type=Path)
    parser.add_argument("--source", required=True, help="folder whose tokenizer made the ids of the corpus")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tokenizer", help="folder of a tokenizer to take instead of training one")
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--sample", type=int, default=30000, help="texts that the tokenizer is trained on")
    parser.add_argument("--longest", type=int, default=448, help="ids after which a text is cut")
    parser.add_argument("--cut-loops", action="store_true")
    args, started = parser.parse_args(argv), time.time()
    from transformers import AutoTokenizer

    corpus, source = Corpus.load(args.corpus), AutoTokenizer.from_pretrained(args.source)
    rows, held = split(corpus, source)
    if not len(held):
        raise SystemExit("no question of this corpus is held out: it needs some hundred different questions")
    pairs = list(texts(corpus, rows, source))
    repeats = np.array([loops(p[1], corpus.sequence(r)[corpus.plen[r] :]) for r, p in zip(rows, pairs, strict=True)])
    report: dict[str, Any] = {"arguments": {k: str(v) for k, v in vars(args).items()}, "looping_share_of_answers": {}}
    for name, at in (("T = 0", corpus.temp[rows] == 0), ("T > 0", corpus.temp[rows] > 0)):
        shares = {kind: repeats[at & (corpus.kind[rows] == i)] for i, kind in enumerate(KINDS)}
        report["looping_share_of_answers"][name] = {
            kind: [round(float(x.mean()), 3), len(x)] for kind, x in shares.items() if len(x)
        }
    print(f"{len(rows)} texts decoded, {int(repeats.sum())} loop, {time.time() - started:.0f} s", flush=True)
    if args.cut_loops:
        ended, parts = cut(corpus, rows[repeats], [pairs[i] for i in np.flatnonzero(repeats)], source)
        rows = np.concatenate([rows[~repeats], ended])
        pairs = [pairs[i] for i in np.flatnonzero(~repeats)] + parts
        report["looping_answers_cut"] = len(ended)

    args.out.mkdir(parents=True, exist_ok=True)
    sample = pairs[:: max(1, len(pairs) // args.sample)]
    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer) if args.tokenizer else train_bpe(sample, args.vocabulary)
    tokenizer.save_pretrained(args.out)
    print(f"tokenizer of {len(tokenizer)} ids, {time.time() - started:.0f} s", flush=True)
    for name, at, found in (("train", rows, pairs), ("held_out", held, list(texts(corpus, held, source)))):
        made = retokenised(corpus, at, found, tokenizer, args.longest)
        made.save(args.out / f"{name}.npz")
        whole = made.lengths < args.longest
        nbytes = np.array([len("".join(pair).encode()) for pair in found])
        report[name] = {
            "sequences": len(made),
            "at_temperature_0": int((made.temp == 0).sum()),
            "tokens": len(made.tokens),
            "answer_tokens": int((made.lengths - made.plen).sum()),
            "cut": int((made.lengths == args.longest).sum()),
            "bytes_per_token_of_uncut_texts": round(float(nbytes[whole].sum() / made.lengths[whole].sum()), 3),
        }
    (args.out / "tokenized.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({k: report[k] for k in ("train", "held_out")}, indent=1))
    print(f"{time.time() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main()
