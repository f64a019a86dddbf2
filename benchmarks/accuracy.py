"""How far each way to compute is from the truth: torch in float32 on the dequantised weights of the same file.

    python benchmarks/accuracy.py MODEL [--text FILE] [--tokens N]

Prints a table in Markdown: of the logits over a text the root mean square error relative to the centred logits, how
often the largest is the same, the mean and largest Kullback-Leibler divergence, and the perplexity beside the
reference's.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np

from kvern.kernels.ops import AttentionMetadata, Ops, load_ops
from kvern.models.registry import load_model
from kvern.runner.cache_layout import cache_layout
from kvern.tokenizer import load_tokenizer
from kvern.weights.checkpoint import open_checkpoint
from kvern.weights.config import read_model_config
from kvern.weights.hub import resolve_model

BLOCK = 16
CHUNK = 512  # tokens of a step
FLOAT_TYPES = (0, 1, 30)  # ggml's numbers
WAYS: list[tuple[str, dict[str, Any]]] = [
    ("bf16 activations", {}),
    ("int8 activations", {"activations": "int8"}),
    ("bf16 activations, int8 KV cache", {"kv_dtype": "int8"}),
    ("int8 activations, int8 KV cache", {"activations": "int8", "kv_dtype": "int8"}),
]
FLOAT_WAYS: list[tuple[str, dict[str, Any]]] = [
    ("bf16", {}),
    ("int8 KV cache", {"kv_dtype": "int8"}),
    ("`--quantize int8`", {"quantize": "int8"}),
    ("`--quantize int4`", {"quantize": "int4"}),
    ("`--quantize int4 --activations int8`", {"quantize": "int4", "activations": "int8"}),
]


class Text:
    """The model's logits over a text, computed by whichever ops."""

    def __init__(self, name: str, text: str, most: int) -> None:
        files = resolve_model(name)
        self.config = read_model_config(files)
        self.checkpoint = open_checkpoint(files)
        self.ids = np.array(load_tokenizer(files).encode(text)[:most], dtype=np.int32)

    @property
    def quantised(self) -> bool:
        return any(self.checkpoint.stored(name).type not in FLOAT_TYPES for name in self.checkpoint.names())

    def log_probabilities(self, ops: Ops) -> np.ndarray[Any, Any]:
        """float32 [tokens, vocab]"""
        config, n = self.config, len(self.ids)
        model = load_model(config, self.checkpoint, ops, max_model_len=n)
        layout = cache_layout(config)
        blocks = -(-n // BLOCK)
        caches = ops.allocate_kv_cache(config.num_layers, blocks + 1, BLOCK, config.num_kv_heads, config.head_dim)
        table = np.arange(1, blocks + 1, dtype=np.int32)[None]
        parts = []
        for start in range(0, n, CHUNK):
            positions = np.arange(start, min(start + CHUNK, n))
            count = np.array([len(positions)])
            metadata = AttentionMetadata(
                positions, positions + BLOCK, np.array([0]), count, positions[-1:] + 1, table, BLOCK
            )
            plans = [ops.plan(metadata, group) for group in range(len(layout.groups))]
            hidden = model(self.ids[positions], [plans[group] for group in layout.group_of], caches)
            logits = ops.to_numpy(model.logits(ops.take_rows(hidden, np.arange(len(positions)))))
            parts.append(logits - logits.max(axis=1, keepdims=True))
        logits = np.concatenate(parts)
        return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True, dtype=np.float64)).astype(np.float32)

    def perplexity(self, log_probabilities: np.ndarray[Any, Any]) -> float:
        return float(np.exp(-log_probabilities[np.arange(len(self.ids) - 1), self.ids[1:]].mean(dtype=np.float64)))


def row(name: str, text: Text, truth: np.ndarray[Any, Any], got: np.ndarray[Any, Any]) -> str:
    centred = truth - truth.mean(axis=1, keepdims=True)
    error = (got - got.mean(axis=1, keepdims=True)) - centred
    relative = np.sqrt((error**2).mean() / (centred**2).mean())
    divergence = (np.exp(truth) * (truth - got)).sum(axis=1)
    same = (truth.argmax(axis=1) == got.argmax(axis=1)).mean()
    change = text.perplexity(got) / text.perplexity(truth) - 1
    return (
        f"| {name} | {relative:.1%} | {same:.1%} | {divergence.mean():.4f} | {divergence.max():.3f} "
        f"| {text.perplexity(got):.3f} ({change:+.2%}) |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--text", type=Path, default=Path(__file__).parents[1] / "docs" / "scheduling.md")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    text = Text(args.model, args.text.read_text(), args.tokens)
    truth = text.log_probabilities(load_ops("reference", dtype="float32", threads=args.threads))
    print(f"{args.model}, {len(text.ids)} tokens of {args.text.name}; perplexity {text.perplexity(truth):.3f}\n")
    print("| | relative error | argmax | mean KL | largest KL | perplexity |\n|---|---|---|---|---|---|")
    torch_bf16 = text.log_probabilities(load_ops("reference", dtype="bfloat16", threads=args.threads))
    print(row("torch, bf16", text, truth, torch_bf16), flush=True)
    for name, options in WAYS if text.quantised else FLOAT_WAYS:
        ops = load_ops("native", dtype="bfloat16", threads=args.threads, **options)
        print(row(name, text, truth, text.log_probabilities(ops)), flush=True)


if __name__ == "__main__":
    main()
