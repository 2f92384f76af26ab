"""Entry point of ``python -m tileflow.bench``."""

import os
import sys

from .runner import main

# Ranks outnumber cores: each gets one thread, or they slow each other down tenfold.
_BLAS_THREADS = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")


def _limit_blas_threads() -> None:
    """Start again with one BLAS thread, unless the user has chosen a number.

    NumPy reads the variables when it is loaded, which importing this package has done.
    """
    if not any(name in os.environ for name in _BLAS_THREADS):
        os.environ.update(dict.fromkeys(_BLAS_THREADS, "1"))
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


if __name__ == "__main__":
    _limit_blas_threads()
    sys.exit(main())
