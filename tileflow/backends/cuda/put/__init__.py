"""Put paths: who moves remote rows while the producer runs. One file each, one line here."""

from __future__ import annotations

from .sm import SmPut

__all__ = ["DEFAULT", "PUT_PATHS", "SmPut"]

# Config.put_path -> class; "serial" needs none: it sends when the producer has ended.
PUT_PATHS = {"sm": SmPut}
DEFAULT = "sm"
