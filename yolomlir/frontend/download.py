"""Weights by name: a file, Ultralytics' release (`yolo26n`, downloaded), or `seeded:n`."""

from __future__ import annotations

import http.client
import logging
import re
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from safetensors.numpy import save

from yolomlir import __version__
from yolomlir.diagnostics import UserError, YolomlirError
from yolomlir.files import replacing
from yolomlir.frontend.checkpoint import load_checkpoint
from yolomlir.frontend.matching import infer_architecture
from yolomlir.frontend.network import SCALES
from yolomlir.frontend.seeded import seeded_checkpoint
from yolomlir.settings import settings, variable_name

logger = logging.getLogger(__name__)

_RELEASE = re.compile(rf"(?P<name>yolo26(?P<scale>[{''.join(SCALES)}]))(\.pt)?")
_SEEDED = "seeded:"
_SEEDED_CLASSES = 80
_BLOCK_BYTES = 1 << 16
_TIMEOUT_S = 30.0
_ATTEMPTS = 3
"""How often a download that stops half-way goes on by itself before the user is asked to."""

Report = Callable[[int, int], None]
"""Called with the bytes that are there and the bytes expected (0 where that is unknown)."""


def resolve_weights(weights: str | Path) -> Path:
    """The file that `weights` names: a path, a release such as `yolo26n`, which is fetched, or
    `seeded:n`: untrained weights of a scale, for timing and comparing where no trained ones are.

    Raises UserError where there is no such file, and where a release cannot be fetched.
    """
    path = Path(weights).expanduser()
    if path.exists():
        return path
    if str(weights).startswith(_SEEDED):
        return seeded_file(str(weights).removeprefix(_SEEDED))
    match = _RELEASE.fullmatch(str(weights))
    if match is not None:
        return fetch_release(match["scale"])
    releases = ", ".join(f"yolo26{scale}" for scale in SCALES)
    hint = (
        f"give the path of a .safetensors or .pt file, one of {releases} to download it, "
        "or seeded:n for untrained weights"
    )
    if path.suffix == ".ylm":
        hint = "`yolomlir compile WEIGHTS -o FILE.ylm` writes one"
    raise UserError("no such file", where=path, hint=hint)


def is_name(weights: str) -> bool:
    """Whether `resolve_weights` takes it for a name, not for a path."""
    return weights.startswith(_SEEDED) or _RELEASE.fullmatch(weights) is not None


def seeded_file(scale: str) -> Path:
    """Untrained weights of a scale (80 classes, seed 0), from the user's cache or put there.

    Raises UserError for an unknown scale.
    """
    # Another version may make other ones.
    name = f"yolo26{scale}-seeded-{__version__}.safetensors"
    target = settings().cache_dir / "weights" / name
    if scale in SCALES:
        logger.warning("seeded:%s: these weights are random: detections mean nothing", scale)
        if target.exists():
            return target
    checkpoint = seeded_checkpoint(scale, _SEEDED_CLASSES, 0)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with replacing(target) as file:
            file.write(save(checkpoint.tensors, checkpoint.metadata))
    except OSError as error:
        raise UserError(
            f"cannot be written: {error.strerror}",
            where=target,
            hint=f"{variable_name('cache_dir')} names another folder",
        ) from error
    return target


def fetch_release(scale: str) -> Path:
    """Ultralytics' checkpoint of a scale, from the user's cache or downloaded into it.

    A download that stopped is resumed where it stopped. What has come is read and must be a YOLO26
    detector of that scale. Raises UserError that says how to get the file by hand.
    """
    name = f"yolo26{scale}.pt"
    target = settings().cache_dir / "weights" / name
    if target.exists():
        return target
    download = _Download(f"{settings().release_url}/{name}", target)
    download.prepare()
    _run_with_progress(download)
    _check(download, scale)
    download.part.replace(target)
    logger.info("downloaded %s to %s", download.url, target)
    return target


def _run_with_progress(download: _Download) -> None:
    # Here, because rich takes longer to import than everything else that this module is used for.
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    # Where nobody watches, rich would leave an empty line behind.
    disable = not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=disable) as bar:
        task = bar.add_task(f"Downloading {download.target.name}", total=None)
        download.run(lambda done, total: bar.update(task, completed=done, total=total or None))


@dataclass(frozen=True)
class _Download:
    url: str
    target: Path

    @property
    def part(self) -> Path:
        """What has come so far."""
        return self.target.with_name(f"{self.target.name}.part")

    def fail(self, message: str) -> UserError:
        return UserError(
            f"{message}; downloading {self.url}",
            where=self.target.name,
            hint=f"get the file elsewhere and give its path, or put it at {self.target}; "
            f"{variable_name('release_url')} names another server",
        )

    def prepare(self) -> None:
        """Make the folder."""
        try:
            self.part.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise self.fail(f"cannot write to {self.part.parent} ({error.strerror})") from error

    def run(self, report: Report) -> None:
        """Fetch the file into `part`, resuming as often as it takes, within reason."""
        reason = ""
        for _ in range(_ATTEMPTS):
            before = self.size()
            try:
                if self.attempt(report):
                    return
                reason = "the connection ended early"
            except urllib.error.HTTPError as error:
                raise self.fail(f"the server answered {error.code} {error.reason}") from error
            except (urllib.error.URLError, http.client.HTTPException, OSError) as error:
                reason = str(getattr(error, "reason", error)) or type(error).__name__
            if self.size() == before:
                break  # nothing came: the network is not there, or the server has no more
            logger.info("the download stopped at %d bytes (%s); resuming", self.size(), reason)
        kept = f" after {self.size()} bytes, which are kept" if self.size() else ""
        raise self.fail(f"the download stopped{kept} ({reason})")

    def size(self) -> int:
        """Bytes that are there."""
        return self.part.stat().st_size if self.part.exists() else 0

    def attempt(self, report: Report) -> bool:
        """One request, for what is missing. Whether the file is complete after it."""
        request = urllib.request.Request(self.url, headers={"User-Agent": "yolomlir"})
        start = self.size()
        if start:
            request.add_header("Range", f"bytes={start}-")
        try:
            response = urllib.request.urlopen(request, timeout=_TIMEOUT_S)
        except urllib.error.HTTPError as error:
            if error.code != http.client.REQUESTED_RANGE_NOT_SATISFIABLE or not start:
                raise
            return self.already_whole(error, start)
        with response:
            if start and not _continues(response, start):
                start = 0  # the server sends all of it again
            length = int(response.headers.get("Content-Length") or 0)
            total = start + length if length else 0
            with self.part.open("ab" if start else "wb") as file:
                while block := response.read(_BLOCK_BYTES):
                    file.write(block)
                    report(file.tell(), total)
        return self.size() == total if total else True

    def already_whole(self, error: urllib.error.HTTPError, start: int) -> bool:
        """After "range not satisfiable": whole if the server's size is ours, else begin again."""
        size = (error.headers.get("Content-Range") or "").rpartition("/")[2]
        error.close()
        if size == str(start):
            return True
        self.part.unlink()
        return self.attempt(lambda done, total: None)


def _continues(response: http.client.HTTPResponse, start: int) -> bool:
    """Whether a response holds the bytes from `start` on."""
    sent = response.headers.get("Content-Range") or ""
    return response.status == http.client.PARTIAL_CONTENT and sent.startswith(f"bytes {start}-")


def _check(download: _Download, scale: str) -> None:
    """What came must be a checkpoint of that scale; else it is removed, not to be resumed."""
    try:
        found = infer_architecture(load_checkpoint(download.part)).scale
    except YolomlirError as error:
        download.part.unlink()
        raise download.fail(f"what came is no readable checkpoint ({error.message})") from error
    if found != scale:
        download.part.unlink()
        raise download.fail(f"what came is a yolo26{found}, not a yolo26{scale}")
