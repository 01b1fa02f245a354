"""How tokens are shown: every label tells its token, and running text is decoded from bytes."""

import json
import unicodedata
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from ddlab import tokens
from ddlab.tokens import Token

ZOO = [
    b"</script>", b"<b>", b"&amp;", b"&", b"<", b"\\", b"\\N", b'"', b"'", b"{a|b}", b"<> <>", b"`",
    b"\n", b"\n\n", b"\\n", b"\t", b"\r", b"\0", b" ", b"  ", b" a", b"a", b"a ", b"",
    "\xa0".encode(), "\u200d".encode(), "\u200f".encode(), "\u2028".encode(), "\u2423".encode(),
    "\u21b5".encode(), "שלום,".encode(), "مرحبا".encode(), "\u0301".encode(), "e\u0301".encode(),
    "é".encode(), "◌".encode(),
    "🙂".encode(), "🙂".encode()[:2], "🙂".encode()[2:], b"\xf0", b"\x9f", b" \xf0\x9f",
    "你".encode()[:1], "你好".encode(),
    "\ufffd".encode(), "⟨F0⟩".encode(), "⟨NBSP⟩".encode(), "⟨empty⟩".encode(), b"[id 284]",
    b"[id 284]\xff",
    "\ufe0f".encode(), "\u3164".encode(), "\u2800".encode(), "\ue000".encode(), "\U000e0041".encode(),
    b"\xed\xa0\x80",  # half a surrogate pair, which is no UTF-8
]  # fmt: skip
IM_END, UNKNOWN = len(ZOO), 284
TABLE = {i: Token(i, raw) for i, raw in enumerate(ZOO)}
TABLE |= {IM_END: Token(IM_END, b"<|im_end|>", special=True), UNKNOWN: Token(UNKNOWN, None)}


def byte_level_tokenizer(lines, vocab_size=400):
    """A byte-level BPE trained here, with two added tokens of which one is special."""
    fast = Tokenizer(models.BPE())
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    fast.train_from_iterator(
        lines, trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=alphabet, show_progress=False)
    )
    fast.add_tokens([AddedToken("<think>", special=False)])
    fast.add_special_tokens([AddedToken("<|im_end|>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=fast)


def sentencepiece_tokenizer():
    """Spelling as in Gemma's fast tokenizer: a mark for the space, `<0xE2>` for single bytes."""
    pieces = ["<pad>", "▁", "▁a", "a", "é", "▁▁", "\n", *(f"<0x{byte:02X}>" for byte in range(256))]
    fast = Tokenizer(models.BPE(vocab={p: i for i, p in enumerate(pieces)}, merges=[], byte_fallback=True))
    fast.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=fast, pad_token="<pad>"), pieces


@pytest.fixture(scope="module")
def byte_level():
    return byte_level_tokenizer(["the quick brown fox", "hello hello world 🙂", "你好 你好"])


def test_all_labels_of_the_zoo_are_distinct():
    labels = tokens.labels(TABLE)
    assert len(set(labels.values())) == len(TABLE)


def test_a_label_leads_back_to_its_id_through_the_table():
    by_label = {label: i for i, label in tokens.labels(TABLE).items()}
    assert all(by_label[tokens.labels(TABLE)[i]] == i for i in TABLE)


@given(st.lists(st.binary(max_size=6), unique=True, max_size=40))
def test_labels_of_distinct_bytes_are_distinct_and_one_visible_line(raws):
    labels = tokens.labels({i: Token(i, raw) for i, raw in enumerate(raws)})
    assert len(set(labels.values())) == len(raws)
    assert all(label and label.isprintable() for label in labels.values())


@given(st.lists(st.text(max_size=4), unique=True, max_size=40))
def test_labels_of_distinct_texts_are_distinct(texts):
    raws = [text.encode("utf-8", "surrogatepass") for text in texts]
    assert len(set(tokens.labels({i: Token(i, raw) for i, raw in enumerate(raws)}).values())) == len(texts)


def test_ids_that_share_their_bytes_carry_their_number():
    table = {5: Token(5, b"<think>", special=True), 9: Token(9, b"<think>"), 11: Token(11, None)}
    assert tokens.labels(table) == {5: "<think>⟨id 5⟩", 9: "<think>⟨id 9⟩", 11: "[id 11]"}


def test_no_label_holds_a_character_that_turns_the_reading_direction_or_is_invisible():
    for label in tokens.labels(TABLE).values():
        for char in label.replace(" ", ""):  # a label's own plain spaces, as in ⟨F0 9F⟩
            assert unicodedata.category(char)[0] not in "CZ", (label, char)


@pytest.mark.parametrize(
    ("raw", "label"),
    [
        (b" the", "␣the"), (b"\n\n", "↵↵"), (b"\t", "⇥"), (b"\r\n", "⟨CR⟩↵"), (b"\0", "⟨NUL⟩"),
        (b"", "⟨empty⟩"),
        ("\xa0".encode(), "⟨NBSP⟩"), ("\u200f".encode(), "⟨RLM⟩"), (b" \xf0\x9f", "␣⟨F0 9F⟩"),
        (b"\\N", "\\N"),
        ("\ufffd".encode(), "⟨U+FFFD⟩"), ("👩\u200d💻".encode(), "👩⟨ZWJ⟩💻"), (b"<|im_end|>", "<|im_end|>"),
    ],
)  # fmt: skip
def test_labels_read_as_documented(raw, label):
    assert tokens.show_bytes(raw) == label


def test_byte_level_tokens_give_their_bytes(byte_level):
    text = "hello 🙂\t你好 brown\nfox"
    ids = byte_level.encode(text)
    assert b"".join(tokens.token_bytes(byte_level, i) for i in ids) == text.encode()


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=20))
def test_bytes_of_any_encoded_text_join_to_that_text(text):
    ids = ROUND_TRIP.encode(text)
    table = tokens.describe(ROUND_TRIP, ids)
    assert tokens.join_text(ids, table) == text


ROUND_TRIP = byte_level_tokenizer(["the quick brown fox", "hello 🙂"])


def test_sentencepiece_tokens_give_their_bytes():
    tokenizer, pieces = sentencepiece_tokenizer()
    read = {piece: tokens.token_bytes(tokenizer, i) for i, piece in enumerate(pieces)}
    assert read["▁a"] == b" a" and read["▁▁"] == b"  " and read["é"] == "é".encode() and read["\n"] == b"\n"
    assert all(read[f"<0x{byte:02X}>"] == bytes([byte]) for byte in range(256))


def test_a_byte_token_and_a_letter_of_the_same_byte_are_told_apart():
    tokenizer, pieces = sentencepiece_tokenizer()
    both = [pieces.index("a"), pieces.index("<0x61>")]
    labels = tokens.labels(tokens.describe(tokenizer, both))
    assert labels[both[0]] != labels[both[1]]


def test_a_tokenizer_of_an_unknown_kind_is_read_by_decoding():
    fast = Tokenizer(models.WordLevel({"hello": 0, "[UNK]": 1}, unk_token="[UNK]"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=fast)
    assert tokens.token_bytes(tokenizer, 0) == b"hello"
    assert tokens.token_bytes(tokenizer, 2) is None


def test_added_tokens_are_literal_and_only_special_ones_are_special(byte_level):
    think, im_end = (byte_level.convert_tokens_to_ids(text) for text in ("<think>", "<|im_end|>"))
    table = tokens.describe(byte_level, [think, im_end])
    assert table[think] == Token(think, b"<think>", special=False)
    assert table[im_end] == Token(im_end, b"<|im_end|>", special=True)


def test_an_id_without_a_token_has_a_label_and_no_bytes(byte_level):
    beyond = len(byte_level) + 5
    table = tokens.describe(byte_level, [beyond, 2**40])
    assert table[beyond].raw is None and table[beyond].label == f"[id {beyond}]"
    assert table[2**40].label == f"[id {2**40}]"


def test_without_a_tokenizer_ids_are_still_shown():
    assert tokens.labels(tokens.describe(None, [3, 4])) == {3: "[id 3]", 4: "[id 4]"}
    assert tokens.show(7, {}) == "[id 7]"


def test_a_reader_does_not_keep_its_tokenizer_alive():
    import gc
    import weakref

    tokenizer = byte_level_tokenizer(["a b"], vocab_size=260)
    tokens.token_bytes(tokenizer, 3)
    alive = weakref.ref(tokenizer)
    del tokenizer
    gc.collect()
    assert alive() is None


def test_an_emoji_over_four_tokens_joins_to_the_emoji():
    table = {i: Token(i, bytes([byte])) for i, byte in enumerate("🙂".encode())}
    assert tokens.join_text([0, 1, 2, 3], table) == "🙂"
    assert tokens.text_pieces([0, 1, 2, 3], table) == ["", "", "", "🙂"]


def test_half_a_character_at_the_end_is_held_back():
    table = {i: Token(i, bytes([byte])) for i, byte in enumerate("a🙂".encode())}
    assert [tokens.join_text(range(n), table) for n in range(6)] == ["", "a", "a", "a", "a", "a🙂"]


@given(st.lists(st.binary(max_size=4), max_size=12))
def test_streamed_text_only_ever_grows(raws):
    table = {i: Token(i, raw) for i, raw in enumerate(raws)}
    texts = [tokens.join_text(range(n), table) for n in range(len(raws) + 1)]
    assert all(later.startswith(earlier) for earlier, later in pairwise(texts))


@given(st.lists(st.binary(max_size=4), max_size=12))
def test_streamed_text_is_the_decoding_of_all_bytes_but_for_an_open_end(raws):
    table = {i: Token(i, raw) for i, raw in enumerate(raws)}
    joined, whole = tokens.join_text(range(len(raws)), table), b"".join(raws).decode("utf-8", "replace")
    assert whole.startswith(joined) and set(whole[len(joined) :]) <= {"\ufffd"}


def test_special_tokens_are_left_out_of_text_on_request():
    ids = [ZOO.index(b"a"), IM_END]
    assert tokens.join_text(ids, TABLE) == "a<|im_end|>"
    assert tokens.join_text(ids, TABLE, skip_special=True) == "a"


@pytest.mark.parametrize("token", list(TABLE.values()), ids=lambda token: repr(token.raw))
def test_a_token_survives_json(token):
    assert tokens.from_json(token.id, json.loads(json.dumps(tokens.to_json(token)))) == token
