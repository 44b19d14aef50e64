"""The tile of a dispatch function, as the user's database or the shipped table knows it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field

from yolomlir.autotune import database, signature, space, tables
from yolomlir.autotune.database import Database
from yolomlir.bindings import ir
from yolomlir.codegen.gpu import attention_problem, chain_tile, conv2d_kinds
from yolomlir.codegen.gpu.attention_problem import AttentionShape
from yolomlir.codegen.gpu.chain_tile import ChainShape
from yolomlir.codegen.gpu.conv_problem import ConvShape
from yolomlir.diagnostics import UserError
from yolomlir.dialects import yolo
from yolomlir.target import Target

logger = logging.getLogger(__name__)

DATABASE, TABLE = "database", "table"


@dataclass
class Lookup:
    """Tiles for one target and precision. Files are read once, at the first question."""

    target: Target
    precision: str
    use_database: bool = True
    use_table: bool = True
    _databases: list[Database] | None = field(default=None, init=False)

    def find(
        self, function: ir.Operation, shape: ConvShape | ChainShape | AttentionShape | None
    ) -> tuple[space.Tile, str] | None:
        """The tile of a function at the `yolo` level, and where it is from; None where unknown.

        shape: of a convolution, a chain or attention, by which the tile is judged: one that is not
        legal (any more, or here) is passed over, with a line in the debug log. Tiles of the other
        families do for maps of any size.
        """
        for key, source in self._candidates(function):
            try:
                tile = space.tile_of(yolo.string(function, "yolo.family"), key)
            except UserError as error:
                logger.debug("%s: %s", source, error)
                continue
            reason = None
            if isinstance(shape, ChainShape):
                reason = chain_tile.objection(tile, shape, self.target, self.precision)
            elif isinstance(shape, AttentionShape):
                reason = attention_problem.objection(tile, shape, self.target, self.precision)
            elif shape is not None:
                reason = conv2d_kinds.objection(tile, shape, self.target, self.precision)
            if reason is None:
                return tile, source
            logger.debug("%s: tile %s is not legal here: %s", source, key, reason)
        return None

    def _candidates(self, function: ir.Operation) -> Iterator[tuple[str, str]]:
        if self.use_database:
            yield from ((key, DATABASE) for key in self._from_databases(function))
        table = tables.shipped(self.target.name) if self.use_table else None
        if table is None:
            return
        for entry in table.near(self.precision, signature.Form.of(function)):
            yield entry.tile, TABLE

    def _from_databases(self, function: ir.Operation) -> Iterator[str]:
        if self._databases is None:
            self._databases = _relevant(self.target)
        if not self._databases:
            return
        text = signature.function_text(function)
        assembler = signature.assembler_version()
        for known in self._databases:
            key = signature.entry_key(
                text, self.target.name, known.device, self.precision, assembler
            )
            if key in known.winners:
                yield known.winners[key].tile
            elif known.stale(signature.text_digest(text), key):
                logger.info(
                    "%s: its tuning is of another version of the compiler: not used",
                    yolo.string(function, "sym_name"),
                )


def _relevant(target: Target) -> list[Database]:
    """The database of this machine's GPU; the only one there is where there is no such GPU."""
    found = list(database.databases(target.name))
    if len(found) < 2:
        return found
    from yolomlir.runtime.device import cuda_device

    device = cuda_device()
    return [d for d in found if not isinstance(device, str) and d.device == device.name]
