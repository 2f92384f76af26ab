"""The version, in one place: setup.py, the bench's rows and the choice of tuned entries read it."""

__all__ = ["__version__"]

__version__ = "0.1.0"
