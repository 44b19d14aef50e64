"""Imports every pass module beside it, so that `base.REGISTRY` is complete."""

from __future__ import annotations

import importlib
import pkgutil

import yolomlir.passes as _package
from yolomlir.passes.base import REGISTRY

for _module in pkgutil.iter_modules(_package.__path__):
    if _module.name not in ("base", "registry"):
        importlib.import_module(f"yolomlir.passes.{_module.name}")

__all__ = ["REGISTRY"]
