"""`yolomlir profile MODEL`: the time of every kernel, inside the CUDA graph or on the CPU."""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from yolomlir.api import Model
from yolomlir.cli.model import open_model
from yolomlir.cli.options import add_compile_options, add_device_option, whole
from yolomlir.cli.progress import console
from yolomlir.diagnostics import UserError
from yolomlir.evaluate.outputs import check_picture, check_writable, write_json, write_text
from yolomlir.evaluate.profile import CUPTI, EVENTS, Profile, load_profile, profile
from yolomlir.evaluate.profile_report import (
    chrome_trace,
    markdown,
    print_comparison,
    print_profile,
    roofline,
)
from yolomlir.frontend.download import resolve_weights


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand's parser."""
    parser = subparsers.add_parser(
        "profile",
        help="time every kernel of a model",
        description="Time every kernel of a model: on a GPU inside the CUDA graph.",
    )
    parser.add_argument(
        "model",
        help="a .safetensors, .pt or .ylm file, a name such as yolo26n, or a profile's .json",
    )
    parser.add_argument("--count", type=whole, default=100, metavar="N", help="inferences (100)")
    parser.add_argument("--batch", type=whole, metavar="N", help="images at once (1)")
    parser.add_argument(
        "--method",
        choices=("auto", "cupti", "events"),
        default="auto",
        help="how a GPU's kernels are timed (default: CUPTI where it is installed, else events)",
    )
    parser.add_argument("--against", metavar="FILE", help="compare with a profile's JSON")
    parser.add_argument("--all", action="store_true", help="print every kernel")
    parser.add_argument("--json", metavar="FILE", help="write every figure")
    parser.add_argument("--markdown", metavar="FILE", help="write the tables")
    parser.add_argument("--trace", metavar="FILE", help="write one inference as a Chrome trace")
    parser.add_argument("--roofline", metavar="FILE", help="draw the roofline (.png, .svg)")
    add_compile_options(parser)
    add_device_option(parser)


def run(args: argparse.Namespace) -> int:
    """Run it; the exit code."""
    check_writable(args.json, args.markdown, args.trace)
    check_picture(args.roofline)
    before = load_profile(args.against) if args.against else None
    found = load_profile(args.model) if Path(args.model).suffix == ".json" else _measure(args)
    if args.json:
        write_json(args.json, found.to_dict())
    if args.markdown:
        write_text(args.markdown, markdown(found))
    if args.trace:
        write_json(args.trace, chrome_trace(found))
    if args.roofline:
        roofline(found, args.roofline)
    out = console()  # last: its reader may go away
    print_profile(out, found, every=args.all)
    if before is not None:
        print_comparison(out, before, found, every=args.all)
    return 0


def _measure(args: argparse.Namespace) -> Profile:
    path = resolve_weights(args.model)
    if args.count < 2:
        raise UserError(f"--count {args.count}: expected 2 or more")
    # The program is compiled before CUPTI watches, and loaded again when it does.
    with open_model(path, args, batch=args.batch) as model:
        info, artifact, target = model.info, model.artifact, model.target
    shape = (info.batch, info.height, info.width, 3)
    pixels = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    image = pixels if info.input_dtype == "uint8" else pixels.astype(np.float32) / 255
    method = {"cupti": CUPTI, "events": EVENTS}.get(args.method)

    def load() -> Model:
        return Model(artifact, target=target, threads=args.threads)

    return profile(load, image, count=args.count, method=method)
