"""Code to carry away: files and folders that run where xtrain is not installed."""

from xtrain.copying.forms import whiteboard
from xtrain.copying.library import CopyError, write_library

__all__ = ["CopyError", "whiteboard", "write_library"]
