"""Options that several subcommands share."""

from __future__ import annotations

import argparse

from yolomlir.diagnostics import UserError


def image_size(text: str) -> tuple[int, int]:
    """`640` or `384x640` (height x width) as (height, width)."""
    sides = text.lower().replace(",", "x").split("x")
    if not 1 <= len(sides) <= 2 or not all(side.strip().isdigit() for side in sides):
        raise argparse.ArgumentTypeError(f"'{text}' is not a size such as 640 or 384x640")
    return int(sides[0]), int(sides[-1])


def add_compile_options(parser: argparse.ArgumentParser) -> None:
    """Add `--imgsz`, `--precision`, `--max-det`, `--no-cache` and `--threads`."""
    parser.add_argument(
        "--imgsz",
        type=image_size,
        default=(640, 640),
        metavar="SIZE",
        help="image side, or HEIGHTxWIDTH, in pixels, multiples of 32 (default: 640)",
    )
    parser.add_argument(
        "--precision",
        choices=("fp32", "tf32"),
        help="arithmetic of products (default: tf32 on a GPU, fp32 on the CPU)",
    )
    parser.add_argument(
        "--max-det", type=int, default=300, metavar="N", help="most detections an image (300)"
    )
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads (default: all cores)")
    parser.add_argument("--no-cache", action="store_true", help="compile again, and keep nothing")


def add_device_option(parser: argparse.ArgumentParser) -> None:
    """Add `--device`."""
    parser.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="where to run (default: the GPU if there is one, else the CPU)",
    )


def device_target(device: str) -> str:
    """The target for a `--device`. Raises UserError when a GPU is asked for in vain."""
    if device == "cpu":
        return "cpu"
    from yolomlir.runtime.device import cuda_device

    found = cuda_device()
    if device == "auto":
        return "cpu" if isinstance(found, str) or not found.target else found.target
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
