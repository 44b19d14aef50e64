"""The photo that comes with the package, for a first run without a network."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from yolomlir.diagnostics import InternalError


def demo_image() -> Path:
    """The path of the packaged photo: the astronaut Eileen Collins, by NASA, public domain."""
    resource = files("yolomlir.vision") / "data" / "astronaut.jpg"
    if not isinstance(resource, Path) or not resource.is_file():
        raise InternalError(
            "the packaged photo is missing", where=resource, hint="reinstall yolomlir, unpacked"
        )
    return resource
