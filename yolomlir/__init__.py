"""yolomlir: an MLIR compiler that makes YOLO26 fast.

model = yolomlir.compile("yolo26n.safetensors")
for detection in model.predict("bus.jpg"): ...
"""

from pathlib import Path as _Path
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# In a checkout `dialects/`, `passes/` and `tools/` lie beside this package; installed, inside it.
_CHECKOUT = _Path(__file__).resolve().parents[1]
if (_CHECKOUT / "pyproject.toml").is_file() and (_CHECKOUT / "dialects").is_dir():
    __path__.append(str(_CHECKOUT))

if TYPE_CHECKING:
    from yolomlir.api import Model, compile, load
    from yolomlir.diagnostics import UnsupportedError, UserError, YolomlirError
    from yolomlir.results import Detection, Result

_LAZY = {
    "Model": "api",
    "compile": "api",
    "load": "api",
    "Detection": "results",
    "Result": "results",
    "YolomlirError": "diagnostics",
    "UserError": "diagnostics",
    "UnsupportedError": "diagnostics",
}

__all__ = [
    "Detection",
    "Model",
    "Result",
    "UnsupportedError",
    "UserError",
    "YolomlirError",
    "__version__",
    "compile",
    "load",
]


def __getattr__(name: str) -> Any:
    """Import the API on first use, so that `import yolomlir` costs nothing."""
    if name not in _LAZY:
        raise AttributeError(f"module 'yolomlir' has no attribute '{name}'")
    import importlib

    return getattr(importlib.import_module(f"yolomlir.{_LAZY[name]}"), name)
