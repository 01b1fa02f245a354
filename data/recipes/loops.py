"""Texts that repeat themselves: what counts as a loop, in the corpus and in the evaluation.

A target learns to loop from text that loops ("Repetition In Repetition Out", Li et al., 2023), and half of what a small
model answers at T = 0 in 320 tokens does.
"""

from __future__ import annotations

import zlib

import numpy as np

RATIO = 0.35  # a text that zlib packs below this share of its bytes repeats itself
NGRAM = 8  # tokens
REPEATED = 0.2  # share of repeated n-grams above which a text loops, whatever zlib makes of it
_MIX = np.random.default_rng(0).integers(1 << 62, size=64)


def zlib_ratio(text: str) -> float:
    """Packed size / size in bytes; 1.0 for an empty text."""
    raw = text.encode()
    return len(zlib.compress(raw)) / len(raw) if raw else 1.0


def repeated_ngrams(ids: np.ndarray, n: int = NGRAM) -> np.ndarray:
    """ids [t] -> bool [t - n + 1]: the n-gram that begins here began at an earlier place too."""
    if len(ids) < n:
        return np.zeros(0, dtype=bool)
    grams = np.lib.stride_tricks.sliding_window_view(ids.astype(np.int64), n)
    names = (grams * _MIX[:n]).sum(1)  # modulo 2^64: a sum of its own for every n-gram, as good as certainly
    _, first, same = np.unique(names, return_index=True, return_inverse=True)
    return first[same] < np.arange(len(grams))


def repeated_tokens(ids: np.ndarray, n: int = NGRAM) -> np.ndarray:
    """bool [t]: the token is part of an n-gram that is there for the second time or more."""
    marks = np.zeros(len(ids) + 1, dtype=np.int64)
    for start in np.flatnonzero(repeated_ngrams(ids, n)):
        marks[start] += 1
        marks[start + n] -= 1
    return marks.cumsum()[:-1] > 0


def before_repeats(ids: np.ndarray, n: int = NGRAM) -> int:
    """Tokens before the first n-gram that is there for the second time; 0 where none is."""
    again = np.flatnonzero(repeated_ngrams(ids, n))
    return int(again[0]) if len(again) else 0


def loops(text: str, ids: np.ndarray) -> bool:
    """An answer repeats itself: zlib packs it below RATIO, or more than REPEATED of its n-grams are repeated."""
    again = repeated_ngrams(ids)
    return zlib_ratio(text) < RATIO or bool(len(again) and again.mean() > REPEATED)
