"""The exceptions that tileflow raises on purpose.

Every error carries its data as attributes, so that a program can react without parsing text, and
its text names the field or the place, what was seen and what would be right. Whatever could make
ranks diverge is decided by all of them together, so one bad rank makes every rank raise.
"""

from __future__ import annotations

__all__ = [
    "CapacityError",
    "CompileError",
    "ConfigError",
    "InputError",
    "ProtocolTimeout",
    "RankLost",
    "TileflowError",
    "WorldBroken",
    "WorldError",
]


class TileflowError(Exception):
    """Base of all errors that tileflow raises on purpose."""


class _FieldError(TileflowError, ValueError):
    """A field has a value that is not allowed.

    Attributes:
        field: dotted name of the field, for example ``"Config.tile_m"``.
        value: what was given.
        allowed: what would have been accepted, in words.
        rank: the rank where it was seen, or None where it is the same on every rank.
    """

    def __init__(self, field: str, value: object, allowed: str, *, rank: int | None = None):
        self.field, self.value, self.allowed, self.rank = field, value, allowed, rank
        where = "" if rank is None else f" on rank {rank}"
        super().__init__(f"{field} = {value!r}{where} is refused; allowed: {allowed}")

    def __reduce__(self):
        return (_rebuild_field_error, (type(self), self.field, self.value, self.allowed, self.rank))


def _rebuild_field_error(cls, field, value, allowed, rank):
    return cls(field, value, allowed, rank=rank)


class ConfigError(_FieldError):
    """A shape, configuration or environment value is not allowed, or ranks disagree on it."""


class InputError(_FieldError):
    """An array given to a call has a wrong shape, dtype, device or content."""


class CapacityError(TileflowError):
    """A forward needs more rows than the declared capacity.

    Attributes:
        rank: the rank whose buffer is too small.
        what: the buffer, in words.
        rows: rows that this forward needs there.
        capacity: rows that were allocated.
    """

    def __init__(self, rank: int, what: str, rows: int, capacity: int):
        self.rank, self.what, self.rows, self.capacity = rank, what, rows, capacity
        super().__init__(f"rank {rank} needs {rows} rows in its {what}, capacity is {capacity}")

    def __reduce__(self):
        return (type(self), (self.rank, self.what, self.rows, self.capacity))


class CompileError(TileflowError):
    """A kernel did not compile, link or load.

    Attributes:
        source: the source file.
        command: compiler and options.
        log: what the compiler printed.
    """

    def __init__(self, source: str, command: str, log: str):
        self.source, self.command, self.log = source, command, log
        super().__init__(f"{source} did not compile\n  command: {command}\n{log}")


class WorldError(TileflowError):
    """A world cannot be made, or an operation does not exist on it."""


class ProtocolTimeout(TileflowError):
    """A bounded wait ended without its event.

    Attributes:
        what: what was waited for, a name of :class:`tileflow.protocol.WaitKind`.
        rank: the rank that waited.
        peer: the rank that did not deliver (the same as `rank` for a local wait).
        index: band, segment or global expert (a run), as `what` says; -1 where none applies.
        expected: the value waited for.
        seen: the last value read.
        seconds: how long the wait lasted.
    """

    def __init__(
        self,
        what: str,
        *,
        rank: int,
        peer: int,
        index: int = -1,
        expected: int = 0,
        seen: int = 0,
        seconds: float = 0.0,
    ):
        self.what, self.rank, self.peer, self.index = what, rank, peer, index
        self.expected, self.seen, self.seconds = expected, seen, seconds
        run = "" if index < 0 else f", index {index}"
        super().__init__(
            f"rank {rank} waited {seconds:.1f} s for {what} of rank {peer}{run}: "
            f"expected {expected}, saw {seen}"
        )


class WorldBroken(TileflowError):
    """The world saw a failure and refuses calls until a collective ``world.reset()``.

    Attributes:
        cause: the first failure, or None where another rank had it.
    """

    def __init__(self, message: str, cause: BaseException | None = None):
        self.cause = cause
        super().__init__(message)


class RankLost(TileflowError):
    """A rank no longer answers, so a collective cannot complete.

    Attributes:
        ranks: the lost ranks as far as known.
    """

    def __init__(self, message: str, ranks: tuple[int, ...] = ()):
        self.ranks = ranks
        super().__init__(message)
