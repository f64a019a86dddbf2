"""From token ids to hidden states, and from hidden states to logits."""

from __future__ import annotations

from kvern.kernels.ops import Int32, Ops, Tensor
from kvern.layers.linear import Linear
from kvern.layers.weights import Weights


class Embedding:
    """token ids [T] -> [T, hidden]."""

    def __init__(self, ops: Ops, table: Tensor) -> None:
        self.ops = ops
        self.table = table

    @classmethod
    def load(cls, weights: Weights, name: str, vocab_size: int, hidden_size: int) -> Embedding:
        return cls(weights.ops, weights.load({f"{name}.weight": (vocab_size, hidden_size)}))

    def __call__(self, token_ids: Int32) -> Tensor:
        return self.ops.embedding(self.table, token_ids)

    def as_head(self) -> Linear:
        """The layer that gives logits, when it is tied to this table."""
        return Linear(self.ops, self.ops.pack(self.table, head=True))
