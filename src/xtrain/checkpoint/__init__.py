"""Sharded checkpoints: each rank writes its own pieces, any number of ranks reads."""

from xtrain.checkpoint.bare_file import check_safetensors, read_safetensors
from xtrain.checkpoint.files import save_pieces, write_file
from xtrain.checkpoint.folder import latest
from xtrain.checkpoint.index import (
    CheckpointError,
    CheckpointReplaced,
    Piece,
    Stored,
)
from xtrain.checkpoint.reader import CheckpointReader

__all__ = [
    "CheckpointError",
    "CheckpointReader",
    "CheckpointReplaced",
    "Piece",
    "Stored",
    "check_safetensors",
    "latest",
    "read_safetensors",
    "save_pieces",
    "write_file",
]
