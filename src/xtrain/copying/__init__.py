"""Code to carry away: files that run where xtrain is not installed."""

from xtrain.copying.forms import whiteboard

__all__ = ["whiteboard"]
