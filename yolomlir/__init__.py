"""yolomlir: an MLIR compiler that makes YOLO26 fast."""

from pathlib import Path as _Path

__version__ = "0.1.0"

# In a checkout `dialects/`, `passes/` and `tools/` lie beside this package; installed, inside it.
_CHECKOUT = _Path(__file__).resolve().parents[1]
if (_CHECKOUT / "pyproject.toml").is_file() and (_CHECKOUT / "dialects").is_dir():
    __path__.append(str(_CHECKOUT))
