"""From options to an executor that computes in this process: find the model, fix the limits, load the weights."""

from __future__ import annotations

import math
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvern.cache.connectors import SchedulerConnector
from kvern.config import EngineConfig, InvalidConfig, ModelConfig, SchedulerConfig
from kvern.executor.backend import Backend, choose_backend, make_ops
from kvern.executor.base import Executor
from kvern.executor.file_connector import FileConnector, FileWorker
from kvern.executor.limits import size_cache, size_text
from kvern.executor.machine import available_memory
from kvern.layers.weights import Progress
from kvern.runner.cache_layout import cache_layout
from kvern.runner.costs import measure_costs
from kvern.runner.disk_store import DiskStore
from kvern.runner.graphs import GraphMode
from kvern.runner.model_runner import ModelRunner
from kvern.speculative.ngram import NgramProposer, Proposer
from kvern.step import ModelRunnerOutput, SchedulerOutput
from kvern.weights.checkpoint import Checkpoint, open_checkpoint
from kvern.weights.config import read_model_config
from kvern.weights.files import ModelFiles
from kvern.weights.hub import resolve_model
from kvern.weights.identity import fingerprint

if TYPE_CHECKING:
    from kvern.models.registry import Model

_BLOCK_FORMS = {"reference": "reference 1", "native": "native 1"}  # how a block's bytes are laid out


class InlineExecutor:
    """Computes steps in the thread that calls it."""

    def __init__(self, runner: ModelRunner, connector: SchedulerConnector | None = None) -> None:
        self._runner: ModelRunner | None = runner
        self._connector = connector

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        if self._runner is None:
            raise RuntimeError("the executor was shut down")
        return self._runner.execute(output)

    def use_idle_time(self) -> bool:
        return self._runner is not None and self._runner.use_idle_time()

    def costs(self) -> tuple[float, float] | None:
        return None if self._runner is None else measure_costs(self._runner)

    def stored_blocks(self) -> list[str]:
        store = self._runner.mover.store if self._runner is not None else None
        return [] if store is None else store.names()

    def start_profile(self) -> Any:
        """Time every operation from now on: a kvern.kernels.cpu.profile.Profile; None if the kernels cannot."""
        if self._runner is None or not self._runner.recorded:
            return None
        return self._runner.ops.start_profile()  # type: ignore[attr-defined]

    def scheduler_connector(self) -> SchedulerConnector | None:
        return self._connector

    def shutdown(self) -> None:
        self._runner = None


def load_executor(
    config: EngineConfig, *, progress: Progress | None = None
) -> tuple[Executor, SchedulerConfig, ModelConfig]:
    """The executor for `config`, the scheduler's limits, and what the model says of itself.

    What cannot work is refused before weights are read. Raises InvalidConfig naming the option to change; a model
    that cannot be found or read is one too (ModelError).
    """
    files = resolve_model(config.model)
    model_config = read_model_config(files)
    if files.kind == "toy":
        return _load_toy(config, model_config)
    checkpoint = open_checkpoint(files)
    backend = choose_backend(config, model_config)
    free = _free_beside_weights(checkpoint, model_config, backend)
    element = backend.kv_element_bytes(model_config.head_dim)
    limits = size_cache(config, model_config, bytes_per_element=element, free_memory=free)

    from kvern.models.registry import load_model

    ops = make_ops(backend, config)
    model = load_model(model_config, checkpoint, ops, max_model_len=limits.max_model_len, progress=progress)
    store = None
    if config.kv_disk is not None:
        store = _open_store("kv_disk", config.kv_disk, files, model, limits, backend)
    graph_mode = GraphMode(config.graph)
    runner = ModelRunner(model, limits, make_proposer(config, limits), store=store, graph_mode=graph_mode)
    connector = None
    if config.kv_connector is not None:
        if len(limits.kv_groups) > 1:
            raise InvalidConfig(f"kv_connector: {model_config.architecture} has several cache groups, file needs one")
        folder = config.kv_connector.removeprefix("file:")
        shared = _open_store("kv_connector", folder, files, model, limits, backend)
        runner.connector = FileWorker(shared, ops, runner.mover.slots)
        connector = FileConnector(shared, limits.block_size)
    return InlineExecutor(runner, connector), limits, model_config


def _load_toy(config: EngineConfig, model_config: ModelConfig) -> tuple[Executor, SchedulerConfig, ModelConfig]:
    from kvern.testing.toy import HistoryHashExecutor

    for option in ("kv_disk", "kv_connector"):
        if getattr(config, option) is not None:
            raise InvalidConfig(f"{option}: {config.model} has no keys and values to keep in files")
    limits = size_cache(config, model_config, bytes_per_element=4, free_memory=available_memory())
    return HistoryHashExecutor(limits, proposer=make_proposer(config, limits)), limits, model_config


def _free_beside_weights(checkpoint: Checkpoint, model: ModelConfig, backend: Backend) -> int:
    """Bytes that will be free once the weights are loaded. Raises InvalidConfig if they cannot be."""
    free = available_memory()
    if backend.kernels == "native":
        # Packed in about the bits they have; rows of the embedding are read from the mapped file.
        need = sum(checkpoint.num_bytes(name) for name in checkpoint.names())
        form, hint = "", ""
    else:
        elements = sum(math.prod(checkpoint.shape(name)) for name in checkpoint.names())
        if model.tie_word_embeddings:
            elements += model.vocab_size * model.hidden_size  # kept twice: to look up rows, and packed for the logits
        need = elements * (4 if backend.dtype == "float32" else 2)
        form = f" in {backend.dtype}"
        hint = "; dtype bfloat16 needs half of that" if backend.dtype == "float32" else ""
    if need > free:
        raise InvalidConfig(f"the weights need {size_text(need)}{form}, {size_text(free)} of memory are free{hint}")
    return free - need


def _open_store(
    option: str, folder: str, files: ModelFiles, model: Model, limits: SchedulerConfig, backend: Backend
) -> DiskStore:
    """Files of blocks of exactly these weights in exactly this form. Raises InvalidConfig naming `option`."""
    form = repr((_BLOCK_FORMS[backend.kernels], backend, limits.block_size, limits.kv_groups, model.config))
    name = sha256((fingerprint(files) + form).encode()).hexdigest()[:32]
    layout = cache_layout(model.config)
    per_token = model.config.kv_bytes_per_token(backend.kv_element_bytes(model.config.head_dim), layout.num_slots)
    try:
        return DiskStore(Path(folder), name, limits.block_size * per_token)
    except OSError as exc:
        raise InvalidConfig(f"{option}: {folder} cannot be used: {exc.strerror}") from None


def make_proposer(config: EngineConfig, limits: SchedulerConfig) -> Proposer | None:
    """Who guesses how a request goes on, if anybody."""
    return NgramProposer(limits.num_speculative_tokens) if config.speculative == "ngram" else None
