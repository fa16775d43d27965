"""Tensor parallelism against dense layers."""
