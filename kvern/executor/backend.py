"""Which kernels compute a model, and in what: decided from the options, the model and what is installed here."""

from __future__ import annotations

import logging
import os
from typing import Literal, NamedTuple

from kvern.config import EngineConfig, InvalidConfig, ModelConfig
from kvern.executor.machine import usable_cores
from kvern.kernels.cpu import abi
from kvern.kernels.ops import DType, Ops, load_ops

logger = logging.getLogger(__name__)

_BYTES: dict[str, int] = {"float32": 4, "bfloat16": 2}


class Backend(NamedTuple):
    """dtype: of activations, and of the weights where kernels are "reference"; native ones keep weights in their bits.
    kv_dtype: of the KV cache."""

    kernels: Literal["native", "reference"]
    dtype: DType
    kv_dtype: Literal["float32", "bfloat16", "int8"]

    def kv_element_bytes(self, head_dim: int) -> float:
        """Bytes of the cache per element; int8 has a float32 scale for each key and each value of a head."""
        return 1 + 4 / head_dim if self.kv_dtype == "int8" else float(_BYTES[self.kv_dtype])


def choose_backend(config: EngineConfig, model: ModelConfig) -> Backend:
    """Raises InvalidConfig naming the option that rules out what was asked for."""
    obstacle = _obstacle(config, model)
    if config.kernels == "native" and obstacle is not None:
        raise InvalidConfig(f"kernels native: {obstacle}")
    if config.kernels == "reference" or obstacle is not None:
        if config.kernels == "auto" and config.dtype != "float32":
            logger.warning("using the slow reference kernels: %s", obstacle)
        return _reference(config)
    kv_dtype: Literal["bfloat16", "int8"] = "int8" if config.kv_cache_dtype == "int8" else "bfloat16"
    if config.kv_cache_dtype == "float32":
        raise InvalidConfig("kv_cache_dtype float32: native kernels keep bfloat16 or int8; set kernels reference")
    return Backend("native", "bfloat16", kv_dtype)


def _obstacle(config: EngineConfig, model: ModelConfig) -> str | None:
    """Why the native kernels cannot do it, if they cannot."""
    if config.dtype == "float32":
        return "dtype float32 is computed by the reference kernels only"
    if model.head_dim % abi.PAGE or model.head_dim > abi.MOST_HEAD_DIM:
        sizes = f"a multiple of {abi.PAGE} up to {abi.MOST_HEAD_DIM}"
        return f"the model's head dimension is {model.head_dim}, they need {sizes}"
    if config.block_size % abi.PAGE:
        return f"block_size is {config.block_size}, they need a multiple of {abi.PAGE}"
    from kvern.kernels.cpu.library import KernelsMissing, load

    try:
        load()
    except KernelsMissing as exc:
        return str(exc)
    return None


def _reference(config: EngineConfig) -> Backend:
    for option, default in (("activations", "auto"), ("quantize", "none"), ("graph", "full")):
        if getattr(config, option) != default:
            raise InvalidConfig(
                f"{option} {getattr(config, option)} needs native kernels, and the reference ones are used"
            )
    dtype: DType = "float32" if config.dtype == "auto" else config.dtype
    if config.kv_cache_dtype not in ("auto", dtype):
        raise InvalidConfig(f"kv_cache_dtype {config.kv_cache_dtype}: the reference kernels keep their dtype, {dtype}")
    return Backend("reference", dtype, dtype)


def make_ops(backend: Backend, config: EngineConfig) -> Ops:
    """The backend's ops. Native threads get a core each, of those this process may use, as far as they go. KVERN_ISA in
    the environment forces an instruction set, to test or compare it."""
    threads = config.threads or usable_cores()
    if backend.kernels == "reference":
        return load_ops("reference", dtype=backend.dtype, threads=threads)
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    return load_ops(
        "native",
        dtype=backend.dtype,
        threads=threads,
        activations=config.activations,
        kv_dtype=backend.kv_dtype,
        quantize=config.quantize,
        isa=os.environ.get("KVERN_ISA", ""),
        cpus=cores[:threads] if 1 < threads <= len(cores) else None,
    )
