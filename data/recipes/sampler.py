"""Answers to many prompts: as many rows at a time as memory holds, and a row that ends takes the next prompt.

Prompts go in token by token through the same step that samples, so there is one shape and, on a GPU, one CUDA graph.
Which row takes which prompt is decided on the device; the host looks only now and then.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from decoders import StaticDecoder
from graphed import captured

LOOK = 32  # steps between two looks at the clock and at what is left


@dataclass(frozen=True)
class Job:
    """A prompt, after the decoder's prefix, and how to answer it."""

    ids: Sequence[int]
    new_tokens: int
    temperature: float = 0.0


class Sampler:
    """Samples with a StaticDecoder. `stop`: the id that ends an answer.

    At T = 0 the arg-max; else softmax(logits / T) by the Gumbel trick, from PyTorch's global generator of the device.
    """

    def __init__(self, decoder: StaticDecoder, stop: int) -> None:
        self.decoder, self.stop = decoder, stop
        rows, device = decoder.rows, decoder.device
        self.job, self.place, self.token = torch.zeros(3, rows, dtype=torch.long, device=device).unbind()
        self.taken = torch.zeros((), dtype=torch.long, device=device)

    @torch.no_grad()
    def run(self, jobs: Sequence[Job], seconds: float = math.inf, name: str = "") -> dict[int, np.ndarray]:
        """Index of a job -> its prompt and answer, the stop token included; jobs that did not end in time are left out.

        Raises:
            ValueError: a job that is empty or has no room in the decoder's length.
        """
        room = self.decoder.length - self.decoder.start
        if any(not 0 < len(j.ids) < len(j.ids) + j.new_tokens <= room for j in jobs):
            raise ValueError(f"a job needs a prompt and a new token, and {room} positions at most: filter the prompts")
        self._load(jobs)
        began, steps = time.time(), 0
        launch = self._captured() if self.decoder.device.type == "cuda" else self._step
        ready = time.time()
        while True:
            for _ in range(LOOK):
                launch()
            steps += LOOK
            busy = int((self.job < len(jobs)).sum())
            if not busy or time.time() - began > seconds:
                break
            if name and steps % (32 * LOOK) == 0:
                print(f"{name}: step {steps}, {time.time() - ready:.0f} s, {busy} rows busy", flush=True)
        length = self.length[: len(jobs)].cpu().numpy()
        text = self.text[: len(jobs)].cpu().numpy()
        found = {int(i): text[i, : length[i]] for i in np.flatnonzero(length)}
        if name:
            new = sum(len(ids) - len(jobs[i].ids) for i, ids in found.items())
            spent = time.time() - ready
            print(
                f"{name}: {len(found)} of {len(jobs)} answers, {new} new tokens in {spent:.1f} s "
                f"({new / spent:.0f} a second, {1e3 * spent / steps:.2f} ms a step)",
                flush=True,
            )
        return found

    def _load(self, jobs: Sequence[Job]) -> None:
        """What the jobs say as tensors, with one more row for rows that have no job left."""
        n, device = len(jobs), self.decoder.device
        prompt = np.array([*(len(j.ids) for j in jobs), 1])
        limit = np.array([*(len(j.ids) + j.new_tokens for j in jobs), 1 << 30])
        text = np.zeros((n + 1, max(int(limit[:-1].max()), 2)), dtype=np.int32)
        for i, job in enumerate(jobs):
            text[i, : prompt[i]] = job.ids
        temperature = np.array([*(j.temperature for j in jobs), 0.0], dtype=np.float32)
        self.prompt, self.limit, self.text, self.temperature = (
            torch.from_numpy(x).to(device) for x in (prompt, limit, text, temperature)
        )
        self.length = torch.zeros(n + 1, dtype=torch.long, device=device)
        self.jobs = n
        self.job.copy_(torch.arange(len(self.job)).clamp(max=n))
        self.place.zero_()
        self.token.copy_(self.text[self.job, 0])
        self.taken.fill_(min(len(self.job), n))

    def _step(self) -> None:
        """Every row: one token in, one out, written into its text; where that ends, the next job begins."""
        logits = self.decoder.step(self.token, self.decoder.start + self.place)  # [rows, vocabulary]
        noise = torch.empty_like(logits).exponential_().clamp_(min=1e-20).log_()
        chosen = (logits - noise * self.temperature[self.job][:, None]).argmax(1)
        place, idle = self.place + 1, self.job == self.jobs
        given = place < self.prompt[self.job]
        token = torch.where(given, self.text[self.job, place.clamp(max=self.text.shape[1] - 1)].long(), chosen)
        self.text[self.job, place] = token.int()
        done = ~given & ~idle & ((token == self.stop) | (place + 1 >= self.limit[self.job]))
        self.length[torch.where(done, self.job, self.jobs)] = place + 1
        new = (self.taken + done.cumsum(0) - 1).clamp(max=self.jobs)
        self.taken += done.sum()
        self.job.copy_(torch.where(done, new, self.job))
        self.place.copy_(torch.where(done | idle, 0, place))
        self.token.copy_(torch.where(done, self.text[self.job, 0].long(), token))

    def _captured(self):  # type: ignore[no-untyped-def]
        """`_step` as a launch of one CUDA graph; what the trial steps changed is put back."""
        changed = (self.job, self.place, self.token, self.taken, self.length)
        before = [x.clone() for x in changed]
        graph, _ = captured(self._step)
        for x, value in zip(changed, before, strict=True):
            x.copy_(value)
        return graph.replay
