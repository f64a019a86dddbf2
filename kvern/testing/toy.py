"""The history-hash toy model: an executor without weights whose tokens betray any mistake in the cache.

Its "keys and values" are the token ids and positions themselves, written into the slots that the block tables name.
The next token is a fixed hash of all ids and positions read back through the row's own block table. So a wrong block,
position, copy or stale token changes the text, and a request alone, in company, in chunks, cached, preempted or forked
must give exactly the same one.

Greedy requests get the hashed token itself; anything else goes through the real sampler, on made-up logits in which
the hashed token is the likeliest.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvern.cache.block_pool import NULL_BLOCK
from kvern.cache.groups import make_group
from kvern.config import ModelConfig, SchedulerConfig
from kvern.sampling_params import SamplingParams
from kvern.step import Int32, ModelRunnerOutput, SchedulerOutput, TokenLogprobs

if TYPE_CHECKING:
    from kvern.sampling.sampler import Sampler
    from kvern.speculative.ngram import Proposer

VOCAB_SIZE = 259  # the byte tokenizer's: 3 special ids, then one id per byte
EOS_TOKEN_ID = 2
_FIRST_PRINTABLE, _NUM_PRINTABLE = 3 + 0x20, 95

TOY_MODEL = ModelConfig(
    architecture="history-hash",
    vocab_size=VOCAB_SIZE,
    hidden_size=1,
    intermediate_size=1,
    num_layers=1,
    num_heads=1,
    num_kv_heads=1,
    head_dim=1,
    max_position_embeddings=4096,
    eos_token_ids=(EOS_TOKEN_ID,),
)


def history_hash(history: NDArray[np.int64]) -> int:
    """64 bits of everything a token depends on. history: int64, id + position * 2**32 of each token, in order."""
    return int.from_bytes(blake2b(history.astype("<i8").tobytes(), digest_size=8).digest(), "little")


def next_token(history: NDArray[np.int64]) -> int:
    """The greedy token after `history`: printable ASCII, so that toy text can be read."""
    return _FIRST_PRINTABLE + history_hash(history) % _NUM_PRINTABLE


def toy_logits(history: NDArray[np.int64], vocab_size: int = VOCAB_SIZE) -> NDArray[np.float32]:
    """Made-up logits [vocab_size] whose argmax is next_token(history)."""
    noise = np.random.Generator(np.random.Philox(key=history_hash(history))).standard_normal(vocab_size)
    logits = noise.astype(np.float32)
    logits[next_token(history)] = logits.max() + 1.0
    return logits


def next_state(state: int, token: int, position: int) -> int:
    """What a group with a state (kvern.cache.groups.mamba) has after a token; 0 is the state before the first."""
    return history_hash(np.array([state, token + (position << 32)], dtype=np.int64)) >> 1


def reference_tokens(prompt: list[int], num_tokens: int) -> list[int]:
    """What the toy model says after `prompt`, computed without any cache: the oracle."""
    ids = list(prompt)
    for _ in range(num_tokens):
        history = np.asarray(ids, dtype=np.int64) + (np.arange(len(ids), dtype=np.int64) << 32)
        ids.append(next_token(history))
    return ids[len(prompt) :]


@dataclass(slots=True)
class _Row:
    tokens: list[int]
    num_prompt_tokens: int
    tables: list[list[int]]
    sampling: SamplingParams
    plain: bool  # greedy, and nothing else asked


class HistoryHashExecutor:
    """Computes steps of the toy model, from SchedulerOutputs alone."""

    def __init__(self, config: SchedulerConfig, vocab_size: int = VOCAB_SIZE, proposer: Proposer | None = None) -> None:
        self.block_size = config.tokens_per_block
        self.vocab_size = vocab_size
        self._eos = config.eos_token_ids
        shape = (config.num_blocks, self.block_size)
        self.kv: NDArray[np.int64] = np.full(shape, -1, dtype=np.int64)
        self.host_kv: NDArray[np.int64] = np.full((config.host_blocks + 1, self.block_size), -1, dtype=np.int64)
        self.disk: dict[str, NDArray[np.int64]] = {}
        self._groups = [make_group(spec, self.block_size) for spec in config.kv_groups]
        self._rows: dict[int, _Row] = {}
        self._sampler: Sampler | None = None
        self._proposer = proposer

    def execute(self, output: SchedulerOutput, forced: dict[int, list[int]] | None = None) -> ModelRunnerOutput:
        """`forced`: row -> tokens to deliver in place of the model's, for tests that script a run."""
        self._apply(output)
        for load in output.connector_metadata or []:
            for table in load["tables"]:
                self._store(table, load["start"], load["token_ids"], strict=False)
        starts = [self._start(output, i, row) for i, row in enumerate(output.rows.tolist())]
        for row, start, n in zip(output.rows.tolist(), starts, output.num_new.tolist(), strict=True):
            self._write(row, start, n, output.draft_tokens.get(row, []))
        result = ModelRunnerOutput.of([])
        tokens: list[list[int]] = []
        ends = np.array(starts, dtype=np.int32) + output.num_new
        for i, row in enumerate(output.rows.tolist()):
            self._prompt_logprobs(row, starts[i], int(ends[i]), result)
            if forced is not None and row in forced:
                chosen = list(forced[row])
                if self._sampler is not None and not self._rows[row].plain:
                    for token in chosen:
                        self._sampler.append(_one(row), _one(token))
            elif output.samples[i]:
                chosen = self._sample(row, int(ends[i]), output.draft_tokens.get(row, []), result)
            else:
                chosen = []
            self._rows[row].tokens += chosen
            if self._proposer is not None and chosen:
                result.drafts[row] = self._proposer.propose(np.array(self._rows[row].tokens, dtype=np.int32))
            tokens.append(chosen)
        filled = ModelRunnerOutput.of(tokens)
        result.token_ids, result.count = filled.token_ids, filled.count
        return result

    def use_idle_time(self) -> bool:
        return False

    def costs(self) -> None:
        """Nothing here takes time worth measuring."""

    def stored_blocks(self) -> list[str]:
        return []

    def scheduler_connector(self) -> None:
        return None

    def shutdown(self) -> None:
        pass

    def _apply(self, output: SchedulerOutput) -> None:
        for row in [*output.finished_rows, *output.preempted_rows]:
            gone = self._rows.pop(row, None)
            if gone is not None and not gone.plain and self._sampler is not None:
                self._sampler.remove_row(row)
        for tier, block, name in output.blocks_to_disk:
            self.disk[name] = (self.host_kv if tier == "host" else self.kv)[block].copy()
        _move(self.kv, self.host_kv, output.blocks_to_swap_out)
        _move(self.kv, self.kv, output.blocks_to_copy)
        for name, block in output.blocks_from_disk:
            self.kv[block] = self.disk[name]
        _move(self.host_kv, self.kv, output.blocks_to_swap_in)
        for name in output.deleted_from_disk:
            del self.disk[name]
        for new in output.new_requests:
            plain = _is_plain(new.sampling)
            tokens = new.token_ids.tolist()
            tables = [list(table) for table in new.tables]
            self._rows[new.row] = _Row(tokens, new.num_prompt_tokens, tables, new.sampling, plain)
            if not plain:
                self._the_sampler().add_row(new.row, new.sampling, new.token_ids, new.num_prompt_tokens)
        blocks = output.new_blocks
        for row, index, *column in zip(
            blocks.rows.tolist(), blocks.index.tolist(), *blocks.blocks.tolist(), strict=True
        ):
            for table, block in zip(self._rows[row].tables, column, strict=True):
                assert index <= len(table), f"row {row}: block {block} leaves a gap after place {len(table)}"
                table[index : index + 1] = [block]

    def _start(self, output: SchedulerOutput, i: int, row: int) -> int:
        """The first position to compute: as planned, less the drafts that were rejected since."""
        start = int(output.num_computed[i])
        end = start + int(output.num_new[i]) - len(output.draft_tokens.get(row, []))
        return start - max(end - len(self._rows[row].tokens), 0)

    def _write(self, row: int, start: int, n: int, drafts: list[int]) -> None:
        state = self._rows[row]
        ids = (state.tokens + drafts)[start : start + n]
        assert len(ids) == n, f"row {row}: {n} tokens from position {start} are to be computed, {len(ids)} are known"
        for group, table in zip(self._groups, state.tables, strict=True):
            if group.recurrent:
                self._scan(table, start, ids)
            else:
                self._store(table, start, ids)

    def _store(self, table: list[int], start: int, ids: list[int], strict: bool = True) -> None:
        """`strict`: every position has a block of its own to go to."""
        for position, token in enumerate(ids, start):
            block = table[position // self.block_size]
            assert block != NULL_BLOCK or not strict, f"position {position} would be written to the null block"
            self.kv[block, position % self.block_size] = token + (position << 32)

    def _scan(self, table: list[int], start: int, ids: list[int]) -> None:
        state = int(self.kv[table[(start - 1) // self.block_size], 0]) if start else 0
        for position, token in enumerate(ids, start):
            block = table[position // self.block_size]
            assert block != NULL_BLOCK, f"the state after position {position} would be written to the null block"
            self.kv[block, 0] = state = next_state(state, token, position)

    def _history(self, row: int, length: int) -> NDArray[np.int64]:
        """What token `length` - 1 reads, group after group, as far as each of them reaches back."""
        parts = []
        for group, table in zip(self._groups, self._rows[row].tables, strict=True):
            if group.recurrent:
                parts.append(self.kv[table[(length - 1) // self.block_size], :1])
                continue
            first = group.first_needed(length - 1)
            read = self.kv[table[first : -(-length // self.block_size)]].reshape(-1)
            parts.append(read[: length - first * self.block_size])
        return np.concatenate(parts)

    def _sample(self, row: int, end: int, drafts: list[int], result: ModelRunnerOutput) -> list[int]:
        """The tokens after position end - 1 - drafts: drafts as long as the model agrees, then one of its own."""
        first = end - len(drafts)
        if not self._rows[row].plain:
            return self._sample_as_asked(row, first, drafts, result)
        chosen: list[int] = []
        for k in range(len(drafts) + 1):
            chosen.append(next_token(self._history(row, first + k)))
            if k < len(drafts) and chosen[-1] != drafts[k]:
                break
        return chosen

    def _sample_as_asked(self, row: int, first: int, drafts: list[int], result: ModelRunnerOutput) -> list[int]:
        from kvern.speculative.verify import sample_and_verify

        lengths = range(first, first + len(drafts) + 1)
        logits = np.stack([toy_logits(self._history(row, n), self.vocab_size) for n in lengths])
        proposed = {row: drafts} if drafts else {}
        verified = sample_and_verify(self._the_sampler(), logits, _one(row), _one(first), proposed)
        result.errors.update(verified.errors)
        result.logprobs.update(verified.logprobs)
        tokens: list[int] = verified.token_ids[0, : verified.count[0]].tolist()
        return tokens

    def _prompt_logprobs(self, row: int, start: int, end: int, result: ModelRunnerOutput) -> None:
        """Logprobs of the prompt tokens that follow positions start .. end - 1."""
        state = self._rows[row]
        count = state.sampling.prompt_logprobs
        if count is None or start + 1 >= state.num_prompt_tokens:
            return
        entries: list[TokenLogprobs] = []
        for position in range(start + 1, min(end + 1, state.num_prompt_tokens)):
            logits = toy_logits(self._history(row, position), self.vocab_size)
            entries.append(self._the_sampler().token_logprobs(logits, state.tokens[position], count))
        result.prompt_logprobs[row] = (start + 1, entries)

    def _the_sampler(self) -> Sampler:
        if self._sampler is None:
            from kvern.sampling.sampler import Sampler

            self._sampler = Sampler(self.vocab_size, self._eos)
        return self._sampler


def _move(source: NDArray[np.int64], destination: NDArray[np.int64], moves: list[tuple[int, int]]) -> None:
    if moves:
        from_blocks, to_blocks = (list(side) for side in zip(*moves, strict=True))
        destination[to_blocks] = source[from_blocks]


def _one(value: int) -> Int32:
    return np.array([value], dtype=np.int32)


def _is_plain(sampling: SamplingParams) -> bool:
    """Greedy, and nothing that could make the result differ from the argmax."""
    return (
        sampling.greedy
        and sampling.logprobs is None
        and sampling.prompt_logprobs is None
        and not sampling.logit_bias
        and sampling.min_tokens == 0
        and sampling.presence_penalty == sampling.frequency_penalty == 0.0
        and sampling.repetition_penalty == 1.0
    )
