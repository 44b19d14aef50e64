"""How long work reports how far it is."""

from __future__ import annotations

from collections.abc import Callable

ProgressCallback = Callable[[str, int, int], None]
"""Called with what is being done, how much of it is done, and how much there is."""
