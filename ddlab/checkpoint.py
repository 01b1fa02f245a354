"""Drafter checkpoints on disk: folders, safetensors, tensor names, and a list of whatever does not fit."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

# z-lab's tensor names that Transformers' class spells otherwise
RENAMED = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}


def local_folder(name: str | Path) -> Path | None:
    """The folder of that name; None for a hub name. Raises FileNotFoundError for a path to nothing."""
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if path.is_absolute() or isinstance(name, Path) or name.startswith((".", "~")) or name.count("/") > 1:
        raise FileNotFoundError(f"no such folder: {path}")
    return None


def find_folder(name: str | Path, revision: str | None = None) -> tuple[Path, str | None]:
    """A folder, or a hub name that is downloaded (config, safetensors) -> folder, the hub's commit."""
    folder = local_folder(name)
    if folder is not None:
        if revision is not None:
            raise ValueError(f"revision={revision!r} goes with a hub name, but {folder} is a folder")
        return folder, None
    from huggingface_hub import snapshot_download

    patterns = ["config.json", "*.safetensors", "*.safetensors.index.json"]
    folder = Path(snapshot_download(str(name), revision=revision, allow_patterns=patterns))
    return folder, folder.name


def check_folder(folder: Path) -> None:
    """Raises ValueError unless the folder holds a config.json and safetensors weights."""
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder} is no checkpoint: it has no config.json")
    if any(folder.glob("*.safetensors")):
        return
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt")):
        raise ValueError(
            f"{folder} holds pickled weights (.bin, .pt), which run code when they are opened: "
            "convert them to safetensors"
        )
    raise ValueError(f"{folder} is no checkpoint: it has no .safetensors file")


def read_folder(folder: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """config.json and every tensor of a folder, in one safetensors file or in shards."""
    from safetensors.torch import load_file

    check_folder(folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        files = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        lost = [name for name in files if not (folder / name).is_file()]
        if lost:
            raise ValueError(f"{folder} lacks shards that its index names: {', '.join(lost)}")
    else:
        files = sorted(f.name for f in folder.glob("*.safetensors"))
    state: dict[str, torch.Tensor] = {}
    for name in files:
        state |= load_file(folder / name)
    return config, state


def as_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """A torch dtype from its name; None for None and "auto", the checkpoint's own."""
    if dtype is None or dtype == "auto":
        return None
    found = dtype if isinstance(dtype, torch.dtype) else getattr(torch, dtype.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ValueError(f"unknown dtype {dtype!r}: use 'float32', 'bfloat16', 'float16' or 'auto'")
    return found


def rename(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors under the names of Transformers' class (which native checkpoints have already)."""
    return {RENAMED.get(name, name): tensor for name, tensor in state.items()}


def check_state(expected: Mapping[str, torch.Size], state: Mapping[str, torch.Tensor]) -> None:
    """Raises one ValueError that lists every missing, unexpected and mis-shaped tensor."""
    found = {
        "missing": [name for name in expected if name not in state],
        "unexpected": [name for name in state if name not in expected],
        "mis-shaped": [
            f"{name} is {list(state[name].shape)}, the config makes it {list(shape)}"
            for name, shape in expected.items()
            if name in state and state[name].shape != shape
        ],
    }
    if any(found.values()):
        listed = "; ".join(f"{what}: {', '.join(names)}" for what, names in found.items() if names)
        hint = "; allow_unexpected=(...) leaves unexpected ones out by name" if found["unexpected"] else ""
        raise ValueError(f"the drafter's tensors do not fit its config. {listed}{hint}")


def draft_to_target(state: Mapping[str, torch.Tensor], vocab_size: int | None) -> torch.Tensor | None:
    """Target ids int64 [rows] of a head over a reduced vocabulary; None if the checkpoint has no d2t map.

    d2t holds offsets (target id = row + d2t[row]) as in EAGLE-3 and speculators checkpoints; a t2d map
    (bool [vocab], which target ids are drafted) must agree with it, or ValueError is raised.
    """
    if "d2t" not in state:
        return None
    ids = state["d2t"].to(torch.int64) + torch.arange(len(state["d2t"]))
    wrong = len(ids.unique()) < len(ids) or int(ids.min()) < 0
    wrong = wrong or (vocab_size is not None and int(ids.max()) >= vocab_size)
    if "t2d" in state:
        wrong = wrong or not torch.equal(ids.sort().values, state["t2d"].bool().nonzero()[:, 0])
    if wrong:
        raise ValueError("d2t, read as offsets (target id = row + d2t[row]), does not give distinct target ids")
    return ids
