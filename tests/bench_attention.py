"""One attention layer over a committed text and a tree's rows, on every backend: ``python tests/bench_attention.py``.

On a CUDA GPU at the shapes of Qwen3.6-27B's full-attention layers in bfloat16; ``--cpu`` is a small form for a CPU in
float32. Times are medians of calls one after the other (CUDA events; on the CPU the clock), after a warm-up; beside
them the same call replayed from a CUDA graph, which has no launch overhead. Memory is the peak beyond the inputs and
the mask. Errors are the largest difference from attention in float64. ``--json FILE`` writes the same as data.
"""

from __future__ import annotations

import argparse
import copy
import ctypes
import json
import math
import platform
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import transformers
from strategies import tree_of
from torch import Tensor
from torch.nn.attention import SDPBackend
from transformers.integrations.sdpa_attention import repeat_kv
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ddlab import flash_tree
from ddlab.attention import BACKENDS, Call, available
from ddlab.tree import DraftTree
from ddlab.verify import tree_masks

GPU = {"heads": 24, "kv_heads": 4, "dim": 256, "dtype": "bfloat16", "committed": (512, 8192, 32768)}
SMALL = {"heads": 8, "kv_heads": 2, "dim": 64, "dtype": "float32", "committed": (512, 8192, 32768)}
ROWS = {"cuda": (1, 16, 65, 257), "cpu": (1, 16, 65)}
REPEATS = {"cuda": 30, "cpu": 7}
FLEX_SECONDS = {"cuda": 100, "cpu": 100}  # what compiling and timing flex may take, in its own process
DEPTH = 15  # of the tree
BAND = {"bfloat16": 2e-2, "float32": 1e-4}
Row = dict[str, Any]


class Cell:
    """The inputs of one call: a text of ``committed`` tokens and a tree of ``rows`` rows."""

    def __init__(self, shape: dict[str, Any], committed: int, rows: int, device: str):
        dtype = getattr(torch, shape["dtype"])
        self.committed, self.rows, self.shape = committed, rows, shape
        noise, keys = torch.Generator(device).manual_seed(committed + rows), committed + rows
        kv = (1, shape["kv_heads"], keys + 64, shape["dim"])  # a cache's buffer has room
        q = torch.randn((1, rows, shape["heads"], shape["dim"]), generator=noise, device=device, dtype=dtype)
        buffers = [torch.randn(kv, generator=noise, device=device, dtype=dtype) for _ in range(2)]
        self.query = q.transpose(1, 2)
        self.key, self.value = (x[:, :, :keys] for x in buffers)
        tree = bushy_tree(rows)
        masks = [
            tree_masks(tree, committed, [("full_attention", None)], dtype, torch.device(device), dense_part=part)
            for part in (False, True)
        ]
        self.whole, self.dense_part = (m["full_attention"] if rows > 1 else None for m in masks)
        self.module = SimpleNamespace(
            num_key_value_groups=shape["heads"] // shape["kv_heads"], is_causal=True, training=False, layer_idx=0
        )

    def text_alone(self) -> Cell:
        """The same rows over the committed keys, all of them seen."""
        cell = copy.copy(self)
        cell.key, cell.value = (x[:, :, : self.committed] for x in (self.key, self.value))
        cell.whole = cell.dense_part = None
        return cell

    def right(self) -> Tensor:
        """Attention in float64, [1, rows, heads, dim]."""
        group, out = self.query.shape[1] // self.key.shape[1], []
        for head in range(self.query.shape[1]):
            q, k, v = (
                x[0, i].double()
                for x, i in ((self.query, head), (self.key, head // group), (self.value, head // group))
            )
            scores = q @ k.T / math.sqrt(q.shape[1])
            scores = scores if self.whole is None else scores.masked_fill(self.whole[0, 0] != 0, -torch.inf)
            out.append(scores.softmax(-1) @ v)
        return torch.stack(out, dim=1)[None]

    def call(self, name: str) -> tuple[Callable[[], Tensor], Tensor | None]:
        """A call on a backend, as a model makes it, and the mask that it was given."""
        backend = BACKENDS[name]
        mask = self.dense_part if backend.dense_part else self.whole
        module = SimpleNamespace(**vars(self.module), config=SimpleNamespace(_attn_implementation=name))
        if name == "flex" and mask is not None:  # a model's layers share one block mask
            from torch.nn.attention.flex_attention import create_block_mask

            seen, sizes = mask[0, 0] == 0, (self.rows, self.key.shape[2])
            block = create_block_mask(lambda b, h, i, j: seen[i, j], None, None, *sizes, device=mask.device)
            return lambda: self._run("flex_attention", module, block), mask
        return lambda: self._run(backend.implementation, module, mask), mask

    def _run(self, implementation: str, module: Any, mask: Any) -> Tensor:
        function: Any = ALL_ATTENTION_FUNCTIONS[implementation]
        return function(module, self.query, self.key, self.value, mask, scaling=self.shape["dim"] ** -0.5)[0]


def bushy_tree(rows: int) -> DraftTree:
    """A random tree of that many rows, at most DEPTH deep."""
    rng, parents, depth = np.random.default_rng(rows), [-1], [0]
    while len(parents) < rows:
        parent = int(rng.integers(len(parents)))
        if depth[parent] < DEPTH:
            parents.append(parent)
            depth.append(depth[parent] + 1)
    return tree_of(parents, 0, 100_000)


# -- measuring -------------------------------------------------------------------------------------------------


def measure(name: str, cell: Cell, call: Callable[[], Tensor], mask: Tensor | None, right: Tensor) -> Row:
    device = cell.query.device.type
    row: Row = {"committed": cell.committed, "rows": cell.rows, "backend": name}
    row["mask_mb"] = 0.0 if mask is None else mask.nbytes / 2**20
    if name == "sdpa":
        row["kernel"] = chosen_kernel(cell)
    try:
        row["max_error"] = float((call().double() - right).abs().max())
        row["peak_mb"] = peak_cuda(call) if device == "cuda" else peak_cpu(call)
        times = clock_cuda(call) if device == "cuda" else clock_cpu(call)
        row |= {"ms": statistics.median(times), "runs": len(times)}
        row |= {"ms_p10": float(np.quantile(times, 0.1)), "ms_p90": float(np.quantile(times, 0.9))}
        row |= in_a_graph(call) if device == "cuda" else {}
    except (ValueError, RuntimeError, ImportError) as error:
        row["error"] = " ".join(str(error).split())
    return row


def chosen_kernel(cell: Cell) -> str:
    """Which kernel PyTorch takes for Transformers' sdpa."""
    group = cell.module.num_key_value_groups
    key, value = (x if cell.whole is None else repeat_kv(x, group) for x in (cell.key, cell.value))
    number = torch._fused_sdp_choice(cell.query, key, value, cell.whole, enable_gqa=cell.whole is None)
    return str(SDPBackend(number).name).removesuffix("_ATTENTION").lower()


def clock_cuda(call: Callable[[], Any]) -> list[float]:
    for _ in range(5):
        call()
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(REPEATS["cuda"])]
    torch.cuda.synchronize()
    for start, end in events:
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in events]


def clock_cpu(call: Callable[[], Any]) -> list[float]:
    call()
    times = []
    for _ in range(REPEATS["cpu"]):
        start = time.perf_counter()
        call()
        times.append(1000 * (time.perf_counter() - start))
    return times


def in_a_graph(call: Callable[[], Any]) -> Row:
    """The same call captured once and replayed: milliseconds of its kernels, or why it cannot be captured."""
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        return {"graph_ms": statistics.median(clock_cuda(graph.replay))}
    except RuntimeError as error:
        torch.cuda.synchronize()
        return {"graph_error": " ".join(str(error).split())}


def peak_cuda(call: Callable[[], Any]) -> float:
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def peak_cpu(call: Callable[[], Any]) -> float | None:
    """By the kernel's own count of resident pages; None where there is no /proc."""
    if not Path("/proc/self/clear_refs").exists():
        return None
    ctypes.CDLL(None).malloc_trim(0)  # what was freed goes back, so that it counts when it is taken again
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = resident("VmRSS")
    call()
    return (resident("VmHWM") - before) / 2**10


def resident(field: str) -> int:
    """KiB"""
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1])


# -- what is measured --------------------------------------------------------------------------------------------


def cells(device: str) -> Iterator[tuple[Cell, Tensor]]:
    shape = GPU if device == "cuda" else SMALL
    for committed in shape["committed"]:  # type: ignore[attr-defined]
        for rows in ROWS[device]:
            cell = Cell(shape, committed, rows, device)
            yield cell, cell.right()


def backends_of(cell: Cell) -> list[str]:
    """Those on this machine for which the call is legal; eager is left out, and flex has its own process."""
    kind, shape = "step" if cell.rows == 1 else "verify", cell.shape
    sizes = {"head_dim": shape["dim"], "heads": shape["heads"], "kv_heads": shape["kv_heads"]}
    call = Call(kind, None, False, dtype=cell.query.dtype, device=cell.query.device.type, **sizes)
    found = [name for name, b in BACKENDS.items() if available(name) is None and b.refusal(call) is None]
    return [name for name in found if name not in ("eager", "flex")]


def flash_forms(cell: Cell) -> list[Row]:
    """Keys that every row sees: the group's heads as heads, as further rows, and the keys in chunks."""
    key, value, scale, right = cell.key, cell.value, cell.shape["dim"] ** -0.5, cell.right()
    folded = flash_tree._folded(cell.query, key.shape[1])

    def chunked(chunks: int) -> Tensor:
        k, v = (x.unflatten(2, (chunks, -1)).transpose(1, 2).flatten(0, 1) for x in (key, value))  # views
        out, lse = flash_tree._flash(folded.expand(chunks, -1, -1, -1), k, v, scale)
        joined = (lse.softmax(0)[..., None] * out).sum(0)  # [kv heads, group * rows, dim]
        return joined.reshape(1, -1, cell.rows, key.shape[3]).transpose(1, 2).to(cell.query.dtype)

    def plain() -> Tensor:
        return flash_tree._flash(cell.query, key, value, scale)[0].transpose(1, 2)

    def as_rows() -> Tensor:
        return flash_tree._joined(cell.query, [flash_tree._flash(folded, key, value, scale)], None, None, None)

    forms = {"heads as heads": plain, "heads as rows": as_rows}
    forms |= {f"heads as rows, {n} chunks": lambda n=n: chunked(n) for n in (4, 16)}
    return [measure(f"flash part: {name}", cell, call, None, right) for name, call in forms.items()]


def flex_in_a_child(device: str) -> list[Row]:
    """flex is compiled, and has ended a process before: it gets its own. What it finished in time is kept."""
    if (missing := available("flex")) is not None:
        return [{"backend": "flex", "error": missing}]
    command = [sys.executable, __file__, "--flex", *(["--cpu"] if device == "cpu" else [])]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        try:
            out, err = child.communicate(timeout=FLEX_SECONDS[device])
            why = None if child.returncode == 0 else f"exit {child.returncode}: {' '.join(err.split()[-60:])}"
        except subprocess.TimeoutExpired:
            child.kill()
            out, err = child.communicate()
            why = f"stopped after {FLEX_SECONDS[device]} s, the cells above were done by then"
    rows = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    return rows + ([{"backend": "flex", "error": why}] if why else [])


def flex_child(device: str) -> None:
    shape = GPU if device == "cuda" else SMALL
    for committed, rows in ((32768, 65), (512, 65), (32768, 257), (32768, 16), (8192, 65)):
        if rows in ROWS[device]:
            cell = Cell(shape, committed, rows, device)
            call, mask = cell.call("flex")
            print(json.dumps(measure("flex", cell, call, mask, cell.right())), flush=True)


# -- what is shown -----------------------------------------------------------------------------------------------


def versions(device: str) -> Row:
    name = (
        torch.cuda.get_device_name() if device == "cuda" else f"{platform.machine()}, {torch.get_num_threads()} threads"
    )
    cudnn = torch.backends.cudnn.version() if device == "cuda" else None
    found = {"device": name, "torch": torch.__version__, "cuda": torch.version.cuda, "cudnn": cudnn}
    missing = {name: available(name) for name in BACKENDS if available(name) is not None}
    return found | {"transformers": transformers.__version__, "python": platform.python_version(), "not here": missing}


def table(rows: list[Row]) -> str:
    columns = ["committed", "rows", "backend", "ms", "10–90 %", "in a graph", "× sdpa", "× in a graph"]
    columns += ["peak MiB", "mask MiB", "error"]
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    sdpa = {(r["committed"], r["rows"]): r for r in rows if r["backend"] == "sdpa"}
    for row in rows:
        if "ms" not in row:
            lines.append(f"| {row.get('committed', '')} | {row.get('rows', '')} | {row['backend']} | {row['error']} |")
            continue
        base = sdpa.get((row["committed"], row["rows"]), {})
        row["times_sdpa"] = base.get("ms", math.nan) / row["ms"]
        row["times_sdpa_graph"] = base.get("graph_ms", math.nan) / row.get("graph_ms", math.nan)
        graph = f"{row['graph_ms']:.3f}" if "graph_ms" in row else row.get("graph_error", "–")
        peak = "–" if row["peak_mb"] is None else f"{row['peak_mb']:.1f}"
        name = row["backend"] + (f" ({row['kernel']})" if "kernel" in row else "")
        lines.append(
            f"| {row['committed']} | {row['rows']} | {name} | {row['ms']:.3f} "
            f"| {row['ms_p10']:.3f}–{row['ms_p90']:.3f} | {graph} | {row['times_sdpa']:.2f} "
            f"| {row['times_sdpa_graph']:.2f} | {peak} | {row['mask_mb']:.2f} | {row['max_error']:.1e} |"
        )
    return "\n".join(lines).replace("nan", "–")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--cpu", action="store_true", help="the small form, on the CPU")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the results there too")
    parser.add_argument("--flex", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    device = "cpu" if arguments.cpu else "cuda"
    if device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no CUDA GPU here: --cpu is the small form for a CPU")
    torch.set_grad_enabled(False)
    if arguments.flex:
        flex_child(device)
        return 0
    began, shape = time.perf_counter(), GPU if device == "cuda" else SMALL
    layers, parts = [], []
    for cell, right in cells(device):
        for name in backends_of(cell):
            call, mask = cell.call(name)
            layers.append(measure(name, cell, call, mask, right))
        if cell.committed > 512:
            parts += flash_forms(cell.text_alone())
    layers += flex_in_a_child(device)
    what = ", ".join(f"{k} {shape[k]}" for k in ("heads", "kv_heads", "dim", "dtype"))
    about = versions(device) | {"shape": what, "runs": REPEATS[device]}
    print("\n".join(f"{k}: {v}" for k, v in about.items()))
    print("\nOne layer. sdpa is Transformers' own: with a mask it repeats keys and values for their group first.\n")
    print(table(layers))
    print("\nThe part of flash_tree that goes through the flash kernel: the committed keys, seen by every row.\n")
    print(table(parts))
    print(f"\n{time.perf_counter() - began:.0f} s in all")
    if arguments.json:
        arguments.json.write_text(json.dumps({"about": about, "layers": layers, "flash": parts}, indent=1), "utf-8")
    wrong = [r for r in layers + parts if r.get("max_error", 0.0) > BAND[str(shape["dtype"])]]
    for row in wrong:
        print(f"WRONG: {row['backend']}, {row['committed']} committed, {row['rows']} rows: {row['max_error']}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
