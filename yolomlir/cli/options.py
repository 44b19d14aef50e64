"""Options that several subcommands share."""

from __future__ import annotations

import argparse

from yolomlir.diagnostics import UserError


def image_size(text: str) -> tuple[int, int]:
    """`640` or `384x640` (height x width) as (height, width)."""
    sides = text.lower().replace(",", "x").split("x")
    if not 1 <= len(sides) <= 2 or not all(side.strip().isdecimal() for side in sides):
        raise argparse.ArgumentTypeError(f"'{text}' is not a size such as 640 or 384x640")
    return whole(sides[0]), whole(sides[-1])


_LARGEST = 999_999


def whole(text: str) -> int:
    """A whole number of at least 1, of at most six digits."""
    return _whole(text, 1)


def seed(text: str) -> int:
    """A whole number of at least 0, of at most six digits."""
    return _whole(text, 0)


def _whole(text: str, least: int) -> int:
    text = text.strip()
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number of at least {least}")
    if int(text) > _LARGEST:
        raise argparse.ArgumentTypeError(f"'{text}' is more than {_LARGEST}")
    return int(text)


def probability(text: str) -> float:
    """A number in 0..1."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"'{text}' is not a number in 0..1")
    return value


def image_side_check(size: tuple[int, int] | None) -> None:
    """Refuse sides that are no multiples of 32 before anything is fetched or read.

    Raises UserError.
    """
    if size is None:
        return
    from yolomlir.compiler import CompileOptions

    CompileOptions(height=size[0], width=size[1]).resolved()


def add_compile_options(parser: argparse.ArgumentParser) -> None:
    """Add `--imgsz`, `--precision`, `--max-det`, `--no-cache` and `--threads`.

    What was not given is None: the default, or what a `.ylm` file was compiled with.
    """
    parser.add_argument(
        "--imgsz",
        type=image_size,
        metavar="SIZE",
        help="image side, or HEIGHTxWIDTH, in pixels, multiples of 32 (default: 640; "
        "a .ylm file has its own)",
    )
    parser.add_argument(
        "--precision",
        choices=("fp32", "tf32", "fp16"),
        help="arithmetic of products; fp16 stores tensors and weights in 16 bits as well, GPU only "
        "(default: tf32 on a GPU, fp32 on the CPU)",
    )
    parser.add_argument(
        "--max-det", type=whole, metavar="N", help="most detections an image (default: 300)"
    )
    parser.add_argument(
        "--threads", type=whole, metavar="N", help="CPU threads (default: all cores)"
    )
    parser.add_argument("--no-cache", action="store_true", help="compile again, and keep nothing")


def add_level_option(parser: argparse.ArgumentParser) -> None:
    """Add `-O`."""
    parser.add_argument(
        "-O",
        "--level",
        dest="level",
        type=int,
        choices=(0, 1, 2, 3),
        help="optimisation level (default: what was measured to be fastest, else 2; 3 fuses chains "
        "of convolutions on a GPU; on the CPU 3 is 2)",
    )


def add_device_option(parser: argparse.ArgumentParser) -> None:
    """Add `--device`."""
    parser.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="where to run (default: the GPU if there is one, else the CPU)",
    )


def device_target(device: str) -> str:
    """The target for a `--device`; `native` for `auto`, which leaves the choice to the API.

    Raises UserError when a GPU is asked for in vain.
    """
    if device == "auto":
        return "native"
    if device == "cpu":
        return "cpu"
    from yolomlir.runtime.device import cuda_device

    found = cuda_device()
    if isinstance(found, str):
        raise UserError(f"--device cuda: {found}", hint="--device cpu runs on the CPU")
    if found.target is None:
        capability = ".".join(map(str, found.capability))
        raise UserError(
            f"--device cuda: {found.name} has compute capability {capability}, which "
            "yolomlir does not target",
            hint="--device cpu runs on the CPU",
        )
    return found.target
