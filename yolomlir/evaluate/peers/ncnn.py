"""ncnn on the CPU, up to the head's maps."""

from __future__ import annotations

from pathlib import Path

import ncnn
import numpy as np

from yolomlir.diagnostics import UserError
from yolomlir.evaluate.graph import IMAGE
from yolomlir.evaluate.ncnn_model import build_ncnn
from yolomlir.evaluate.peers.base import Array, HeadPeer, Problem


def make(problem: Problem) -> HeadPeer:
    """A net with float32 arithmetic and ncnn's own choice of algorithms."""
    if problem.batch != 1:
        raise UserError("ncnn runs one image at a time", hint="use --batch 1")
    graph = problem.graph
    param, weights = build_ncnn(graph, height=problem.height, width=problem.width)
    path = Path(problem.folder) / "ncnn.param"
    path.write_text(param, encoding="utf-8")
    path.with_suffix(".bin").write_bytes(weights)
    net = ncnn.Net()
    net.opt.num_threads = problem.threads
    for name in ("use_fp16_packed", "use_fp16_storage", "use_fp16_arithmetic", "use_bf16_storage"):
        setattr(net.opt, name, False)
    if net.load_param(str(path)) or net.load_model(str(path.with_suffix(".bin"))):
        raise UserError("ncnn cannot load the network")
    pixels = problem.float_image[0]

    def run() -> list[Array]:
        extractor = net.create_extractor()
        extractor.input(IMAGE, ncnn.Mat(pixels))
        maps = []
        for name in (*graph.boxes, *graph.classes):
            status, value = extractor.extract(name)
            if status:
                raise RuntimeError(f"ncnn gives {status} for {name}")
            maps.append(np.array(value)[None])
        return maps

    return HeadPeer(run, problem.max_det, "without decoding and top-k")
