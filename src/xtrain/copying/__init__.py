"""Code of ours that runs without us: copies of the library form of anything."""

from xtrain.copying.modules import CopyError
from xtrain.copying.standalone import standalone

__all__ = ["CopyError", "standalone"]
