"""How a token is shown.

A token is bytes, not text: an emoji is often four tokens, none of which is a character. So a trace keeps the
bytes of every id it mentions (`Token`), labels show them, and running text is decoded from the joined bytes.
"""

from __future__ import annotations

import codecs
import json
import unicodedata
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple


class Token(NamedTuple):
    """One vocabulary entry: id, bytes (None: the tokenizer has no such id), whether it is special."""

    id: int
    raw: bytes | None = None
    special: bool = False

    @property
    def label(self) -> str:
        """One visible line, distinct for distinct bytes; `labels` also tells apart ids of the same bytes."""
        return f"[id {self.id}]" if self.raw is None else show_bytes(self.raw)


# ---- reading a tokenizer -------------------------------------------------------------------------


def describe(tokenizer: Any, ids: Iterable[int]) -> dict[int, Token]:
    """The `Token` of every id in `ids`. With `tokenizer` None every id is one without text."""
    read = _reader(tokenizer)
    return {token_id: read(token_id) for token_id in map(int, ids)}


def token_bytes(tokenizer: Any, token_id: int) -> bytes | None:
    """The bytes that `token_id` adds to a text; None for an id without a token (a padded row, say)."""
    return _reader(tokenizer)(int(token_id)).raw


_readers: weakref.WeakKeyDictionary[Any, Callable[[int], Token]] = weakref.WeakKeyDictionary()


def _reader(tokenizer: Any) -> Callable[[int], Token]:
    if tokenizer is None:
        return Token
    try:
        if tokenizer not in _readers:
            # the reader must not hold the tokenizer that is its key, or the entry would never go away
            _readers[tokenizer] = _make_reader(weakref.proxy(tokenizer))
        return _readers[tokenizer]
    except TypeError:  # an object that cannot be hashed or weakly referenced: read it every time
        return _make_reader(tokenizer)


def _make_reader(tokenizer: Any) -> Callable[[int], Token]:
    to_bytes = _spelling(tokenizer)
    # added tokens are literal text, never spelled in the byte alphabet; only some of them are special
    added = {int(i): token for i, token in (getattr(tokenizer, "added_tokens_decoder", None) or {}).items()}
    special_ids = set(getattr(tokenizer, "all_special_ids", None) or ())
    cache: dict[int, Token] = {}

    def read(token_id: int) -> Token:
        if token_id not in cache:
            special = token_id in special_ids
            if token_id in added:
                content = added[token_id]
                special = special or bool(getattr(content, "special", False))
                raw: bytes | None = _encode(str(getattr(content, "content", content)))
            else:
                raw = to_bytes(token_id)
            cache[token_id] = Token(token_id, raw, special)
        return cache[token_id]

    return read


def _spelling(tokenizer: Any) -> Callable[[int], bytes | None]:
    """How this tokenizer spells bytes in its vocabulary: GPT-2's byte alphabet, SentencePiece, or unknown."""
    kinds = _decoder_kinds(tokenizer)
    if "ByteLevel" in kinds:
        return lambda token_id: _from_byte_alphabet(_spelled(tokenizer, token_id))
    if kinds & {"Metaspace", "ByteFallback", "Replace"} or hasattr(tokenizer, "sp_model"):
        return lambda token_id: _from_sentencepiece(_spelled(tokenizer, token_id))
    return lambda token_id: _by_decoding(tokenizer, token_id)


def _decoder_kinds(tokenizer: Any) -> set[str]:
    """A fast tokenizer's decoder parts: {"ByteLevel"} for Qwen, {"Replace", "ByteFallback", ..} for Gemma."""
    decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
    if decoder is None:
        return set()
    state = json.loads(decoder.__getstate__())
    parts = state.get("decoders", []) if state.get("type") == "Sequence" else [state]
    return {part.get("type", "") for part in parts}


def _spelled(tokenizer: Any, token_id: int) -> str | None:
    try:
        return tokenizer.convert_ids_to_tokens(token_id) if token_id >= 0 else None
    except (IndexError, KeyError, OverflowError):  # what tokenizers raise for an id that is not theirs
        return None


def _by_decoding(tokenizer: Any, token_id: int) -> bytes | None:
    if _spelled(tokenizer, token_id) is None:
        return None
    return _encode(tokenizer.decode([token_id]))


def _byte_alphabet() -> dict[str, int]:
    """The printable characters that byte-level BPE writes bytes in: printable Latin-1 stands for itself,
    U+0100 and up stand for the other 68 bytes in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if chr(byte) not in alphabet)
    return alphabet | {chr(0x100 + i): byte for i, byte in enumerate(list(others))}


_BYTE_ALPHABET = _byte_alphabet()


def _from_byte_alphabet(spelled: str | None) -> bytes | None:
    if spelled is None:
        return None
    if not all(char in _BYTE_ALPHABET for char in spelled):
        return _encode(spelled)  # not written in the alphabet after all
    return bytes(_BYTE_ALPHABET[char] for char in spelled)


def _from_sentencepiece(spelled: str | None) -> bytes | None:
    if spelled is None:
        return None
    if len(spelled) == 6 and spelled.startswith("<0x") and spelled.endswith(">"):
        try:
            return bytes([int(spelled[3:5], 16)])
        except ValueError:
            pass
    return _encode(spelled.replace("▁", " "))


def _encode(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


# ---- showing one token ---------------------------------------------------------------------------

_MARKS = {" ": "␣", "\n": "↵", "\t": "⇥"}
_NAMES = {
    "\0": "NUL", "\r": "CR", "\x1b": "ESC", "\x7f": "DEL", "\xa0": "NBSP", "\xad": "SHY",
    "\u200b": "ZWSP", "\u200c": "ZWNJ", "\u200d": "ZWJ", "\u200e": "LRM", "\u200f": "RLM",
    "\u2028": "LS", "\u2029": "PS", "\u2060": "WJ", "\ufeff": "BOM",
}  # fmt: skip
# shown by their number: characters that a label uses itself, and letters or marks that draw nothing
_BY_NUMBER = set("␣↵⇥⟨⟩◌\ufffd\u2800\u115f\u1160\u3164\uffa0\u034f\u17b4\u17b5")
_BY_NUMBER |= {chr(c) for c in (*range(0x180B, 0x1810), *range(0xFE00, 0xFE10), *range(0xE0100, 0xE01F0))}


def show_bytes(raw: bytes) -> str:
    """One visible line for a token's bytes: `␣the`, `↵↵`, `⟨NBSP⟩`, `⟨F0 9F⟩`; one line per byte string."""
    if not raw:
        return "⟨empty⟩"
    shown, wild = [], []
    # surrogateescape keeps every byte that is no part of a character as one lone surrogate
    for char in raw.decode("utf-8", "surrogateescape"):
        if "\udc80" <= char <= "\udcff":
            wild.append(f"{ord(char) - 0xDC00:02X}")
            continue
        if wild:
            shown.append(f"⟨{' '.join(wild)}⟩")
            wild = []
        shown.append(_show_char(char, first=not shown))
    if wild:
        shown.append(f"⟨{' '.join(wild)}⟩")
    return "".join(shown)


def _show_char(char: str, first: bool) -> str:
    if char in _MARKS:
        return _MARKS[char]
    if char in _NAMES:
        return f"⟨{_NAMES[char]}⟩"
    category = unicodedata.category(char)
    if char in _BY_NUMBER or category[0] in "CZ":  # control, format, private, unassigned; every kind of space
        return f"⟨U+{ord(char):04X}⟩"
    if first and category in ("Mn", "Me"):  # a lone accent would sit on whatever stands before the label
        return "◌" + char
    return char


def printable(text: str) -> str:
    """Running text in which characters that steer a terminal or turn its direction read as `⟨ESC⟩`."""
    kept = "\n\t\u200c\u200d"  # line breaks; joiners, which emoji and some scripts are spelled with
    return "".join(
        _show_char(char, first=False)
        if char not in kept and unicodedata.category(char) in ("Cc", "Cf", "Cs", "Zl", "Zp")
        else char
        for char in text
    )


def labels(table: Mapping[int, Token]) -> dict[int, str]:
    """Labels of all tokens of a table, all different: ids of the same bytes carry their number, `A⟨id 7⟩`."""
    plain = {token_id: token.label for token_id, token in table.items()}
    seen: dict[str, int] = {}
    for label in plain.values():
        seen[label] = seen.get(label, 0) + 1
    return {i: label if seen[label] == 1 else f"{label}⟨id {i}⟩" for i, label in plain.items()}


def show(token_id: int, table: Mapping[int, Token]) -> str:
    """The label of one id from a table; an id that the table lacks reads `[id 284]`."""
    return table[token_id].label if token_id in table else f"[id {token_id}]"


# ---- running text --------------------------------------------------------------------------------


def text_pieces(ids: Iterable[int], table: Mapping[int, Token]) -> list[str]:
    """What each id adds to the running text, decoded from the joined bytes.

    A character over several tokens belongs to the token that completes it; the tokens before it add "". Bytes
    that can never become a character give U+FFFD. An incomplete character at the end gives nothing yet, so
    the text of a longer list always starts with the text of a shorter one.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    return [decoder.decode(token.raw or b"") if (token := table.get(int(i))) else "" for i in ids]


def join_text(ids: Iterable[int], table: Mapping[int, Token], *, skip_special: bool = False) -> str:
    """The text of a list of ids (see `text_pieces`), special tokens left out on request."""
    kept = (i for i in ids if not (skip_special and i in table and table[i].special))
    return "".join(text_pieces(kept, table))


# ---- JSON form: text where it is text, bytes where it is not -------------------------------------


def to_json(token: Token) -> Any:
    if token.raw is None:
        return None
    try:
        text = token.raw.decode("utf-8")
    except UnicodeDecodeError:
        return {"bytes": token.raw.hex(), "special": True} if token.special else {"bytes": token.raw.hex()}
    return {"text": text, "special": True} if token.special else text


def from_json(token_id: int, value: Any) -> Token:
    if value is None or isinstance(value, str):
        return Token(token_id, None if value is None else _encode(value))
    raw = bytes.fromhex(value["bytes"]) if "bytes" in value else _encode(value["text"])
    return Token(token_id, raw, bool(value.get("special", False)))
