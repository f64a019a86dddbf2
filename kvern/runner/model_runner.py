"""How a step is computed: SchedulerOutput in, ModelRunnerOutput out.

Order of side effects in `execute`, as kvern.step fixes it:
  1. rows that ended or were preempted are forgotten by the sampler;
  2. blocks are moved: see kvern.runner.block_moves;
  3. new requests fill their rows, new blocks are appended;
  4. the model writes keys and values of the step's tokens, layer by layer;
  5. sampled tokens, accepted drafts among them, are appended to their rows: the next step reads them from there;
  6. drafts are proposed for the rows that got tokens.
The runner owns the cache's memory, the rows and the sampler's state; the scheduler owns which block is whose.
A row whose logits are not finite fails alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvern.cache.connectors import WorkerConnector
from kvern.config import SchedulerConfig
from kvern.kernels.ops import AttentionMetadata, Int32, Int64, KVCache, Tensor
from kvern.models.registry import Model
from kvern.runner.block_moves import BlockMover
from kvern.runner.cache_layout import cache_layout
from kvern.runner.disk_store import DiskStore
from kvern.runner.graphs import BatchDescriptor, GraphMode, GraphRunner, graph_backend
from kvern.runner.input_batch import InputBatch, StepInputs
from kvern.sampling.native import make_sampler
from kvern.speculative.ngram import Proposer
from kvern.speculative.verify import count_drafts, sample_and_verify
from kvern.step import ModelRunnerOutput, NewRequest, SchedulerOutput, TokenLogprobs

_LOGITS_ROWS = 256  # rows of logits computed at a time: bounds their memory, [rows, vocab] float32


class _PromptLogprobs(NamedTuple):
    """A row whose request wants logprobs of its prompt. top: alternatives per token."""

    num_prompt_tokens: int
    top: int


class ModelRunner:
    """Runs `model` for rows and a cache of the size that `config` names."""

    def __init__(
        self,
        model: Model,
        config: SchedulerConfig,
        proposer: Proposer | None = None,
        store: DiskStore | None = None,
        graph_mode: GraphMode = GraphMode.FULL,
    ) -> None:
        self.model = model
        self.proposer = proposer
        self.connector: WorkerConnector | None = None  # set by whoever has one
        self.ops = model.ops
        self.config = config
        shape = model.config
        self.layout = cache_layout(shape)
        if config.kv_groups != self.layout.groups:
            raise ValueError(f"the model's cache groups are {self.layout.groups}, not {config.kv_groups}")
        self.ops.reserve(config.max_num_batched_tokens, _LOGITS_ROWS)
        self._hidden_graphs = GraphRunner(graph_backend(self.ops, "token_ids"), graph_mode)
        self._logits_graphs = GraphRunner(graph_backend(self.ops, "rows"), graph_mode)
        slots = self._allocate(config.num_blocks)
        host_slots = self._allocate(config.host_blocks + 1) if config.host_blocks else []
        self.mover = BlockMover(self.ops, slots, host_slots, store)
        self.caches = [slots[slot] for slot in self.layout.slot_of]  # of each layer
        self.batch = batch = InputBatch(config)
        self._populating = self.ops.populate(slots, lambda: batch.num_blocks_used)
        self.sampler = make_sampler(self.ops, shape.vocab_size, config.eos_token_ids)
        self._prompt_logprobs: dict[int, _PromptLogprobs] = {}

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """Apply `output` and compute its rows. See kvern.step for both."""
        lost = self._apply(output)
        if self.connector is not None and output.connector_metadata is not None:
            self.connector.start_load(output.connector_metadata)
        if output.empty:
            result = ModelRunnerOutput.nothing()
            result.lost = lost
            self._report_transfers(result)
            return result
        inputs = self.batch.prepare(output)
        hidden = self.compute(inputs.token_ids, inputs.metadata)
        n = len(output.rows)
        result = ModelRunnerOutput(np.zeros((n, 1), dtype=np.int32), np.zeros(n, dtype=np.int32), lost=lost)
        if self._prompt_logprobs:
            self._score_prompts(output, inputs, hidden, result)
        self._sample(output, inputs, hidden, result)
        self._report_transfers(result)
        return result

    def use_idle_time(self) -> bool:
        """Do a little of what makes later steps faster; False if there is nothing to do until the next one."""
        return next(self._populating, False)

    @property
    def recorded(self) -> bool:
        """Whether the model's calls are replays."""
        return self._hidden_graphs.backend is not None

    def _report_transfers(self, result: ModelRunnerOutput) -> None:
        if self.connector is not None:
            result.kv_arrived, result.kv_failed, result.kv_sent = self.connector.transferred()

    def compute(self, token_ids: Int32, metadata: Sequence[AttentionMetadata]) -> Tensor:
        """Hidden states [T, hidden] of these tokens; writes their keys and values. metadata: one per cache group."""
        plans = [self.ops.plan(m, group) for group, m in enumerate(metadata)]
        of_layer = [plans[group] for group in self.layout.group_of]
        return self._hidden_graphs(
            BatchDescriptor(len(token_ids), len(metadata[0].q_len)),
            lambda tokens: self.model(tokens, of_layer, self.caches),
            token_ids,
        )

    def _allocate(self, num_blocks: int) -> list[KVCache]:
        """One cache per slot of the layout."""
        config, shape = self.config, self.model.config
        return self.ops.allocate_kv_cache(
            self.layout.num_slots, num_blocks, config.block_size, shape.num_kv_heads, shape.head_dim
        )

    def _apply(self, output: SchedulerOutput) -> list[tuple[str, int]]:
        """Returns what could not be read from disk."""
        for row in (*output.finished_rows, *output.preempted_rows):
            self.sampler.remove_row(row)
            self._prompt_logprobs.pop(row, None)
        lost = self.mover.apply(output)
        self.batch.apply(output)
        for new in output.new_requests:
            self._add(new)
        return lost

    def _add(self, new: NewRequest) -> None:
        self.sampler.add_row(new.row, new.sampling, new.token_ids, new.num_prompt_tokens)
        # A request that comes back with output has had its whole prompt computed, and scored, before.
        if new.sampling.prompt_logprobs is not None and len(new.token_ids) == new.num_prompt_tokens:
            self._prompt_logprobs[new.row] = _PromptLogprobs(new.num_prompt_tokens, new.sampling.prompt_logprobs)

    def _logits(self, hidden: Tensor, tokens: Int64, *, largest_only: bool = False) -> Tensor:
        """[n, vocab] for so many of the step's tokens. largest_only: for ops.argmax alone to read."""
        self.ops.largest_only = largest_only
        return self._logits_graphs(
            BatchDescriptor(len(tokens), len(tokens)),
            lambda rows: self.model.logits(self.ops.take_rows(hidden, rows)),
            tokens,
        )

    def _sample(self, output: SchedulerOutput, inputs: StepInputs, hidden: Tensor, result: ModelRunnerOutput) -> None:
        """Sample where `output.samples` says so, against the drafts if there are any; append to the rows, and put into
        `result`."""
        drafts = output.draft_tokens
        if not drafts and not result.errors and self.proposer is None:
            return self._sample_one_each(output, inputs, hidden, result)
        most = max(map(len, drafts.values()), default=0)
        result.token_ids = np.zeros((len(output.rows), 1 + most), dtype=np.int32)
        sampled = np.flatnonzero(output.samples)
        if result.errors:
            sampled = sampled[[row not in result.errors for row in output.rows[sampled].tolist()]]
        size = max(1, _LOGITS_ROWS // (1 + most))
        for start in range(0, len(sampled), size):
            index = sampled[start : start + size]
            rows: Int32 = output.rows[index]
            num_drafts = count_drafts(drafts, rows)
            positions: Int32 = output.num_computed[index] + output.num_new[index] - num_drafts
            ends = np.cumsum(num_drafts + 1)  # of each row among the logits
            places = np.arange(ends[-1]) + np.repeat(inputs.last[index] + 1 - ends, num_drafts + 1)
            logits = self._logits(hidden, places)
            best = self.ops.argmax(logits)
            verified = sample_and_verify(self.sampler, self.ops.to_numpy(logits), rows, positions, drafts, best)
            result.errors.update(verified.errors)
            result.logprobs.update(verified.logprobs)
            result.token_ids[index, : verified.token_ids.shape[1]] = verified.token_ids
            result.count[index] = verified.count
            i, column = (np.arange(1 + most) < verified.count[:, None]).nonzero()
            self.batch.append(rows[i], positions[i] + column, verified.token_ids[i, column])
            if self.proposer is not None:
                self._propose(rows, positions + verified.count, verified.count, result)
        return None

    def _sample_one_each(
        self, output: SchedulerOutput, inputs: StepInputs, hidden: Tensor, result: ModelRunnerOutput
    ) -> None:
        """The same without drafts, as most steps are: one token each."""
        index, last = None, inputs.last
        if not output.samples.all():
            index = output.samples.nonzero()[0]
            last = last[index]
        for start in range(0, len(last), _LOGITS_ROWS):
            part = slice(start, start + _LOGITS_ROWS) if index is None else index[start : start + _LOGITS_ROWS]
            rows: Int32 = output.rows[part]
            positions: Int32 = output.num_computed[part] + output.num_new[part]
            logits = self._logits(hidden, last[start : start + _LOGITS_ROWS], largest_only=self.sampler.largest_only)
            best = self.ops.argmax(logits)
            sampled = self.sampler.sample(self.ops.to_numpy(logits), rows, positions, best=best)
            tokens = sampled.token_ids
            result.token_ids[part, 0] = tokens
            result.count[part] = 1
            if sampled.errors:
                result.errors.update(sampled.errors)
                good = np.array([row not in sampled.errors for row in rows.tolist()])
                result.count[part] = good
                rows, positions, tokens = rows[good], positions[good], tokens[good]
            for row, entry in sampled.logprobs.items():
                result.logprobs[row] = [entry]
            self.batch.append(rows, positions, tokens)
            self.sampler.append(rows, tokens)

    def _propose(self, rows: Int32, known: Int32, count: Int32, result: ModelRunnerOutput) -> None:
        """Drafts for the rows that got tokens; they have `known` of them now."""
        assert self.proposer is not None
        for i in count.nonzero()[0].tolist():
            row = int(rows[i])
            tokens = self.proposer.propose(self.batch.token_ids[row, : known[i]])
            if tokens:
                result.drafts[row] = tokens

    def _score_prompts(
        self, output: SchedulerOutput, inputs: StepInputs, hidden: Tensor, result: ModelRunnerOutput
    ) -> None:
        """Logprobs of the prompt tokens that follow a position computed in this step, for rows that want them."""
        for i, row in enumerate(output.rows.tolist()):
            wanted = self._prompt_logprobs.get(row)
            if wanted is None:
                continue
            first = int(output.num_computed[i])
            end = min(first + int(output.num_new[i]), wanted.num_prompt_tokens - 1)
            if end == wanted.num_prompt_tokens - 1:
                del self._prompt_logprobs[row]  # this is the last of it
            if first >= end:
                continue
            entries: list[TokenLogprobs] = []
            for start in range(first, end, _LOGITS_ROWS):
                positions = np.arange(start, min(start + _LOGITS_ROWS, end))
                places = inputs.metadata[0].q_start[i] + positions - first
                logits = self.ops.to_numpy(self._logits(hidden, places))
                if not np.isfinite(logits.max(axis=1)).all():
                    result.errors[row] = "the model's logits over the prompt are not finite"
                    break
                targets = self.batch.token_ids[row, positions + 1].tolist()
                entries += [
                    self.sampler.token_logprobs(line, token, wanted.top)
                    for line, token in zip(logits, targets, strict=True)
                ]
            else:
                result.prompt_logprobs[row] = (first + 1, entries)
