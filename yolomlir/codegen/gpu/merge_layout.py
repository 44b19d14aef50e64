"""Tiles of a merge of detections, and the words of shared memory that it needs."""

from __future__ import annotations

from dataclasses import dataclass, replace

from yolomlir.codegen.gpu.detect_layout import BINS, BinPlaces, DetectTile, Layout
from yolomlir.codegen.gpu.detect_maps import DetectShape
from yolomlir.codegen.gpu.selection import SelectionSize
from yolomlir.codegen.gpu.tile import later_option
from yolomlir.target import Target

LANES = 16
"""Lanes of an anchor at most."""
LOADS = 4
"""Groups of logits that a lane reads side by side, where it has many."""
BLOCKS = 8
"""Blocks of a cluster at most, on every GPU that has clusters."""
RECORD = 8
"""Words of a row in shared memory: x1, y1, x2, y2; place among equals; class; key; anchor's key."""


@dataclass(frozen=True)
class MergeTile:
    """threads: of a block. lanes: neighbouring threads that share an anchor's logits. blocks: of a
    cluster, which share an image's anchors. carveout: see `tile.CARVEOUTS`."""

    threads: int
    lanes: int
    blocks: int
    carveout: int = later_option(0)


@dataclass(frozen=True)
class MergeShape:
    """late: the last level, alone. vector: elements of one access to the candidates."""

    late: DetectShape
    vector: int


@dataclass(frozen=True)
class _LateLayout(Layout):
    """Of an exact selection of one level alone, which may have less than is wanted.

    wanted: rows. The shape's `max_det` are the anchors that they may be of.
    """

    wanted: int

    @property
    def stage_two(self) -> SelectionSize:
        """The best logits, or all."""
        candidates = self.shape.candidates
        return SelectionSize(min(self.wanted, candidates), candidates)


@dataclass(frozen=True)
class MergeLayout:
    """Words of shared memory: what the exact selection needs, the bins, the rows."""

    shape: MergeShape
    tile: MergeTile

    @property
    def late(self) -> _LateLayout:
        """Of an exact selection of the last level; the workspace is its."""
        late = self.shape.late
        alone = replace(late, max_det=min(late.max_det, late.anchors))
        tile = DetectTile(self.tile.threads, self.tile.lanes)
        return _LateLayout(alone, tile, late.max_det)

    @property
    def room(self) -> int:
        """Rows of the last level that fit, a power of two: the exact selection's do."""
        return max(64, 1 << (2 * self.shape.late.max_det - 1).bit_length())

    @property
    def room_each(self) -> int:
        """Of each block."""
        return self.room // self.tile.blocks

    @property
    def rows(self) -> int:
        """Candidates and rows of the last level."""
        return self.shape.late.max_det + self.room

    @property
    def places(self) -> BinPlaces:
        """Of the selection among all rows."""
        late = self.late
        cursors = late.selection + max(late.stage_one.words, late.stage_two.words)
        totals = cursors + BINS + 4
        kept = totals + 32 + BLOCKS + 4 + RECORD * self.rows
        return BinPlaces(cursors, totals, kept, self.shape.late.max_det)

    @property
    def counts(self) -> int:
        """A word a block: how many rows it found."""
        return self.places.totals + 32

    @property
    def barriers(self) -> int:
        """Two barriers, that count the bytes of the counts and of the rows."""
        return self.counts + BLOCKS

    @property
    def records(self) -> int:
        """Where the rows begin: the candidates, then each block's."""
        return self.barriers + 4

    @property
    def words(self) -> int:
        """Of all this."""
        return self.places.kept + 2 * self.rows


def default_tile(shape: MergeShape, target: Target) -> MergeTile:
    """As many lanes as keep a lane's loads few; a cluster, where there are any, so that an anchor
    has its lanes at once."""
    late, lanes = shape.late, 1
    while lanes < LANES and lanes * LOADS < late.groups:
        lanes *= 2
    threads, blocks = 512, 1
    while target.clusters and blocks < BLOCKS and blocks * threads < late.anchors * lanes:
        blocks *= 2
    return MergeTile(threads, lanes, blocks)


def tiles(shape: MergeShape, target: Target) -> list[MergeTile]:
    """What is worth to be measured."""
    del shape
    blocks = (1, 2, 4, 8) if target.clusters else (1,)
    counts = (256, 512, 1024)
    return [MergeTile(t, n, b) for t in counts for n in (4, 8, 16) for b in blocks]


__all__ = [
    "BLOCKS", "LANES", "LOADS", "RECORD", "MergeLayout", "MergeShape", "MergeTile", "default_tile",
    "tiles",
]  # fmt: skip
