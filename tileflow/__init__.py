"""tileflow: Mixture-of-Experts layers with expert parallelism, the return all-to-all hidden.

``import tileflow`` needs NumPy alone; CuPy, MPI and NVSHMEM load when a world needs them.
Imports go one way: ``errors, config`` <- ``routing, plan, protocol`` <- ``buffers, worlds, jit`` <-
``backends`` <- ``engine`` <- ``layer`` <- ``timing, trace`` <- ``bench``.
"""

from .buffers import workspace_nbytes
from .config import Config, MoEShape
from .errors import (
    CapacityError,
    CompileError,
    ConfigError,
    InputError,
    ProtocolTimeout,
    RankLost,
    TileflowError,
    WorldBroken,
    WorldError,
)
from .layer import MoELayer
from .version import __version__
from .worlds import init

__all__ = [
    "CapacityError",
    "CompileError",
    "Config",
    "ConfigError",
    "InputError",
    "MoELayer",
    "MoEShape",
    "ProtocolTimeout",
    "RankLost",
    "TileflowError",
    "WorldBroken",
    "WorldError",
    "__version__",
    "init",
    "workspace_nbytes",
]
