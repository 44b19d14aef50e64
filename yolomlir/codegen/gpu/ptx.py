"""GPU modules to PTX (MLIR's NVPTX backend) and PTX to cubins (nvJitLink), in parallel, cached."""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from yolomlir.bindings import SUPPORTED_LLVM, gpu, ir, passmanager
from yolomlir.codegen import workers
from yolomlir.codegen.gpu.kernel import Kernel, Launch
from yolomlir.diagnostics import InternalError, UserError
from yolomlir.files import replacing, warn_unwritable
from yolomlir.target import Target

logger = logging.getLogger(__name__)

_FORMAT = 1
"""Version of the cache's files and of what their keys cover."""
_INSTALL = "pip install 'yolomlir[cuda]'"

# convert-math-to-llvm must not run before convert-gpu-to-nvvm. index-bitwidth=32 is refused.
_TO_NVVM = (
    "builtin.module(canonicalize,cse,convert-nvgpu-to-nvvm,"
    "gpu.module(loop-invariant-code-motion,convert-scf-to-cf,"
    "convert-gpu-to-nvvm{use-bare-ptr-memref-call-conv=1 index-bitwidth=64}),"
    "canonicalize,cse,gpu.module(convert-nvvm-to-llvm),reconcile-unrealized-casts,"
    "nvvm-attach-target{chip=CHIP features=PTX O=3})"
)
_TO_PTX = "builtin.module(gpu-module-to-binary{format=isa})"


@dataclass(frozen=True)
class CompiledKernel:
    """A kernel ready to load: its launch, PTX text, cubin of one chip, and what it costs."""

    launch: Launch
    ptx: str
    cubin: bytes
    chip: str
    registers: int
    spill_bytes: int


@dataclass(frozen=True)
class Cubin:
    """Machine code of one chip; registers a thread, bytes of spill stores and loads a thread."""

    code: bytes
    registers: int
    spill_bytes: int


def pipeline(target: Target) -> str:
    """The pass pipeline from a kernel's module to `gpu.binary`, as `mlir-opt` text."""
    return _TO_NVVM.replace("CHIP", target.chip).replace("PTX", target.ptx)


def to_ptx(module: ir.Module, target: Target) -> str:
    """PTX of a module with one `gpu.module`; the module itself is left as it is.

    Raises InternalError where a pass refuses the module.
    """
    with module.context, ir.Location.unknown():
        copy = ir.Module.parse(str(module))
        try:
            passmanager.PassManager.parse(pipeline(target)).run(copy.operation)
            passmanager.PassManager.parse(_TO_PTX).run(copy.operation)
        except ir.MLIRError as error:
            raise InternalError(
                f"the kernel does not lower to PTX: {error}",
                hint=f"mlir-opt --pass-pipeline='{pipeline(target)}'",
            ) from error
        for op in copy.body.operations:
            if op.operation.name == "gpu.binary":
                data = gpu.ObjectAttr(op.operation.attributes["objects"][0]).object
                return bytes(data).rstrip(b"\0").decode()
    raise InternalError("no gpu.binary came out of the PTX pipeline")


# ---- PTX to machine code ------------------------------------------------------------------------


def assemble(ptx: str, chip: str) -> Cubin:
    """Machine code for `chip` (`sm_90`) by nvJitLink, with no driver, GPU or toolkit.

    Raises UserError where nvJitLink is missing or too old for the PTX or chip, InternalError where
    it refuses the code.
    """
    link = _nvjitlink()
    options = [f"-arch={chip}", "-O3", "-verbose"]
    handle = link.create(len(options), options)
    try:
        try:
            source = ptx.encode()
            link.add_data(handle, link.InputType.PTX, source, len(source), "kernel.ptx")
            link.complete(handle)
        except link.nvJitLinkError as error:
            raise _refusal(_log(link, handle, "error"), chip, link.version()) from error
        code = bytearray(link.get_linked_cubin_size(handle))
        link.get_linked_cubin(handle, code)
        registers, spills = parse_resources(_log(link, handle, "info"))
        return Cubin(bytes(code), registers, spills)
    finally:
        link.destroy(handle)


def parse_resources(log: str) -> tuple[int, int]:
    """Registers a thread and bytes of spills (stores plus loads) from an assembler's verbose log.

    Some nvJitLinks write ptxas' words ("Used 64 registers, … bytes spill stores"), some the
    linker's ("used 64 registers, … 0 bytes lmem"), where local memory stands for the spills.
    Raises InternalError where the log does not say.
    """
    registers = re.search(r"[Uu]sed (\d+) registers", log)
    if registers is None:
        raise InternalError(f"no register count in the assembler's log: {log.strip()!r}")
    spills = re.findall(r"(\d+) bytes (?:spill (?:stores|loads)|lmem)", log)
    return int(registers[1]), sum(int(s) for s in spills)


def _nvjitlink() -> Any:
    try:
        from cuda.bindings import nvjitlink

        nvjitlink.version()
    except (ImportError, RuntimeError) as error:
        raise UserError(
            f"kernels cannot be assembled without nvJitLink: {error}", hint=_INSTALL
        ) from error
    return nvjitlink


def _log(link: Any, handle: Any, kind: str) -> str:
    size = getattr(link, f"get_{kind}_log_size")(handle)
    data = bytearray(size)
    if size:
        getattr(link, f"get_{kind}_log")(handle, data)
    return bytes(data).rstrip(b"\0").decode(errors="replace").strip()


def _refusal(log: str, chip: str, version: tuple[int, int]) -> UserError | InternalError:
    old = re.search(r"(?i)unsupported.*(?:version|architecture|arch)|not a recognized", log)
    if old:
        return UserError(
            f"nvJitLink {version[0]}.{version[1]} cannot assemble for {chip}: {log}",
            hint="pip install -U nvidia-nvjitlink",
        )
    return InternalError(f"nvJitLink refuses the generated PTX for {chip}: {log}")


# ---- many kernels, cached -----------------------------------------------------------------------


def compile_kernels(
    kernels: Mapping[str, Kernel],
    target: Target,
    *,
    cache: Path | None = None,
    processes: int | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> dict[str, CompiledKernel]:
    """Machine code for every kernel, by its key.

    cache: a folder of compiled kernels by content (made when missing; None for no cache).
    processes: at most so many at once; default one a core. progress: called with what is done and
    how much there is. A corrupt cache entry is compiled again.
    """
    texts = {key: str(kernel.module) for key, kernel in kernels.items()}
    files = {key: _entry(cache, text, target) for key, text in texts.items()}
    found = {key: read_entry(files[key]) for key in kernels}
    missing = [key for key in kernels if found[key] is None]
    logger.debug("%d kernels, %d to compile for %s", len(kernels), len(missing), target.name)
    jobs = [(texts[key], target) for key in missing]

    def done(index: int, result: tuple[str, Cubin]) -> None:
        found[missing[index]] = result
        write_entry(files[missing[index]], *result)
        report()

    def report() -> None:
        if progress is not None:
            left = sum(entry is None for entry in found.values())
            progress("compiling kernels", len(found) - left, len(found))

    report()
    workers.compile_all(compile_text, jobs, missing, processes or workers.available_cores(), done)
    compiled = {}
    for key, kernel in kernels.items():
        entry = found[key]
        if entry is None:
            raise InternalError(f"kernel '{key}' was not compiled")
        ptx, cubin = entry
        compiled[key] = CompiledKernel(
            kernel.launch, ptx, cubin.code, target.chip, cubin.registers, cubin.spill_bytes
        )
    return compiled


def compile_kernel(kernel: Kernel, target: Target, *, cache: Path | None = None) -> CompiledKernel:
    """One kernel, in this process."""
    return compile_kernels({"kernel": kernel}, target, cache=cache, processes=1)["kernel"]


def compile_text(text: str, target: Target) -> tuple[str, Cubin]:
    """PTX and machine code of a kernel's module as text; what a compiler process runs."""
    with ir.Context():
        ptx = to_ptx(ir.Module.parse(text), target)
    return ptx, assemble(ptx, target.chip)


def _entry(cache: Path | None, text: str, target: Target) -> Path | None:
    if cache is None:
        return None
    version = ".".join(str(part) for part in _nvjitlink().version())
    parts = (str(_FORMAT), SUPPORTED_LLVM, version, pipeline(target), text)
    return cache / f"{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()}.kernel"


def read_entry(path: Path | None) -> tuple[str, Cubin] | None:
    """A cached kernel, or None where there is none or it is damaged (which is logged)."""
    if path is None or not path.exists():
        return None
    try:
        head, _, body = path.read_bytes().partition(b"\n")
        header = json.loads(head)
        if hashlib.sha256(body).hexdigest() != header["sha256"]:
            raise ValueError("wrong checksum")
        split = int(header["ptx_bytes"])
        cubin = Cubin(body[split:], int(header["registers"]), int(header["spill_bytes"]))
        return body[:split].decode(), cubin
    except (OSError, ValueError, KeyError, TypeError) as error:
        logger.warning("%s: damaged cache entry (%s), compiling again", path, error)
        return None


def write_entry(path: Path | None, ptx: str, cubin: Cubin) -> None:
    """Store a kernel atomically. A folder that cannot be written is warned about, never fatal."""
    if path is None:
        return
    text = ptx.encode()
    body = text + cubin.code
    header = {
        "ptx_bytes": len(text),
        "registers": cubin.registers,
        "spill_bytes": cubin.spill_bytes,
        "sha256": hashlib.sha256(body).hexdigest(),
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            file.write(json.dumps(header).encode() + b"\n" + body)
    except OSError as error:
        warn_unwritable(path.parent, error, logger)
