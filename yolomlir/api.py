"""Compile and run from Python: `yolomlir.compile`, `yolomlir.load`, `Model`."""

from __future__ import annotations

import difflib
import hashlib
import logging
import os
import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, SupportsFloat

import numpy as np
from numpy.typing import NDArray

from yolomlir.arguments import file_path, whole
from yolomlir.compiler import CompileOptions, compile_checkpoint
from yolomlir.diagnostics import UserError
from yolomlir.fingerprint import compiler_fingerprint, host_fingerprint
from yolomlir.frontend.checkpoint import Checkpoint, load_checkpoint
from yolomlir.progress import ProgressCallback
from yolomlir.results import DEFAULT_CONFIDENCE, Detection, Result
from yolomlir.runtime.artifact import SUFFIX, Artifact, ModelInfo
from yolomlir.runtime.executor import DeviceExecutor, Executor, open_executor
from yolomlir.runtime.plan import Step
from yolomlir.settings import settings
from yolomlir.vision.letterbox import Letterbox, letterbox
from yolomlir.vision.sources import Frame, SourceError, open_sources

_log = logging.getLogger(__name__)


class Model:
    """A compiled model, loaded and ready. Use it as `with model:` or call `close()`.

    One `Model` may be used from several threads.
    """

    def __init__(
        self, artifact: Artifact, *, target: str | None = None, threads: int | None = None
    ) -> None:
        """target: which of the artifact's programs to run; None takes the best one for this
        machine. Raises UserError when there is none, or it cannot run here."""
        self.artifact = artifact
        self._threads = threads
        self.target = choose_program(artifact, target)
        program = artifact.programs[self.target]
        precision = str(program.metadata.get("precision", artifact.info.precision))
        self._info = replace(artifact.info, precision=precision)
        self._executor = open_executor(program, threads=threads)

    @property
    def info(self) -> ModelInfo:
        """Scale, classes, names, image size, batch and precision."""
        return self._info

    @property
    def executor(self) -> Executor:
        """What runs the program, for tools that measure it."""
        return self._executor

    def __call__(self, batch: Any) -> NDArray[np.float32]:
        """Raw rows [N, max_det, 6] (x1, y1, x2, y2 in input pixels, score, class) of images.

        batch: N images of the model's size, [N, H, W, 3] or [N, 3, H, W] (or one, without N), RGB.
        A model of uint8 images takes uint8; one of float32 images takes float16, 32 or 64 in 0..1,
        or uint8, which is divided by 255. N may be any number. Raises UserError for the rest.
        """
        images = self._to_batch(batch)
        size = self.info.batch
        rows = [self._run(images[i : i + size]) for i in range(0, len(images), size)]
        if not rows:
            return np.empty((0, self.info.max_det, 6), np.float32)
        return np.concatenate(rows)

    def input_buffer(self) -> NDArray[Any]:
        """A new array for a batch of images, [N, H, W, 3] of the model's type, to be filled again
        and again, by a camera for example, and given to the model.

        Of a model on a GPU it lies in page-locked memory: the GPU fetches it without another copy
        on the way. It is freed with the last reference to it and may outlive the model.
        """
        if isinstance(self._executor, DeviceExecutor):
            return self._executor.input_buffer()
        info = self.info
        return np.zeros((info.batch, info.height, info.width, 3), info.input_dtype)

    def trace(self, batch: Any) -> Iterator[tuple[Step, list[NDArray[Any]]]]:
        """One inference of up to `info.batch` images, kernel by kernel, for debugging.

        Gives each step of the plan with copies of its results, in logical order (N, C, H, W). Takes
        images as calling the model does; raises UserError for more than a batch of them.
        """
        images = self._to_batch(batch)
        if not 1 <= len(images) <= self.info.batch:
            raise UserError(f"got {len(images)} images; trace() takes 1 to {self.info.batch}")
        return self._executor.trace({"image": self._padded(images)})

    def predict(
        self,
        source: Any,
        *,
        conf: float = DEFAULT_CONFIDENCE,
        classes: Iterable[int | str] | int | str | None = None,
        max_det: int | None = None,
        color: str = "rgb",
    ) -> Result:
        """The detections of one image: a path, URL, PIL image or array, or one frame of a camera.

        conf: least score. classes: the index or name to keep, or several. max_det: most detections.
        color: the channel order of an array, `rgb` or `bgr`. Raises UserError for anything but one
        good image.
        """
        results = self.predict_many(
            [source], conf=conf, classes=classes, max_det=max_det, color=color
        )
        with closing(results):
            result = next(results, None)
            if result is None:
                raise UserError("holds no image", where=source)
            if isinstance(result, SourceError):
                raise result
            # A camera always has more.
            if result.latency_s is None and next(results, None) is not None:
                hint = "use predict_many()"
                raise UserError("holds several images; predict() takes one", hint=hint)
        return result

    def predict_many(
        self,
        sources: Iterable[Any],
        *,
        conf: float = DEFAULT_CONFIDENCE,
        classes: Iterable[int | str] | int | str | None = None,
        max_det: int | None = None,
        color: str = "rgb",
        frames: int | None = None,
    ) -> Generator[Result | SourceError, None, None]:
        """The detections of every image of many sources (paths, folders, globs, URLs, videos, …).

        A source that cannot be read gives a SourceError in its place; the rest go on. Arguments as
        for `predict`. frames: take this many of each video, camera or stream, and no more.

        A camera or stream (`camera:0`, `rtsp://…`, see `open_sources`) gives the newest frame each
        time and goes on until it breaks, or until this iterator is closed, which frees it: use
        `contextlib.closing`. Its frames wait for no batch.
        """
        select = self._selection(conf, classes, max_det)
        pending: list[Frame] = []
        with closing(open_sources(sources, color=color, frames=frames)) as items:
            for item in items:
                if isinstance(item, Frame):
                    pending.append(item)
                    if len(pending) < self.info.batch and item.arrived_s is None:
                        continue
                yield from self._predict_frames(pending, select)
                pending = []
                if isinstance(item, SourceError):
                    yield item
        yield from self._predict_frames(pending, select)

    def run_device(self, images: Any, *, stream: int | None = None) -> Any:
        """Raw rows on the GPU of images on the GPU, with no copy either way.

        images: `batch` images [N, H, W, 3] of the model's type, contiguous, with DLPack or
        `__cuda_array_interface__`. stream: the CUstream to run on, in order; None waits for the
        result. The result is a DeviceArray, valid until the next inference. Raises UserError for
        a CPU model or another array.
        """
        if not isinstance(self._executor, DeviceExecutor):
            raise UserError(f"the model runs on {self.target}", hint="compile for a GPU")
        return self._executor.run_device(images, stream=stream)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the artifact. Raises UserError when the place cannot be written."""
        self.artifact.save(path)

    def close(self) -> None:
        """Free everything the model holds."""
        self._executor.close()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle (and copy) the artifact: another process opens the model anew, as here."""
        return _reopen, (self.artifact, self.target, self._threads)

    def __enter__(self) -> Model:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # ---- inside -----------------------------------------------------------------------------

    def _to_batch(self, batch: Any) -> NDArray[Any]:
        try:
            images = np.asarray(batch)
        except ValueError as error:
            raise UserError(f"images are no array: {error}") from error
        info = self.info
        expected = (info.height, info.width, 3)
        if images.ndim == 3:
            images = images[None]
        if images.ndim == 4 and images.shape[1:] == (3, info.height, info.width):
            images = images.transpose(0, 2, 3, 1)
        if images.ndim != 4 or images.shape[1:] != expected:
            raise UserError(
                f"images have shape {np.shape(batch)}; expected [N, {info.height}, {info.width}, "
                f"3] or [N, 3, {info.height}, {info.width}]",
                hint="predict() resizes images of any size",
            )
        if info.input_dtype == "uint8":
            if images.dtype != np.uint8:
                raise UserError(
                    f"images are {images.dtype}; this model was compiled for uint8",
                    hint="compile with input_dtype='float32', or pass uint8 pixels",
                )
            return images
        if images.dtype == np.uint8:
            scaled: NDArray[np.float32] = np.divide(images, np.float32(255), dtype=np.float32)
            return scaled
        if images.dtype.kind != "f":
            raise UserError(f"images are {images.dtype}; expected floats in 0..1, or uint8")
        return np.asarray(images, np.float32)

    def _run(self, images: NDArray[Any]) -> NDArray[np.float32]:
        outputs = self._executor.run({"image": self._padded(images)})
        rows: NDArray[np.float32] = outputs["detections"]
        return rows[: len(images)]

    def _padded(self, images: NDArray[Any]) -> NDArray[Any]:
        """A whole batch: the last image stands in for missing ones."""
        missing = self.info.batch - len(images)
        if missing:
            images = np.concatenate([images, np.repeat(images[-1:], missing, axis=0)])
        return np.ascontiguousarray(images)

    def _selection(
        self, conf: float, classes: Iterable[int | str] | int | str | None, max_det: int | None
    ) -> _Selection:
        if not isinstance(conf, SupportsFloat) or not 0 <= float(conf) <= 1:
            raise UserError(f"conf is {conf!r}; it must be a number in 0..1")
        most = self.info.max_det if max_det is None else whole("max_det", max_det)
        if not 1 <= most <= self.info.max_det:
            raise UserError(
                f"max_det is {most}; this model was compiled for 1 to {self.info.max_det}",
                hint=f"compile with max_det={most}" if most > 1 else None,
            )
        if classes is None:
            return _Selection(float(conf), None, most)
        listed = [classes] if isinstance(classes, str | int | np.integer) else classes
        return _Selection(float(conf), frozenset(map(self._class_id, listed)), most)

    def _class_id(self, wanted: int | str) -> int:
        names = self.info.names
        if isinstance(wanted, str) and wanted in names:
            return names.index(wanted)
        text = str(wanted)
        if text.isdecimal() and len(text) < 9 and int(text) < self.info.classes:
            return int(text)
        close = difflib.get_close_matches(text, names, n=1)
        listed = ", ".join(names[:10]) + (", …" if len(names) > 10 else "")
        raise UserError(
            f"unknown class '{wanted}'",
            hint=f"did you mean '{close[0]}'?"
            if close
            else f"a name or 0 to {self.info.classes - 1}; the model's classes: {listed}",
        )

    def _predict_frames(self, frames: list[Frame], select: _Selection) -> Iterator[Result]:
        if not frames:
            return
        size = (self.info.height, self.info.width)
        boxed = [letterbox(frame.image, size) for frame in frames]
        rows = self(np.stack([image for image, _ in boxed]))
        for frame, (_, record), image_rows in zip(frames, boxed, rows, strict=True):
            yield self._result(frame, record, image_rows, select)

    def _result(
        self, frame: Frame, record: Letterbox, rows: NDArray[np.float32], select: _Selection
    ) -> Result:
        kept = select(rows)
        boxes = record.to_original(kept[:, :4])
        detections = tuple(
            Detection(
                (float(box[0]), float(box[1]), float(box[2]), float(box[3])),
                float(row[4]),
                int(row[5]),
                self.info.names[int(row[5])],
            )
            for box, row in zip(boxes, kept, strict=True)
        )
        height, width = frame.image.shape[:2]
        latency_s = None if frame.arrived_s is None else time.monotonic() - frame.arrived_s
        moment = (frame.frame_number, frame.time_s, latency_s)
        return Result(frame.name, width, height, detections, frame.image, *moment)


def _reopen(artifact: Artifact, target: str, threads: int | None) -> Model:
    return Model(artifact, target=target, threads=threads)


class _Selection:
    """Which rows of an image are kept."""

    def __init__(self, conf: float, classes: frozenset[int] | None, max_det: int) -> None:
        self.conf = conf
        self.classes = classes
        self.max_det = max_det

    def __call__(self, rows: NDArray[np.float32]) -> NDArray[np.float32]:
        keep = rows[:, 4] >= self.conf
        if self.classes is not None:
            keep &= np.isin(rows[:, 5].astype(np.int64), list(self.classes))
        return rows[keep][: self.max_det]


def compile(
    weights: str | os.PathLike[str] | Checkpoint,
    *,
    target: str = "native",
    precision: str | None = None,
    imgsz: int | tuple[int, int] | None = None,
    batch: int | None = None,
    max_det: int | None = None,
    input_dtype: str | None = None,
    level: int | None = None,
    threads: int | None = None,
    cache: bool = True,
    progress: ProgressCallback | None = None,
) -> Model:
    """Compile a YOLO26 checkpoint and load it.

    weights: a `.safetensors` or `.pt` file, a checkpoint in memory, or a compiled `.ylm`, which is
    only loaded. target: `native` (the GPU here, else the CPU), `cpu`, or a GPU such as `sm_120`.
    precision: `fp32`, `tf32`, or `fp16`, which stores tensors and weights in 16 bits as well (GPU
    only); None takes the target's default. imgsz: a side, or height and width, in pixels, multiples
    of 32 (default: 640). batch: images at once (1). max_det: most rows an image (300). input_dtype:
    `uint8` or `float32`. level: optimisation, 0 to 3; None takes what was measured to be fastest,
    else 2. cache: keep the artifact on disk, and take it from there the next time. Raises UserError
    for a file or option it cannot compile, and for an option that a `.ylm` was not compiled with.
    """
    size = None if imgsz is None else _size(imgsz)
    if not isinstance(weights, Checkpoint):
        weights = file_path("weights", weights, "a .safetensors, .pt or .ylm file, or a Checkpoint")
    if isinstance(weights, Path) and weights.suffix == SUFFIX:
        model = load(weights, target=target, threads=threads)
        try:
            check_artifact(model.info, weights, size, precision, batch, max_det, input_dtype)
        except UserError:
            model.close()
            raise
        return model
    height, width = size or (CompileOptions.height, CompileOptions.width)
    options = CompileOptions(
        target=native_target() if target == "native" else target,
        precision=precision,
        height=height,
        width=width,
        batch=CompileOptions.batch if batch is None else batch,
        max_det=CompileOptions.max_det if max_det is None else max_det,
        input_dtype=input_dtype or CompileOptions.input_dtype,
        level=level,
    ).resolved()
    artifact = compile_artifact(weights, options, cache=cache, progress=progress)
    return Model(artifact, target=options.target, threads=threads)


def _size(imgsz: Any) -> tuple[int, int]:
    """Height and width. Raises UserError for what is neither a side nor two of them."""
    sides = (imgsz, imgsz) if isinstance(imgsz, int | np.integer) else imgsz
    if isinstance(sides, str) or not isinstance(sides, Sequence | np.ndarray) or len(sides) != 2:
        raise UserError(f"imgsz is {imgsz!r}; expected a side such as 640, or (height, width)")
    return whole("imgsz", sides[0]), whole("imgsz", sides[1])


def load(
    path: str | os.PathLike[str], *, target: str | None = None, threads: int | None = None
) -> Model:
    """Load a `.ylm` file. Raises UserError when it is damaged, or cannot run here.

    target: which of its programs; None or `native` takes the best one for this machine.
    """
    artifact = Artifact.load(file_path("path", path, "a .ylm file"))
    wanted = None if target == "native" else target
    return Model(artifact, target=choose_program(artifact, wanted, path), threads=threads)


def native_target() -> str:
    """The target of this machine: its first CUDA GPU, else `cpu`."""
    from yolomlir.runtime.device import cuda_target

    return cuda_target() or "cpu"


def choose_program(artifact: Artifact, target: str | None = None, path: object = None) -> str:
    """Which program of an artifact to run: that of `target`, or the best one for this machine.

    path: the artifact's file, for the error.

    A GPU runs programs of its own chip or, from their PTX, of an older one; the newest wins.
    Raises UserError that says how to get a program for this machine.
    """
    wanted = target or native_target()
    names = list(artifact.programs)
    chip = _chip(wanted)
    older = [n for n in names if 0 < _chip(n) <= chip]
    if wanted in names or older:
        return wanted if wanted in names else max(older, key=_chip)
    if target is None and "cpu" in names:
        return "cpu"
    from yolomlir.runtime.device import cuda_device

    found = cuda_device()
    reason = f" ({found})" if isinstance(found, str) and target is None else ""
    from_checkpoint = wanted == "cpu" or names == ["cpu"]
    again = "CHECKPOINT" if from_checkpoint else path or f"FILE{SUFFIX}"
    raise UserError(
        f"has no program for {wanted}, only for {', '.join(names)}{reason}",
        where=path or "the artifact",
        hint=f"yolomlir compile {again} --target {wanted} -o other{SUFFIX} makes one",
    )


def _chip(target: str) -> int:
    """90 for `sm_90`; 0 for what is no GPU."""
    number = target.removeprefix("sm_")
    return int(number) if number != target and number.isdecimal() else 0


def check_artifact(
    info: ModelInfo,
    path: Path,
    size: tuple[int, int] | None,
    precision: str | None,
    batch: int | None,
    max_det: int | None,
    input_dtype: str | None,
) -> None:
    """Refuse what a compiled file cannot honour, rather than do something else silently."""
    compiled = (info.height, info.width)
    asked = (
        ("imgsz", size, compiled, size == compiled),
        ("precision", precision, info.precision, precision == info.precision),
        ("batch", batch, info.batch, batch == info.batch),
        ("max_det", max_det, info.max_det, max_det is not None and max_det <= info.max_det),
        ("input_dtype", input_dtype, info.input_dtype, input_dtype == info.input_dtype),
    )
    for name, value, has, suits in asked:
        if value is not None and not suits:
            raise UserError(
                f"was compiled with {name} {_shown(has)}, not {_shown(value)}",
                where=path,
                hint="compile the checkpoint again with it",
            )


def _shown(value: object) -> str:
    return "x".join(map(str, value)) if isinstance(value, tuple) else str(value)


def compile_artifact(
    weights: str | os.PathLike[str] | Checkpoint,
    options: CompileOptions,
    *,
    cache: bool = True,
    progress: ProgressCallback | None = None,
) -> Artifact:
    """The artifact of a checkpoint, from the cache when it was compiled before."""
    cached = _cache_path(weights, options) if cache else None
    if cached and cached.is_file():
        try:
            return Artifact.load(cached)
        except UserError as error:
            _log.warning("%s; compiling again", error)
    checkpoint = weights if isinstance(weights, Checkpoint) else load_checkpoint(Path(weights))
    artifact = compile_checkpoint(checkpoint, options, progress=progress)
    if cached:
        _keep(artifact, cached)
    return artifact


def _keep(artifact: Artifact, path: Path) -> None:
    """Store in the cache; a cache that cannot be written costs time, and is no error."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        artifact.save(path)
    except (OSError, UserError) as error:
        _log.warning("the compiled model is not kept for the next time: %s", error)


def _cache_path(
    weights: str | os.PathLike[str] | Checkpoint, options: CompileOptions
) -> Path | None:
    """Where the artifact of this file and these options lies, by everything that can change it."""
    try:
        content = _digest(weights) if isinstance(weights, Checkpoint) else _file_digest(weights)
    except OSError:
        return None  # load_checkpoint says what is wrong with the file
    gpu = options.target != "cpu"
    machine = _tuning_digest() if gpu else host_fingerprint()
    # The name is in the artifact, so that a copy of another name is another artifact.
    name = "" if isinstance(weights, Checkpoint) else Path(weights).name
    parts = (content, name, repr(options), compiler_fingerprint(), machine)
    key = hashlib.sha256("\0".join(parts).encode("utf-8", "surrogateescape")).hexdigest()[:32]
    return Path(settings().cache_dir) / "artifacts" / f"{key}{SUFFIX}"


def _file_digest(path: str | os.PathLike[str]) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _tuning_digest() -> str:
    """Of what tuning found on this machine, which kernels' tiles are taken from."""
    folder = Path(settings().cache_dir) / "tuning"
    return "".join(_file_digest(file) for file in sorted(folder.glob("*.jsonl")))


def _digest(checkpoint: Checkpoint) -> str:
    digest = hashlib.sha256(repr(checkpoint.names).encode())
    for name, tensor in sorted(checkpoint.tensors.items()):
        digest.update(f"{name}{tensor.dtype}{tensor.shape}".encode())
        digest.update(np.ascontiguousarray(tensor).tobytes())
    return digest.hexdigest()
