"""Pieces of an array that goes through pinned memory."""

from __future__ import annotations

import numpy as np
import pytest

from yolomlir.runtime.window import pieces


@pytest.mark.parametrize(
    ("shape", "most"),
    [
        ((1, 640, 640, 3), 320 << 10),
        ((3, 33, 65, 3), 1000),
        ((2, 5, 7), 1),
        ((4, 9), 1 << 20),
        ((5,), 2),
        ((), 1),
        ((0, 3), 2),
    ],
)
def test_pieces_are_contiguous_and_make_up_the_array(shape: tuple[int, ...], most: int) -> None:
    array = np.zeros(shape, np.int16)
    place = 0
    for index in pieces(shape, array.itemsize, most * array.itemsize):
        piece = array[index]
        assert piece.flags.c_contiguous
        assert piece.size <= most or piece.size == 1
        piece[...] += 1
        assert piece.ctypes.data - array.ctypes.data == place
        place += piece.nbytes
    assert place == array.nbytes
    assert (array == 1).all()


def test_a_picture_comes_in_four_pieces() -> None:
    assert len(list(pieces((1, 640, 640, 3), 1, 320 << 10))) == 4
