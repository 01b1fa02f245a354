"""CUDA graphs, because small layers are slow to launch: of any work, and of a training step's loss and gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


def captured(run: Callable[[], Any], pool: Any = None) -> tuple[torch.cuda.CUDAGraph, Any]:
    """A graph of what run launches, and what it gave: buffers that every replay fills. run is called three times."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # what is done once: kernels that are compiled, workspaces
        for _ in range(2):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        given = run()
    return graph, given


class _Capture(NamedTuple):
    graph: torch.cuda.CUDAGraph
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    gradients: tuple[Tensor | None, ...]


class LossAndGradients:
    """function(*inputs) -> tensors, the first a loss; a call puts its gradients into `grad` of the model's parameters.

    On a GPU it is captured for every shape of the inputs. Outputs and gradients then lie in buffers that the next call
    of the same shapes overwrites; function must launch the same whatever its inputs hold, and wait for nothing that the
    device computes.
    """

    def __init__(self, model: nn.Module, function: Callable[..., tuple[Tensor, ...]]) -> None:
        self.function = function
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.captures: dict[tuple[torch.Size, ...], _Capture] = {}
        self.pool: Any = None

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        if not inputs[0].is_cuda:
            outputs, gradients = self._compute(*inputs)
        else:
            shapes = tuple(x.shape for x in inputs)
            if shapes not in self.captures:
                self.captures[shapes] = self._capture(*inputs)
            graph, static, outputs, gradients = self.captures[shapes]
            for kept, new in zip(static, inputs, strict=True):
                kept.copy_(new)
            graph.replay()
        for p, gradient in zip(self.parameters, gradients, strict=True):
            p.grad = gradient
        return outputs

    def _compute(self, *inputs: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor | None, ...]]:
        outputs = self.function(*inputs)
        gradients = torch.autograd.grad(outputs[0], self.parameters, allow_unused=True)
        return tuple(x.detach() for x in outputs), gradients

    def _capture(self, *inputs: Tensor) -> _Capture:
        static = tuple(x.clone() for x in inputs)
        graph, (outputs, gradients) = captured(lambda: self._compute(*static), self.pool)
        self.pool = self.pool or graph.pool()
        return _Capture(graph, static, outputs, gradients)
