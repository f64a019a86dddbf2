"""From the name of a model to its configuration and its tensors. NumPy only, no torch."""

from kvern.weights.checkpoint import Checkpoint, open_checkpoint
from kvern.weights.config import read_model_config
from kvern.weights.files import ModelError, ModelFiles
from kvern.weights.hub import list_models, resolve_model

__all__ = [
    "Checkpoint",
    "ModelError",
    "ModelFiles",
    "list_models",
    "open_checkpoint",
    "read_model_config",
    "resolve_model",
]
