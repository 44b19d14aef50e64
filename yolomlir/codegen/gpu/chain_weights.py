"""The weights of a chain's stages by bulk copies: where each step's lie, and in which order.

`runtime/packing.py` stores a stage's weights block after block of a cluster and step after step, as
they lie in a slot of the ring, zeros for channels and elements of K that are none. So one copy of
one thread brings a step, whatever its size.
"""

from __future__ import annotations

import dataclasses

from yolomlir.codegen.gpu.builder import Buffer, Int, KernelBuilder
from yolomlir.codegen.gpu.bulk_weights import BulkRing, Route
from yolomlir.codegen.gpu.chain_problem import ChainProblem
from yolomlir.codegen.gpu.chain_store import direct_of
from yolomlir.codegen.gpu.chain_tile import ChainPlan
from yolomlir.codegen.gpu.kernel import Parameter


def with_orders(problem: ChainProblem, plan: ChainPlan) -> list[Parameter]:
    """The kernel's parameters, those of weights with the order that bulk copies need."""
    parameters = list(problem.parameters)
    if plan.weight_ring is None:
        return parameters
    stages = zip(problem.stages, plan.stages, direct_of(problem, plan), strict=True)
    for stage, part, paired in stages:
        if part.steps:
            order = (part.n, part.block_k, int(paired))
            parameters[stage.weight] = dataclasses.replace(parameters[stage.weight], packed=order)
    return parameters


def bulk_ring(
    k: KernelBuilder, problem: ChainProblem, plan: ChainPlan, ring: Buffer, rank: Int
) -> BulkRing | None:
    """The ring of weights that come by bulk copies; None where all threads copy them. rank: of the
    block in its cluster, which says whose channels are its own."""
    layout = plan.weight_ring
    if layout is None:
        return None
    routes: list[Route] = []
    for index, (stage, part) in enumerate(zip(problem.stages, plan.stages, strict=True)):
        weights, size = k.arguments[stage.weight].buffer, part.n * part.block_k
        first = rank * part.steps
        inputs = plan.loaded_rows(index) * part.block_k
        for within in range(part.steps):
            source = (first + within) * size
            target = Int.of(plan.slot(len(routes)) + inputs)
            routes.append(_route(weights, ring, size, source, target))
    at = plan.shared_bytes - plan.barrier_bytes - plan.ring_barrier_bytes
    return BulkRing(k, layout, routes, Int.of(0), at)


def _route(weights: Buffer, ring: Buffer, size: int, source: Int, target: Int) -> Route:
    return Route(weights, ring, size, lambda _: source, lambda _: target)


__all__ = ["bulk_ring", "with_orders"]
