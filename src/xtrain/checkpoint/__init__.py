"""Sharded checkpoints: each rank writes its own pieces, any number of ranks reads."""

from xtrain.checkpoint.bare_file import check_safetensors, read_safetensors
from xtrain.checkpoint.errors import CheckpointError, CheckpointReplaced
from xtrain.checkpoint.files import save_pieces
from xtrain.checkpoint.folder import latest
from xtrain.checkpoint.pieces import About, Piece, Shard, whole
from xtrain.checkpoint.reader import CheckpointReader
from xtrain.checkpoint.training_state import load_checkpoint, save_checkpoint

__all__ = [
    "About",
    "CheckpointError",
    "CheckpointReader",
    "CheckpointReplaced",
    "Piece",
    "Shard",
    "check_safetensors",
    "latest",
    "load_checkpoint",
    "read_safetensors",
    "save_checkpoint",
    "save_pieces",
    "whole",
]
