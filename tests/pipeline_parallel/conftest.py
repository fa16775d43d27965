"""Optimizers import torch's compiler at their first use: here, not in each rank."""

import torch._dynamo  # noqa: F401
