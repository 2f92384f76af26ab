"""``python -m tileflow.bench``: check the results first, then time them.

``options`` reads the command line, ``cases`` lists what to run, ``data`` makes the inputs,
``checks`` compares with a reference, ``runner`` drives one rank, ``report`` prints and keeps rows.
"""

from .runner import main

__all__ = ["main"]
