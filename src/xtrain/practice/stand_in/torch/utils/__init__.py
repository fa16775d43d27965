"""torch.utils: samplers, and modes that see every call."""

from torch.utils import _python_dispatch as _python_dispatch
from torch.utils import data as data
