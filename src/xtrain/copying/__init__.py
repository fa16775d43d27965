"""Code to carry away: files that run where xtrain is not installed."""

from xtrain.copying.forms import whiteboard
from xtrain.copying.modules import CopyError
from xtrain.copying.standalone import standalone

__all__ = ["CopyError", "standalone", "whiteboard"]
