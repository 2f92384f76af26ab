"""The registry of worlds, and :func:`init`, which chooses and makes one.

A world module has one function ``create(*, ranks, backend, link, device, timeout_s)``; it is
imported when that world is asked for, so ``import tileflow`` needs neither MPI nor a GPU.
"""

from __future__ import annotations

import importlib
import math
from typing import NamedTuple

from ..config import Environment
from ..errors import ConfigError, WorldError
from .base import SymmetricBuffer, World, open_worlds
from .loopback import DEFAULT_RANKS, Loopback

__all__ = [
    "WORLDS",
    "Choice",
    "Loopback",
    "SymmetricBuffer",
    "World",
    "choose_world",
    "gpu_available",
    "gpu_problem",
    "init",
    "open_worlds",
]

# name -> backends that can run on it
WORLDS = {"loopback": ("cuda", "cpu"), "mpi_shm": ("cpu",), "nvshmem": ("cuda",)}
BACKENDS = ("cpu", "cuda")
LINKS = ("hbm", "host")
MAX_VIRTUAL_RANKS = 64


class Choice(NamedTuple):
    """What :func:`choose_world` decided.

    Attributes:
        world: a name of WORLDS.
        backend: ``"cpu"`` or ``"cuda"``.
        reason: why, one line to print.
    """

    world: str
    backend: str
    reason: str


def init(
    world: str = "auto",
    *,
    ranks: int | None = None,
    backend: str = "auto",
    link: str = "hbm",
    device: int | None = None,
    timeout_s: float = 30.0,
) -> World | Loopback:
    """Make a world; close it, or use it in a ``with`` statement (collective under a launcher).

    BLAS threads cannot be changed once NumPy is loaded: set ``OPENBLAS_NUM_THREADS=1`` (and
    ``OMP_NUM_THREADS``, ``MKL_NUM_THREADS``) before Python starts where ranks outnumber cores.

    Args:
        world: ``"loopback"`` (virtual ranks, one process), ``"mpi_shm"`` (CPU, one host),
            ``"nvshmem"`` (GPUs), or ``"auto"``: loopback unless a launcher started several ranks,
            then nvshmem with a GPU, else mpi_shm.
        ranks: virtual ranks of a loopback (default 4); elsewhere only compared.
        backend: ``"cpu"``, ``"cuda"``, or ``"auto"``: cuda where a GPU and CuPy can be used.
        link: on a GPU loopback, where a peer's memory lies: ``"hbm"`` or ``"host"``.
        device: the GPU to use; None takes the current one.
        timeout_s: bound of every wait in steady state, in seconds.

    Returns:
        The rank's handle; a loopback of more than one rank returns the group of them, whose
        ``run(fn)`` calls ``fn(handle)`` for each.

    Raises:
        ConfigError: an argument is not allowed, or not together with another one.
        WorldError: this machine or launcher cannot run what was asked for.
    """
    choice = choose_world(world, ranks=ranks, backend=backend)
    _check_options(choice, link, device, timeout_s)
    module = importlib.import_module(f".{choice.world}", __name__)
    made = module.create(
        ranks=ranks, backend=choice.backend, link=link, device=device, timeout_s=float(timeout_s)
    )
    made.reason = choice.reason
    return made


def choose_world(
    world: str = "auto",
    *,
    ranks: int | None = None,
    backend: str = "auto",
    environment: Environment | None = None,
) -> Choice:
    """Return the world and backend that :func:`init` makes, and why; arguments as there."""
    _check_one_of("world", world, ("auto", *WORLDS))
    _check_one_of("backend", backend, ("auto", *BACKENDS))
    env = environment or Environment.read()
    _check_ranks(ranks, world, env)
    name, why = _choose_name(world, backend, env)
    if backend not in ("auto", *WORLDS[name]):
        raise ConfigError("backend", backend, f"{' or '.join(WORLDS[name])} on world {name!r}")
    wanted = backend if backend != "auto" or len(WORLDS[name]) > 1 else WORLDS[name][0]
    problem = None if wanted == "cpu" else gpu_problem()
    if wanted == "cuda" and problem is not None:
        raise WorldError(f"world {name!r} with backend 'cuda' cannot run here: {problem}")
    if wanted == "auto":
        wanted = "cuda" if problem is None else "cpu"
        why += f"; backend {wanted}: " + (problem or "a GPU and CuPy can be used")
    return Choice(name, wanted, why)


def _choose_name(world: str, backend: str, env: Environment) -> tuple[str, str]:
    launched = f"the launcher started {env.launcher_size} ranks ({env.launcher_name})"
    if world == "loopback" and env.launcher_size > 1:
        raise WorldError(
            f"world 'loopback' holds all its ranks in one process, but {launched}; "
            "start it without the launcher, or ask for world 'auto'"
        )
    if world != "auto":
        return world, f"world {world}: asked for"
    if env.launcher_size <= 1:
        return "loopback", "world loopback: no launcher started several ranks"
    if backend == "cpu":
        return "mpi_shm", f"world mpi_shm: {launched}, backend cpu was asked for"
    problem = gpu_problem()
    if backend == "cuda" or problem is None:
        return "nvshmem", f"world nvshmem: {launched}, with a GPU"
    return "mpi_shm", f"world mpi_shm: {launched}, without a GPU ({problem})"


def gpu_available() -> bool:
    """Tell whether CuPy can be imported and sees a GPU; never raises."""
    return gpu_problem() is None


def gpu_problem() -> str | None:
    """Return why no GPU can be used, or None where one can; never raises."""
    try:
        import cupy

        count = cupy.cuda.runtime.getDeviceCount()
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return None if count else "CuPy sees no GPU"


def _check_one_of(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(name, value, "one of " + ", ".join(choices))


def _check_ranks(ranks: int | None, world: str, env: Environment) -> None:
    if ranks is None:
        return
    if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1:
        raise ConfigError("ranks", ranks, f"an int from 1; None takes {DEFAULT_RANKS}")
    if world != "loopback" and env.launcher_size > 1 and ranks != env.launcher_size:
        allowed = f"None or {env.launcher_size}, which the launcher started"
        raise ConfigError("ranks", ranks, allowed)
    if env.launcher_size <= 1 and world in ("auto", "loopback") and ranks > MAX_VIRTUAL_RANKS:
        raise ConfigError("ranks", ranks, f"at most {MAX_VIRTUAL_RANKS} virtual ranks")


def _check_options(choice: Choice, link: str, device: int | None, timeout_s: float) -> None:
    _check_one_of("link", link, LINKS)
    if link == "host" and (choice.world, choice.backend) != ("loopback", "cuda"):
        allowed = f"'hbm'; 'host' is for a loopback on a GPU ({choice.reason})"
        raise ConfigError("link", link, allowed)
    if device is not None and choice.backend == "cpu":
        raise ConfigError("device", device, "None on backend cpu")
    number = isinstance(timeout_s, int | float) and not isinstance(timeout_s, bool)
    if not number or not (timeout_s > 0 and math.isfinite(timeout_s)):
        raise ConfigError("timeout_s", timeout_s, "a positive number of seconds")
