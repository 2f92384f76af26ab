"""Injected faults: random delays that shake the order, and ranks that stay silent.

Used by tests and tools to attack the protocol; a layer's default injects nothing and costs nothing.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field

__all__ = ["Faults"]


@dataclass
class Faults:
    """What goes wrong on one rank, on purpose.

    Attributes:
        tile_delay_s: the CPU producer sleeps up to this long after each tile.
        put_delay_s: the CPU consumer sleeps up to this long before each put.
        stage_delay_s: the rank sleeps exactly this long before each stage.
        mute_done: the rank sends its rows but never its arrival signals.
        mute_dispatch: the rank dispatches its rows but never says so.
        seed: of the random delays.
    """

    tile_delay_s: float = 0.0
    put_delay_s: float = 0.0
    stage_delay_s: float = 0.0
    mute_done: bool = False
    mute_dispatch: bool = False
    seed: int = 0
    _random: random.Random = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    def delay_tile(self) -> None:
        self._sleep(self.tile_delay_s)

    def delay_put(self) -> None:
        self._sleep(self.put_delay_s)

    def delay_stage(self) -> None:
        if self.stage_delay_s:
            time.sleep(self.stage_delay_s)

    def _sleep(self, most: float) -> None:
        if most:
            time.sleep(self._random.uniform(0.0, most))
