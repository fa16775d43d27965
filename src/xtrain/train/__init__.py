"""Compose everything into one trainer: any layout of data, tensor, pipeline, context
and expert ranks, by the same few calls."""

from xtrain.train.checkpoints import load, save
from xtrain.train.layouts import make_mesh, make_model, make_schedule, wrapped_model
from xtrain.train.steps import (
    accumulate,
    clip_grad_norm,
    evaluate,
    update_balance_biases,
)
from xtrain.train.wrap import WrappedModel, wrap

__all__ = [
    "WrappedModel",
    "accumulate",
    "clip_grad_norm",
    "evaluate",
    "load",
    "make_mesh",
    "make_model",
    "make_schedule",
    "save",
    "update_balance_biases",
    "wrap",
    "wrapped_model",
]
