"""Tile of a detect kernel, its workspace and shared memory, and the bins that logits fall into.

A bin is a range of logits, 1/64 wide between -20 and 12 (probabilities of 2e-9 and 0.999994), so
that the bins where a network's best anchors lie hold a few each; what lies beyond shares the end
bins. The bin never falls as the logit rises, and NaN has the highest, as it has the highest key.
"""

from __future__ import annotations

from dataclasses import dataclass

from yolomlir.bindings import arith, ir
from yolomlir.codegen.gpu.builder import Int, f32, i32_type
from yolomlir.codegen.gpu.detect_maps import DetectShape
from yolomlir.codegen.gpu.instructions import fma
from yolomlir.codegen.gpu.selection import SelectionSize
from yolomlir.codegen.gpu.tile import later_option

BIN_BITS = 11
BINS = 1 << BIN_BITS
_LOWEST, _BINS_PER_UNIT = -20.0, 64.0
_FIELDS = 8
"""Groups of logits that a lane's word describes, at most."""
_FAST_LIMIT = 512
"""The largest max_det that is chosen by bins."""


def bin_of(x: ir.Value) -> Int:
    """The bin of a logit."""
    place = fma(x, f32(_BINS_PER_UNIT), f32(-_LOWEST * _BINS_PER_UNIT))
    place = arith.maxnumf(arith.minnumf(place, f32(BINS - 1.0)), f32(0.0))
    return Int(arith.fptosi(i32_type(), place))


@dataclass(frozen=True)
class DetectTile:
    """threads: of a block. lanes: neighbouring threads that share an anchor's logits, at most 16
    (a warp has pairs of anchors). carveout: see `tile.CARVEOUTS`."""

    threads: int
    lanes: int
    carveout: int = later_option(0)

    @property
    def anchors(self) -> int:
        """Anchors of a block."""
        return self.threads // self.lanes


@dataclass(frozen=True)
class BinPlaces:
    """Words of shared memory for a selection of the `wanted` by bins.

    cursors: the histogram, then where each bin begins, and a zero behind. totals: 32 words, one a
    warp. kept: two words an element that is kept, of which the second is its key.
    """

    cursors: int
    totals: int
    kept: int
    wanted: int


def _up(count: int, multiple: int = 4) -> int:
    return -(-count // multiple) * multiple


@dataclass(frozen=True)
class Layout:
    """Words of the workspace and of shared memory, and where their parts begin (all multiples of
    16 bytes)."""

    shape: DetectShape
    tile: DetectTile

    # ---- the word that every lane writes of its logits

    @property
    def loads(self) -> int:
        """Groups of an anchor's logits that a lane reads."""
        return -(-self.shape.groups // self.tile.lanes)

    @property
    def fields(self) -> int:
        """Maxima in a lane's word: of each group, or of all where they are too many."""
        return self.loads if self.loads <= _FIELDS else 1

    @property
    def field_bits(self) -> int:
        """Leading bits of the maximum's bin."""
        return min(BIN_BITS, 32 // self.fields)

    @property
    def words_each(self) -> int:
        """Lanes' words that a thread takes when they are read back."""
        each = min(4, self.tile.lanes)
        while each > 1 and each * self.loads > 12:
            each //= 2
        return each

    # ---- the workspace

    @property
    def counters(self) -> int:
        """Finished blocks, a word an image."""
        return _up(self.shape.batch)

    @property
    def keys(self) -> int:
        """Where an image's keys begin, after its histogram of the anchors' bins."""
        return BINS

    @property
    def pairs(self) -> int:
        """Where the bins of the anchors begin, one more than each, two a word."""
        return self.keys + _up(self.shape.anchors)

    @property
    def pair_words(self) -> int:
        """Words of the anchors' bins; those past the last anchor stay zero."""
        return _up(-(-self.shape.anchors // 2))

    @property
    def words(self) -> int:
        """Where the lanes' words begin."""
        return self.pairs + self.pair_words

    @property
    def candidates(self) -> int:
        """Where the candidates of the exact selection begin, two words each."""
        return self.words + _up(self.shape.anchors * self.tile.lanes)

    @property
    def image(self) -> int:
        """Words of one image."""
        return self.candidates + _up(2 * self.shape.candidates)

    @property
    def workspace_bytes(self) -> int:
        """Of all images."""
        return 4 * (self.counters + self.shape.batch * self.image)

    # ---- shared memory of the selection by bins

    @property
    def fast(self) -> bool:
        """Whether there is one."""
        return self.shape.max_det <= _FAST_LIMIT

    @property
    def anchor_limit(self) -> int:
        """Anchors, and kept candidates, that fit: a power of two."""
        return 1 << max(5, (self.shape.max_det + self.shape.max_det // 2 - 1).bit_length())

    @property
    def group_limit(self) -> int:
        """Groups of logits that fit."""
        return 4 * self.anchor_limit

    @property
    def cursors(self) -> int:
        """The candidates' histogram, then where each bin begins, and a zero."""
        return STATE_WORDS

    @property
    def totals(self) -> int:
        """A word a warp."""
        return self.cursors + BINS + 4

    @property
    def places(self) -> BinPlaces:
        """What the selection of the candidates needs."""
        return BinPlaces(self.cursors, self.totals, self.kept, self.shape.max_det)

    @property
    def anchors(self) -> int:
        """The chosen anchors, in no order."""
        return self.totals + 32

    @property
    def anchor_keys(self) -> int:
        """Their keys."""
        return self.anchors + self.anchor_limit

    @property
    def kept(self) -> int:
        """The kept candidates by bins, two words each."""
        return self.anchor_keys + self.anchor_limit

    @property
    def boxes(self) -> int:
        """The chosen anchors' boxes, four words each."""
        return self.kept + 2 * self.anchor_limit

    @property
    def groups(self) -> int:
        """Groups of the anchors' logits that may hold candidates."""
        return self.boxes + 4 * self.anchor_limit

    @property
    def logits(self) -> int:
        """The candidates among these groups' logits: keys, or zeros."""
        return self.groups + self.group_limit

    @property
    def fast_words(self) -> int:
        """Of all this."""
        return self.logits + self.shape.vector * self.group_limit if self.fast else 0

    # ---- shared memory of the exact selection

    @property
    def stage_one(self) -> SelectionSize:
        """The best anchors."""
        return SelectionSize(self.shape.max_det, self.shape.anchors)

    @property
    def stage_two(self) -> SelectionSize:
        """The best of their logits."""
        return SelectionSize(self.shape.max_det, self.shape.candidates)

    @property
    def selection(self) -> int:
        """Where the selection of either stage begins, after the ordered anchors."""
        return STATE_WORDS + _up(self.shape.max_det)

    @property
    def shared_bytes(self) -> int:
        """Of whichever selection needs more."""
        exact = self.selection + max(self.stage_one.words, self.stage_two.words)
        return 4 * max(exact, self.fast_words)


STATE_WORDS = 12
FINISHED, DONE, ANCHORS, GROUPS, CANDIDATES, FIRST, LISTED, LAST, KEPT, CROWDED = range(10)
"""State: the number of this block among the finished; whether the detections are written; the
lists' ends; the first bin of the anchors and how many reach it; the first of the kept candidates
and how many; whether a bin of these holds too many."""

__all__ = [
    "ANCHORS", "BINS", "BIN_BITS", "CANDIDATES", "CROWDED", "DONE", "FINISHED", "FIRST", "GROUPS",
    "KEPT", "LAST", "LISTED", "STATE_WORDS", "BinPlaces", "DetectTile", "Layout", "bin_of",
]  # fmt: skip
