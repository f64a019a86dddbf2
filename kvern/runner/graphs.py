"""Capture once, then replay: a model call without its Python.

A `GraphRunner` stands where the model's call would. For a `BatchDescriptor` that it has not seen it lets the backend
capture the call; from then on it only sets the step's inputs and replays. The model does not know. All graphs of a
backend share one memory pool, which is safe as one replays at a time; a replay returns the tensor that the capture
returned, so its content is valid until the next replay of that graph.

What a graph can be reused for is the backend's to say (`key`): where every size that changes is read from the step, as
the CPU's tapes do, one graph serves all batches; where sizes are baked in, as in CUDA graphs, each padded shape has its
own.

Modes: NONE runs the call as it stands. FULL captures all of it. PIECEWISE leaves attention outside: the pieces between
are replayed, attention is called in between.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from enum import Enum
from typing import Any, Literal, NamedTuple, Protocol

from kvern.kernels.ops import Int32, Int64, Ops, Tensor

IntArray = Int32 | Int64


class GraphMode(Enum):
    NONE = "none"
    PIECEWISE = "piecewise"
    FULL = "full"


class BatchDescriptor(NamedTuple):
    """What of a batch may decide which graph serves it. uniform_decode: all rows have the same number of tokens."""

    num_tokens: int
    num_reqs: int
    uniform_decode: bool = False
    has_lora: bool = False


class Graph(Protocol):
    """A captured call."""


class GraphBackend(Protocol):
    def key(self, descriptor: BatchDescriptor) -> Hashable: ...

    def capture(self, call: Callable[[], Tensor], *, pieces: bool) -> Graph:
        """Record what `call` computes, without computing it. pieces: leave attention outside."""
        ...

    def replay(self, graph: Graph, inputs: IntArray) -> Tensor:
        """The captured call's result for other inputs of the same meaning, and the step's plans as they are now."""
        ...


class TapeBackend:
    """The CPU's: see kvern.kernels.cpu.tape. Every size is read from the step, so one tape serves every batch.

    inputs: what of the step the captured calls take, as NativeOps.set_inputs names it.
    """

    def __init__(self, ops: Any, inputs: Literal["token_ids", "rows"]) -> None:
        self._ops = ops
        self._inputs = inputs

    def key(self, descriptor: BatchDescriptor) -> Hashable:
        return None

    def capture(self, call: Callable[[], Tensor], *, pieces: bool) -> Graph:
        graph: Graph = self._ops.capture(call, pieces=pieces)
        return graph

    def replay(self, graph: Graph, inputs: IntArray) -> Tensor:
        self._ops.set_inputs(**{self._inputs: inputs})
        return self._ops.replay(graph)


def graph_backend(ops: Ops, inputs: Literal["token_ids", "rows"]) -> GraphBackend | None:
    """The backend for these ops, if they can be captured."""
    return TapeBackend(ops, inputs) if hasattr(ops, "capture") else None


class GraphRunner:
    """Runs a call eagerly or by graphs. Without a backend, or in mode NONE, always eagerly. One runner serves one call,
    with whatever inputs."""

    def __init__(self, backend: GraphBackend | None, mode: GraphMode) -> None:
        self.backend = backend if mode is not GraphMode.NONE else None
        self.mode = mode
        self.graphs: dict[Hashable, Graph] = {}

    def __call__(self, descriptor: BatchDescriptor, call: Callable[[Any], Tensor], inputs: IntArray) -> Tensor:
        """What `call(inputs)` returns; the step's plans have been made."""
        if self.backend is None:
            return call(inputs)
        key = self.backend.key(descriptor)
        graph = self.graphs.get(key)
        if graph is None:
            pieces = self.mode is GraphMode.PIECEWISE
            graph = self.graphs[key] = self.backend.capture(lambda: call(inputs), pieces=pieces)
        return self.backend.replay(graph, inputs)
