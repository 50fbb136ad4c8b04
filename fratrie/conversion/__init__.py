"""Weights of other models and packages, read into the classes of Fratrie and written back."""

from .models import from_hf, to_hf

__all__ = ["from_hf", "to_hf"]
