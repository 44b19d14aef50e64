"""Decode and two-stage top-k at the linalg level.

Both stages choose the `max_det` largest of a list of logits: the float's bits make an unsigned key
of the same order, the smallest key chosen is found bit by bit, and what is chosen is ordered by
counting how many come before. So the result is a function of the values alone: larger logits
first, equal ones by lower index, and -0 equal to 0. The sigmoid keeps the order and is applied to
the winners only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from yolomlir.codegen.linalg_text import Mapped, Tensor, Writer

_SIGN_BIT = -(1 << 31)
_COLUMNS = 6
"""Of a detection: x1, y1, x2, y2, score, class."""
_WITH_KEYS = 8
"""Of a candidate: its logit and the largest of its anchor, besides."""


@dataclass(frozen=True)
class _Level:
    """One level's maps of one image, flattened: boxes [H*W, 4] and logits [H*W, classes]."""

    boxes: Tensor
    logits: Tensor
    width: int
    stride: int
    first: int

    @property
    def anchors(self) -> int:
        return self.boxes.shape[0]


def write(
    w: Writer,
    boxes: Sequence[Tensor],
    logits: Sequence[Tensor],
    *,
    strides: Sequence[int],
    max_det: int,
) -> Tensor:
    """Rows [N, max_det, 6] of x1, y1, x2, y2 (input pixels), score, class, best first.

    boxes: [N, H, W, 4] distances in strides to left, top, right, bottom of the anchor, a level
    each; logits: [N, H, W, classes].
    """
    detections = _Detections(w, boxes, logits, strides)
    return _each_image(w, (boxes[0].shape[0], max_det, _COLUMNS), detections.rows)


def write_candidates(
    w: Writer,
    boxes: Sequence[Tensor],
    logits: Sequence[Tensor],
    *,
    strides: Sequence[int],
    max_det: int,
) -> Tensor:
    """Rows [N, max_det, 8]: what `write` gives of these levels, each row followed by its logit and
    by its anchor's largest."""
    detections = _Detections(w, boxes, logits, strides)
    return _each_image(w, (boxes[0].shape[0], max_det, _WITH_KEYS), detections.rows)


def write_merge(
    w: Writer, candidates: Tensor, box: Tensor, logits: Tensor, *, stride: int
) -> Tensor:
    """Rows [N, max_det, 6]: the best of the candidates [N, max_det, 8] and of one more level's.

    Both are in order and each has all that can be among the best of both, so it is a merge: by the
    logit, then the anchor's largest, then the place, the candidates before the level's own.
    """
    batch, max_det, columns = candidates.shape
    detections = _Detections(w, [box], [logits], [stride])

    def merged(_: Sequence[int]) -> Tensor:
        later = detections.rows((max_det, columns))
        earlier = w.extract_slice(candidates, ["%image", 0, 0], [1, max_det, columns], rank=2)
        return _merged(w, w.concat([earlier, later], dim=0), max_det)

    return _each_image(w, (batch, max_det, _COLUMNS), merged)


def _each_image(
    w: Writer, shape: tuple[int, int, int], rows_of: Callable[[Sequence[int]], Tensor]
) -> Tensor:
    """A tensor of this shape, of every image `%image` what `rows_of` writes of (rows, columns)."""
    batch, count, columns = shape
    out = w.empty(shape)
    result = Tensor(w.name(), out.shape)
    opening = (
        f"{result.name} = scf.forall (%image) in ({batch}) "
        f"shared_outs(%rows = {out.name}) -> ({out.type}) {{"
    )
    with w.region(opening):
        rows = rows_of((count, columns))
        with w.region("scf.forall.in_parallel {"):
            where = f"[%image, 0, 0] [1, {count}, {columns}] [1, 1, 1]"
            w.line(
                f"tensor.parallel_insert_slice {rows.name} into %rows{where} "
                f": {rows.type} into {out.type}"
            )
    return result


class _Detections:
    """The maps of some levels, flattened, and every anchor's largest logit."""

    def __init__(
        self,
        w: Writer,
        boxes: Sequence[Tensor],
        logits: Sequence[Tensor],
        strides: Sequence[int],
    ) -> None:
        self.w, self.widths, self.strides = w, [x.shape[2] for x in boxes], strides
        self.boxes, self.logits = [_flatten(w, x) for x in boxes], [_flatten(w, x) for x in logits]
        self.best = w.concat([_best_class(w, x) for x in self.logits], dim=1)

    def rows(self, shape: Sequence[int]) -> Tensor:
        """The best rows of `%image`, with `_COLUMNS` columns or `_WITH_KEYS`."""
        w, levels, first = self.w, list[_Level](), 0
        parts = zip(self.boxes, self.logits, self.widths, self.strides, strict=True)
        for boxes, logits, width, stride in parts:
            level = _Level(_image(w, boxes), _image(w, logits), width, stride, first)
            levels.append(level)
            first += level.anchors
        best = w.extract_slice(self.best, ["%image", 0], [1, self.best.shape[1]], rank=1)
        return _one_image(w, levels, best, *shape)


def _flatten(w: Writer, x: Tensor) -> Tensor:
    n, height, width, channels = x.shape
    return w.reshape(x, (n, height * width, channels), [[0], [1, 2], [3]])


def _image(w: Writer, x: Tensor) -> Tensor:
    return w.extract_slice(x, ["%image", 0, 0], [1, *x.shape[1:]], rank=2)


def _one_image(
    w: Writer, levels: Sequence[_Level], best: Tensor, max_det: int, columns: int
) -> Tensor:
    """Rows [max_det, columns] of one image, or as many as there are logits; best: every anchor's
    largest logit."""
    classes = levels[0].logits.shape[1]
    anchors = _top(w, _keys(w, best), min(max_det, *best.shape))
    candidates = _candidate_logits(w, levels, anchors, classes)
    flat = w.reshape(candidates, (anchors.shape[0] * classes,), [[0, 1]])
    winners = _top(w, _keys(w, flat), min(max_det, *flat.shape))
    scores = w.generic(
        "a",
        [Mapped(winners, "a")],
        Mapped(w.empty(winners.shape), "a"),
        [
            "%i = arith.index_cast %in0 : i32 to index",
            f"%x = tensor.extract {flat.name}[%i] : {flat.type}",
            *_sigmoid(w),
        ],
    )
    keys = (flat, best) if columns == _WITH_KEYS else ()
    return _rows(w, levels, anchors, winners, scores, classes, keys)


def _sigmoid(w: Writer) -> list[str]:
    one = w.constant(1.0)
    return [
        "%n = arith.negf %x : f32",
        "%e = math.exp %n : f32",
        f"%d = arith.addf %e, {one} : f32",
        f"%y = arith.divf {one}, %d : f32",
    ]


def _best_class(w: Writer, logits: Tensor) -> Tensor:
    """An anchor's largest logit: [N, anchors, classes] to [N, anchors]."""
    out = w.filled(logits.shape[:2], float("-inf"))
    body = ["%y = arith.maximumf %out, %in0 : f32"]
    return w.generic("nac", [Mapped(logits, "n, a, c")], Mapped(out, "n, a"), body, reduced="c")


def _keys(w: Writer, x: Tensor) -> Tensor:
    """Unsigned keys in the order of the floats: negative numbers inverted, others' sign bit set."""
    zero, shift, sign = w.constant(0.0), w.constant(31, "i32"), w.constant(_SIGN_BIT, "i32")
    body = [
        f"%z = arith.addf %in0, {zero} : f32",
        "%b = arith.bitcast %z : f32 to i32",
        f"%s = arith.shrsi %b, {shift} : i32",
        f"%m = arith.ori %s, {sign} : i32",
        "%y = arith.xori %b, %m : i32",
    ]
    return w.generic("a", [Mapped(x, "a")], Mapped(w.empty(x.shape, "i32"), "a"), body)


def _count(w: Writer, keys: Tensor, predicate: str, bound: str) -> str:
    """How many keys compare so with `bound`, as an i32."""
    body = [
        f"%p = arith.cmpi {predicate}, %in0, {bound} : i32",
        "%one = arith.extui %p : i1 to i32",
        "%y = arith.addi %out, %one : i32",
    ]
    total = Mapped(w.filled((), 0, "i32"), "")
    count = w.generic("a", [Mapped(keys, "a")], total, body, reduced="a")
    return w.op(f"tensor.extract {count.name}[] : {count.type}")


def _threshold(w: Writer, keys: Tensor, count: int) -> str:
    """The `count`-th largest key: the largest t that at least `count` keys reach, bit by bit."""
    zero, one, bits = (w.constant(v, "index") for v in (0, 1, 32))
    sign, wanted, start = (
        w.constant(_SIGN_BIT, "i32"),
        w.constant(count, "i32"),
        w.constant(0, "i32"),
    )
    result, bit, known = w.name(), w.name(), w.name()
    opening = (
        f"{result} = scf.for {bit} = {zero} to {bits} step {one} "
        f"iter_args({known} = {start}) -> (i32) {{"
    )
    with w.region(opening):
        place = w.op(f"arith.index_cast {bit} : index to i32")
        mask = w.op(f"arith.shrui {sign}, {place} : i32")
        candidate = w.op(f"arith.ori {known}, {mask} : i32")
        reached = _count(w, keys, "uge", candidate)
        enough = w.op(f"arith.cmpi sge, {reached}, {wanted} : i32")
        best = w.op(f"arith.select {enough}, {candidate}, {known} : i32")
        w.line(f"scf.yield {best} : i32")
    return result


def _top(w: Writer, keys: Tensor, count: int) -> Tensor:
    """Indices (i32) of the `count` largest keys, largest first, equal ones by lower index."""
    threshold = _threshold(w, keys, count)
    greater = _count(w, keys, "ugt", threshold)
    ties = w.op(f"arith.subi {w.constant(count, 'i32')}, {greater} : i32")
    return _ordered(w, keys, _chosen(w, keys, count, threshold, ties))


def _chosen(w: Writer, keys: Tensor, count: int, threshold: str, ties: str) -> Tensor:
    """Indices, rising, of the keys above the threshold and of the first `ties` keys equal to it.

    Every index is written at the next free place and the place moves on if it was chosen; one
    place more than `count` takes the writes after the last.
    """
    zero, one, size = (w.constant(v, "index") for v in (0, 1, keys.shape[0]))
    none, out = w.constant(0, "i32"), w.empty((count + 1,), "i32")
    result, index, chosen, place, left = (w.name() for _ in range(5))
    kinds = f"{out.type}, index, i32"
    opening = (
        f"{result}:3 = scf.for {index} = {zero} to {size} step {one} iter_args("
        f"{chosen} = {out.name}, {place} = {zero}, {left} = {ties}) -> ({kinds}) {{"
    )
    with w.region(opening):
        key = w.op(f"tensor.extract {keys.name}[{index}] : {keys.type}")
        above = w.op(f"arith.cmpi ugt, {key}, {threshold} : i32")
        equal = w.op(f"arith.cmpi eq, {key}, {threshold} : i32")
        some = w.op(f"arith.cmpi sgt, {left}, {none} : i32")
        tie = w.op(f"arith.andi {equal}, {some} : i1")
        taken = w.op(f"arith.ori {above}, {tie} : i1")
        value = w.op(f"arith.index_cast {index} : index to i32")
        written = w.op(f"tensor.insert {value} into {chosen}[{place}] : {out.type}")
        step = w.op(f"arith.index_castui {taken} : i1 to index")
        following = w.op(f"arith.addi {place}, {step} : index")
        used = w.op(f"arith.extui {tie} : i1 to i32")
        remaining = w.op(f"arith.subi {left}, {used} : i32")
        w.line(f"scf.yield {written}, {following}, {remaining} : {kinds}")
    return w.extract_slice(Tensor(f"{result}#0", out.shape, "i32"), [0], [count])


def _ordered(w: Writer, keys: Tensor, chosen: Tensor) -> Tensor:
    """The chosen indices by falling key, equal keys by lower index."""
    count = chosen.shape[0]
    gather = [
        "%i = arith.index_cast %in0 : i32 to index",
        f"%y = tensor.extract {keys.name}[%i] : {keys.type}",
    ]
    own = w.generic("a", [Mapped(chosen, "a")], Mapped(w.empty((count,), "i32"), "a"), gather)
    before = [
        "%i = linalg.index 0 : index",
        "%j = linalg.index 1 : index",
        "%gt = arith.cmpi ugt, %in1, %in0 : i32",
        "%eq = arith.cmpi eq, %in1, %in0 : i32",
        "%lt = arith.cmpi ult, %j, %i : index",
        "%tie = arith.andi %eq, %lt : i1",
        "%first = arith.ori %gt, %tie : i1",
        "%one = arith.extui %first : i1 to i32",
        "%y = arith.addi %out, %one : i32",
    ]
    inputs, out = [Mapped(own, "a"), Mapped(own, "b")], w.filled((count,), 0, "i32")
    rank = w.generic("ab", inputs, Mapped(out, "a"), before, reduced="b")
    return _by_rank(w, chosen, rank)


def _by_rank(w: Writer, chosen: Tensor, rank: Tensor) -> Tensor:
    """Each of the chosen at the place that its rank is."""
    count = chosen.shape[0]
    zero, one, size = (w.constant(v, "index") for v in (0, 1, count))
    init = w.empty((count,), "i32")
    result, index, ordered = w.name(), w.name(), w.name()
    opening = (
        f"{result} = scf.for {index} = {zero} to {size} step {one} "
        f"iter_args({ordered} = {init.name}) -> ({init.type}) {{"
    )
    with w.region(opening):
        value = w.op(f"tensor.extract {chosen.name}[{index}] : {chosen.type}")
        place = w.op(f"tensor.extract {rank.name}[{index}] : {rank.type}")
        at = w.op(f"arith.index_cast {place} : i32 to index")
        written = w.op(f"tensor.insert {value} into {ordered}[{at}] : {init.type}")
        w.line(f"scf.yield {written} : {init.type}")
    return Tensor(result, init.shape, "i32")


def _merged(w: Writer, rows: Tensor, count: int) -> Tensor:
    """The first `count` rows, without keys, of rows in order of the keys."""
    both = rows.shape[0]
    columns = [w.extract_slice(rows, [0, _COLUMNS + i], [both, 1]) for i in (0, 1)]
    logits, largest = (_keys(w, w.reshape(c, (both,), [[0, 1]])) for c in columns)
    before = [
        "%i = linalg.index 0 : index",
        "%j = linalg.index 1 : index",
        "%gt = arith.cmpi ugt, %in1, %in0 : i32",
        "%eq = arith.cmpi eq, %in1, %in0 : i32",
        "%lgt = arith.cmpi ugt, %in3, %in2 : i32",
        "%leq = arith.cmpi eq, %in3, %in2 : i32",
        "%lt = arith.cmpi ult, %j, %i : index",
        "%place = arith.andi %leq, %lt : i1",
        "%anchor = arith.ori %lgt, %place : i1",
        "%tie = arith.andi %eq, %anchor : i1",
        "%first = arith.ori %gt, %tie : i1",
        "%one = arith.extui %first : i1 to i32",
        "%y = arith.addi %out, %one : i32",
    ]
    inputs = [Mapped(x, dim) for x in (logits, largest) for dim in "ab"]
    out = Mapped(w.filled((both,), 0, "i32"), "a")
    rank = w.generic("ab", inputs, out, before, reduced="b")
    number = ["%i = linalg.index 0 : index", "%y = arith.index_cast %i : index to i32"]
    numbers = w.generic("a", [], Mapped(w.empty((both,), "i32"), "a"), number)
    best = w.extract_slice(_by_rank(w, numbers, rank), [0], [count])
    body = [
        "%i = arith.index_cast %in0 : i32 to index",
        "%c = linalg.index 1 : index",
        f"%y = tensor.extract {rows.name}[%i, %c] : {rows.type}",
    ]
    out = Mapped(w.empty((count, _COLUMNS)), "a, c")
    return w.generic("ac", [Mapped(best, "a")], out, body)


def _candidate_logits(w: Writer, levels: Sequence[_Level], anchors: Tensor, classes: int) -> Tensor:
    """The logits [max_det, classes] of stage one's anchors."""
    body = ["%a = arith.index_cast %in0 : i32 to index", "%c = linalg.index 1 : index"]
    for i, level in enumerate(levels):
        body += _local(w, level, f"%i{i}", "%a")
        body.append(f"%v{i} = tensor.extract {level.logits.name}[%i{i}, %c] : {level.logits.type}")
    body += _by_level(w, levels, "%a", "%v", "%y")
    out = w.empty((anchors.shape[0], classes))
    return w.generic("ac", [Mapped(anchors, "a")], Mapped(out, "a, c"), body)


def _local(w: Writer, level: _Level, name: str, anchor: str) -> list[str]:
    """Lines that define `name`: the anchor's place in its level, clamped where it is elsewhere."""
    zero, last = w.constant(0, "index"), w.constant(level.anchors - 1, "index")
    first = w.constant(level.first, "index")
    return [
        f"{name}r = arith.subi {anchor}, {first} : index",
        f"{name}m = arith.maxsi {name}r, {zero} : index",
        f"{name} = arith.minsi {name}m, {last} : index",
    ]


def _by_level(
    w: Writer, levels: Sequence[_Level], anchor: str, prefix: str, result: str, type_: str = "f32"
) -> list[str]:
    """Lines that define `result` as the one of {prefix}0, {prefix}1, … of the anchor's level."""
    if len(levels) == 1:  # the one there is, under that name
        same = f"{result} = arith.select {result}t, {prefix}0, {prefix}0 : {type_}"
        return [f"{result}t = arith.constant true", same]
    lines, value = [], f"{prefix}0"
    for i, level in enumerate(levels[1:], start=1):
        first = w.constant(level.first, "index")
        name = result if i == len(levels) - 1 else f"{result}s{i}"
        lines.append(f"{result}p{i} = arith.cmpi uge, {anchor}, {first} : index")
        lines.append(f"{name} = arith.select {result}p{i}, {prefix}{i}, {value} : {type_}")
        value = name
    return lines


def _rows(
    w: Writer,
    levels: Sequence[_Level],
    anchors: Tensor,
    winners: Tensor,
    scores: Tensor,
    classes: int,
    keys: Sequence[Tensor],
) -> Tensor:
    """(ax - l, ay - t, ax + r, ay + b) * stride, score and class of every winner; then, where keys
    (the logits that the winners index, the anchors' largest) are given, these of it."""
    count, width = winners.shape[0], _COLUMNS + len(keys)
    zero, one, size = (w.constant(v, "index") for v in (0, 1, count))
    out, columns = w.empty((count, width)), [w.constant(v, "index") for v in range(width)]
    result, row, rows = w.name(), w.name(), w.name()
    opening = (
        f"{result} = scf.for {row} = {zero} to {size} step {one} "
        f"iter_args({rows} = {out.name}) -> ({out.type}) {{"
    )
    with w.region(opening):
        winner = w.op(f"tensor.extract {winners.name}[{row}] : {winners.type}")
        flat = w.op(f"arith.index_cast {winner} : i32 to index")
        per_anchor = w.constant(classes, "index")
        rank = w.op(f"arith.divui {flat}, {per_anchor} : index")
        class_ = w.op(f"arith.remui {flat}, {per_anchor} : index")
        found = w.op(f"tensor.extract {anchors.name}[{rank}] : {anchors.type}")
        w.line(f"%a = arith.index_cast {found} : i32 to index")
        values = _box(w, levels, columns)
        values.append(w.op(f"tensor.extract {scores.name}[{row}] : {scores.type}"))
        number = w.op(f"arith.index_cast {class_} : index to i32")
        values.append(w.op(f"arith.sitofp {number} : i32 to f32"))
        for tensor, place in zip(keys, (flat, "%a"), strict=False):
            values.append(w.op(f"tensor.extract {tensor.name}[{place}] : {tensor.type}"))
        written = rows
        for column, value in zip(columns, values, strict=True):
            written = w.op(f"tensor.insert {value} into {written}[{row}, {column}] : {out.type}")
        w.line(f"scf.yield {written} : {out.type}")
    return Tensor(result, out.shape)


def _box(w: Writer, levels: Sequence[_Level], columns: Sequence[str]) -> list[str]:
    """The four corners, in input pixels, of anchor %a."""
    for i, level in enumerate(levels):
        lines = _local(w, level, f"%i{i}", "%a")
        width = w.constant(level.width, "index")
        lines += [f"%x{i} = arith.remui %i{i}, {width} : index"]
        lines += [f"%y{i} = arith.divui %i{i}, {width} : index"]
        lines += [
            f"%d{side}l{i} = tensor.extract {level.boxes.name}[%i{i}, {columns[side]}] "
            f": {level.boxes.type}"
            for side in range(4)
        ]
        lines.append(f"%s{i} = arith.constant {float(level.stride)} : f32")
        for line in lines:
            w.line(line)
    chosen = [("%x", "%ax", "index"), ("%y", "%ay", "index"), ("%s", "%stride", "f32")]
    chosen += [(f"%d{side}l", f"%side{side}", "f32") for side in range(4)]
    for prefix, name, type_ in chosen:
        for line in _by_level(w, levels, "%a", prefix, name, type_):
            w.line(line)
    half = w.constant(0.5)
    centres = []
    for axis in ("%ax", "%ay"):
        whole = w.op(f"arith.index_cast {axis} : index to i32")
        real = w.op(f"arith.sitofp {whole} : i32 to f32")
        centres.append(w.op(f"arith.addf {real}, {half} : f32"))
    corners = []
    for side in range(4):
        operation = "arith.subf" if side < 2 else "arith.addf"
        corner = w.op(f"{operation} {centres[side % 2]}, %side{side} : f32")
        corners.append(w.op(f"arith.mulf {corner}, %stride : f32"))
    return corners
