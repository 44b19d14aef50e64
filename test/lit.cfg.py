"""lit's configuration: `lit test` in a checkout, or anywhere yolomlir is installed."""

# ruff: noqa: F821  lit defines `config` and `lit_config`
import os
import shutil
import sys
from pathlib import Path

import lit.formats

_TESTS = Path(__file__).resolve().parent
_CHECKOUT = _TESTS.parent
_PATH = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
_FILECHECK = shutil.which("filecheck", path=_PATH)
if _FILECHECK is None:
    lit_config.fatal("filecheck is not installed: pip install 'yolomlir[test]'")

config.name = "yolomlir"
config.test_format = lit.formats.ShTest(execute_external=False)
config.suffixes = [".mlir", ".test"]
config.excludes = ["python", "numerics", "device", "Inputs"]
config.test_source_root = str(_TESTS)
config.test_exec_root = os.environ.get("YOLOMLIR_LIT_OUTPUT", str(_CHECKOUT / ".lit"))

# The tools come from the interpreter that runs lit; the package from there too, except in a
# checkout, whose own sources win.
if (_CHECKOUT / "pyproject.toml").is_file():
    paths = [str(_CHECKOUT), os.environ.get("PYTHONPATH", "")]
    config.environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
config.environment["FILECHECK_OPTS"] = "--dump-input=fail"
for name in ("YOLOMLIR_TEST_WEIGHTS", "YOLOMLIR_TEST_REFERENCE"):
    if name in os.environ:
        config.environment[name] = os.environ[name]
        config.available_features.add(name.rpartition("_")[2].lower())

# Each name alone, not inside a path or another name.
config.substitutions += [
    (r"(?<![\w/-])yolomlir-opt(?![\w/-])", f"{sys.executable} -m yolomlir.tools.opt"),
    (r"(?<![\w/-])FileCheck(?![\w/-])", _FILECHECK),
    (r"%python", sys.executable),
]
