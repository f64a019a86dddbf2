"""A tiny random model in memory, and a hand-driven runner: no files, no scheduler."""

import numpy as np

from kvern.config import ModelConfig, SchedulerConfig
from kvern.kernels.ops import AttentionMetadata, StoredTensor, load_ops
from kvern.models.registry import load_model
from kvern.runner.cache_layout import cache_layout
from kvern.runner.graphs import GraphMode
from kvern.runner.model_runner import ModelRunner
from kvern.sampling_params import SamplingParams
from kvern.step import NewBlocks, NewRequest, SchedulerOutput

GREEDY = SamplingParams(temperature=0.0)


def tiny_config(**changes):
    values = {
        "architecture": "llama",
        "vocab_size": 101,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_layers": 2,
        "num_heads": 6,
        "num_kv_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 512,
    }
    return ModelConfig(**(values | changes))


class RandomCheckpoint:
    """Every tensor that `config` names, random; `without` and `extra` change what is there."""

    def __init__(self, config, seed=0):
        q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        hidden, inner = config.hidden_size, config.intermediate_size
        shapes = {"model.embed_tokens.weight": (config.vocab_size, hidden), "model.norm.weight": (hidden,)}
        if not config.tie_word_embeddings:
            shapes["lm_head.weight"] = (config.vocab_size, hidden)
        for i in range(config.num_layers):
            layer = {
                "input_layernorm.weight": (hidden,),
                "post_attention_layernorm.weight": (hidden,),
                "self_attn.q_proj.weight": (q, hidden),
                "self_attn.k_proj.weight": (kv, hidden),
                "self_attn.v_proj.weight": (kv, hidden),
                "self_attn.o_proj.weight": (hidden, q),
                "mlp.gate_proj.weight": (inner, hidden),
                "mlp.up_proj.weight": (inner, hidden),
                "mlp.down_proj.weight": (hidden, inner),
            }
            if config.architecture == "qwen2":
                layer |= {f"self_attn.{x}_proj.bias": (n,) for x, n in (("q", q), ("k", kv), ("v", kv))}
            if config.architecture == "gemma3":
                layer |= {f"{x}_feedforward_layernorm.weight": (hidden,) for x in ("pre", "post")}
            if config.architecture in ("gemma3", "qwen3"):
                layer |= {f"self_attn.{x}_norm.weight": (config.head_dim,) for x in "qk"}
            shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
        rng = np.random.default_rng(seed)
        self.tensors = {
            name: rng.standard_normal(shape, dtype=np.float32) * (1.0 if "norm" in name else 0.3)
            for name, shape in shapes.items()
        }

    def names(self):
        return list(self.tensors)

    def shape(self, name):
        return self.tensors[name].shape

    def stored(self, name):
        return StoredTensor.of(self.tensors[name])


def tiny_model(dtype="float32", threads=2, **changes):
    config = tiny_config(**changes)
    return load_model(config, RandomCheckpoint(config), load_ops(dtype=dtype, threads=threads))


class Recorder:
    """Stands before a sampler and keeps the logits it was given: (row, position) -> [vocab]."""

    largest_only = False

    def __init__(self, sampler):
        self._sampler = sampler
        self.logits = {}

    def sample(self, logits, rows, positions, *, places=None, best=None):
        where = np.arange(len(rows)) if places is None else places
        for place, row, position in zip(where.tolist(), rows.tolist(), positions.tolist(), strict=True):
            self.logits[row, position] = logits[place].copy()
        return self._sampler.sample(logits, rows, positions, places=places, best=best)

    def __getattr__(self, name):
        return getattr(self._sampler, name)


class Driver:
    """A runner told step by step which rows compute how many tokens. Rows hold their blocks until `drop`.

    Each cache group has a pool of num_blocks of its own: block b of the driver is b + group * num_blocks in the cache.
    """

    def __init__(self, model, *, graph_mode=GraphMode.FULL, **limits):
        limits = {"num_blocks": 200, "block_size": 16, "max_model_len": 512, "max_num_seqs": 40} | limits
        groups = cache_layout(model.config).groups
        self.free = list(range(1, limits["num_blocks"]))
        self.pools = [group * limits["num_blocks"] for group in range(len(groups))]
        limits["num_blocks"] *= len(groups)
        self.config = SchedulerConfig(kv_groups=groups, **limits)
        self.runner = ModelRunner(model, self.config, graph_mode=graph_mode)
        self.runner.sampler = self.recorder = Recorder(self.runner.sampler)
        self.rows = {}  # row -> [tokens computed, tokens known, block table]
        self.pending = []
        self.dropped = []
        self.step_id = 0

    @property
    def logits(self):
        return self.recorder.logits

    def add(self, row, prompt, sampling=GREEDY, *, output=(), computed=0, blocks=()):
        """A request enters `row`, with `computed` tokens in `blocks` of somebody else."""
        tokens = np.array([*prompt, *output], dtype=np.int32)
        self.pending.append((row, tokens, len(prompt), sampling))
        self.rows[row] = [computed, len(tokens), list(blocks)]

    def drop(self, row, free=True):
        _, _, table = self.rows.pop(row)
        if free:
            self.free = table + self.free  # reused at once
        self.dropped.append(row)

    def step(self, amounts, **changes):
        """amounts: {row: tokens}; a row samples when that brings it up to what is known. Returns the result."""
        new_requests, rows, index, blocks = [], [], [], []
        fresh = {row: (tokens, prompt, sampling) for row, tokens, prompt, sampling in self.pending}
        self.pending = []
        samples, computed = [], []
        for row, amount in amounts.items():
            state = self.rows[row]
            start, end = state[0], state[0] + amount
            computed.append(start)
            grown = -(-end // self.config.block_size) - len(state[2])
            for _ in range(max(grown, 0)):
                if row not in fresh:
                    rows.append(row), index.append(len(state[2])), blocks.append(self.free[0])
                state[2].append(self.free.pop(0))
            if row in fresh:
                tokens, prompt, sampling = fresh[row]
                tables = [[block + pool for block in state[2]] for pool in self.pools]
                new_requests.append(NewRequest(str(row), row, tokens, prompt, sampling, tables, start))
            samples.append(end == state[1])
            state[0] = end
            state[1] += end == state[1]
        as_int = lambda values: np.array(values, dtype=np.int32)  # noqa: E731
        output = SchedulerOutput(
            step_id=self.step_id,
            rows=as_int(list(amounts)),
            epochs=np.zeros(len(amounts), dtype=np.int64),
            request_ids=[str(row) for row in amounts],
            num_computed=as_int(computed),
            num_new=as_int(list(amounts.values())),
            samples=np.array(samples, dtype=bool),
            total_num_scheduled_tokens=sum(amounts.values()),
            new_requests=new_requests,
            new_blocks=NewBlocks(
                as_int(rows), as_int(index), as_int([[b + pool for b in blocks] for pool in self.pools])
            ),
            **({"finished_rows": self.dropped} | changes),
        )
        self.dropped = []
        self.step_id += 1
        return self.runner.execute(output)

    def run(self, row, tokens, chunk=10**6):
        """Alone, until `tokens` tokens are sampled; prompt in chunks. Returns them."""
        sampled = []
        while len(sampled) < tokens:
            computed, known, _ = self.rows[row]
            result = self.step({row: min(chunk, known - computed)})
            assert not result.errors
            sampled += result.token_ids[0, : result.count[0]].tolist()
        return sampled


def all_logits(model, token_ids):
    """Logits [T, vocab] of every position of a sequence, computed in one go in a cache of its own."""
    length = np.array([len(token_ids)])
    positions = np.arange(len(token_ids))
    blocks = -(-len(token_ids) // 16)
    table = np.arange(1, blocks + 1, dtype=np.int32)
    metadata = AttentionMetadata(positions, positions + 16, length * 0, length, length, table[None], 16)
    config, ops = model.config, model.ops
    caches = ops.allocate_kv_cache(config.num_layers, blocks + 1, 16, config.num_kv_heads, config.head_dim)
    plans = [ops.plan(metadata)] * config.num_layers
    hidden = model(np.array(token_ids, dtype=np.int32), plans, caches)
    return ops.to_numpy(model.logits(hidden))
