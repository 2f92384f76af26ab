"""The registry of backends; each is imported when a world of its device asks for it."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from .base import MODES, Backend, ExpertWeights, Forward

if TYPE_CHECKING:
    from ..worlds.base import World

__all__ = ["BACKENDS", "MODES", "Backend", "ExpertWeights", "Forward", "create"]

# device -> module, class
BACKENDS = {"cpu": (".cpu", "CpuBackend"), "cuda": (".cuda.backend", "CudaBackend")}


def create(world: World) -> Backend:
    """Return a new backend for the world's device."""
    module, name = BACKENDS[world.device]
    return getattr(importlib.import_module(module, __name__), name)(world)
