"""Distributed training from scratch, every line of it run by the tests.

This module imports nothing, so `import xtrain` is cheap and does not need torch.
Import the part you want: `from xtrain.comm import ring_all_reduce`.
"""

__all__ = ["__version__"]

__version__ = "0.1.0"
