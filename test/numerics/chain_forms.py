"""Chains of every form that YOLO26 has, and of others, small enough for the simulator."""

from chain_cases import ChainCase, Link, Part

TWO = ChainCase(5, 7, 24, (Link(32), Link(16, (Part(32, 0),))))

# ---- a depthwise first stage --------------------------------------------------------------------

DEPTHWISE = [
    # A class head's, at two strides.
    ChainCase(
        7, 9, 16, (Link(16), Link(24, (Part(16, 0),)), Link(8, (Part(24, 1),), silu=False)),
        kernel=3, depthwise=True,
    ),
    ChainCase(
        8, 9, 6, (Link(6, add="argument"), Link(16, (Part(6, 0),))),
        kernel=3, stride=2, batch=2, depthwise=True, stored=(0,),
    ),
    ChainCase(20, 20, 80, (Link(80), Link(80, (Part(80, 0),))), kernel=3, depthwise=True),
]  # fmt: skip
DIVISIBLE_DEPTHWISE = ChainCase(
    6, 7, 32, (Link(32), Link(40, (Part(32, 0),)), Link(24, (Part(40, 1),))),
    kernel=3, depthwise=True, stored=(0,),
)  # fmt: skip
"""Of which every stage has channels for two blocks."""

# ---- 1x1 stages, and first ones of any kernel ---------------------------------------------------

CHAINS = [
    # A C3k2's first convolution, of which half goes on and all is stored.
    ChainCase(5, 8, 32, (Link(32), Link(24, (Part(16, 0, 16),))), stored=(0,)),
    # Its last: two sources from outside, one from inside.
    ChainCase(4, 5, 16, (Link(16), Link(32, (Part(16), Part(8), Part(16, 0))))),
    # An attention block: projection with residual, its two layers, the block's own last one.
    ChainCase(
        5, 4, 32,
        (
            Link(32, silu=False, add="argument"),
            Link(64, (Part(32, 0),)),
            Link(32, (Part(64, 1),), silu=False, add=0),
            Link(48, (Part(16), Part(32, 2))),
        ),
        stored=(2,),
    ),
    # A box head, and a 3x3 of stride 2 before.
    ChainCase(9, 7, 16, (Link(16), Link(4, (Part(16, 0),), silu=False)), kernel=3),
    ChainCase(9, 10, 8, (Link(24), Link(80, (Part(24, 0),))), kernel=3, stride=2, batch=2),
    # Channels that nothing divides.
    ChainCase(
        3, 5, 6,
        (Link(10, add="argument"), Link(7, (Part(5), Part(6, 0, 3)), add="argument")),
    ),
    ChainCase(4, 4, 80, (Link(80), Link(80, (Part(80, 0),), silu=False)), stored=(0,)),
    *DEPTHWISE[:2],
    # Two readers of one stage, one of them after another stage.
    ChainCase(
        4, 6, 16,
        (Link(16), Link(8, (Part(16, 0),)), Link(16, (Part(8, 1), Part(8, 0, 8)), add=0)),
    ),
]  # fmt: skip
ATTENTION_BLOCK = CHAINS[2]
DIVISIBLE = (0, 1, 2, 4, 6)
"""Of `CHAINS`: every stage has channels for two blocks."""

# ---- a first stage of several taps, which may read a window -------------------------------------

DOWN = ChainCase(13, 18, 16, (Link(32), Link(16, (Part(32, 0),))), kernel=3, stride=2)
"""Two stages, the first of stride 2; 7 x 9 pixels of output."""
C3K2_END = ChainCase(
    9, 11, 8,
    (Link(16, add="argument"), Link(24, (Part(16), Part(8), Part(16, 0)))),
    kernel=3, batch=2,
)  # fmt: skip
"""The end of a C3k2: a residual and sources from outside."""
WINDOWS = [
    # Two pixels of four channels in a product of eight; K ends in half a product.
    ChainCase(8, 8, 4, (Link(8), Link(8, (Part(8, 0),))), kernel=3),
    ChainCase(7, 10, 12, (Link(10), Link(4, (Part(10, 0),), silu=False)), kernel=3, stride=2),
    # Rows of the window narrower and wider than a team of threads; a larger kernel; stride 3.
    ChainCase(12, 12, 64, (Link(16), Link(8, (Part(16, 0),))), kernel=3),
    ChainCase(11, 9, 8, (Link(8), Link(8, (Part(8, 0),))), kernel=5, stride=2),
    ChainCase(16, 17, 8, (Link(16), Link(8, (Part(16, 0),))), kernel=3, stride=3, batch=2),
    # Channels kept for a later addition, stored twice.
    ChainCase(
        10, 7, 16,
        (Link(16, add="argument"), Link(16, (Part(16, 0),)), Link(24, (Part(8), Part(16, 1)))),
        kernel=3, stored=(0,),
    ),
    # Two inputs, one of them of half the size; two of which one has fewer channels than a chunk.
    ChainCase(12, 10, 24, (Link(16), Link(8, (Part(16, 0),))), kernel=3, joined=((16, 2), (8, 1))),
    ChainCase(9, 8, 16, (Link(8), Link(8, (Part(8, 0),))), kernel=3, joined=((14, 1), (2, 1))),
]  # fmt: skip
STORED_WINDOW = WINDOWS[5]

# ---- several stages of more than one tap --------------------------------------------------------

BOTTLENECK = ChainCase(
    9, 11, 16, (Link(8), Link(16, (Part(8, 0),), add="argument", kernel=3)), kernel=3, batch=2
)
BOTTLENECK_AND_C3K2_END = ChainCase(
    10, 7, 32,
    (
        Link(16),
        Link(32, (Part(16, 0),), add="argument", kernel=3),
        Link(24, (Part(16), Part(32, 1))),
    ),
    kernel=3,
)  # fmt: skip
PAIRS = [
    # Channels that no block of 8 divides; K that ends in half a product; a result of 10 channels.
    ChainCase(7, 10, 12, (Link(4), Link(10, (Part(4, 0),), kernel=3, silu=False)), kernel=3),
    ChainCase(6, 9, 8, (Link(12, add="argument"), Link(6, (Part(12, 0),), kernel=5)), kernel=3),
    # Three in a row; a first one of stride 2, of a larger kernel.
    ChainCase(
        8, 6, 8, (Link(8), Link(16, (Part(8, 0),), kernel=3), Link(8, (Part(16, 1),), kernel=3)),
        kernel=3,
    ),
    ChainCase(11, 14, 8, (Link(8), Link(8, (Part(8, 0),), kernel=3)), kernel=5, stride=2, batch=2),
    # A 1x1 layer that is stored, and one that adds it; two inputs, one of half the size.
    ChainCase(
        6, 10, 24,
        (
            Link(16),
            Link(16, (Part(16, 0),), kernel=3),
            Link(16, (Part(16, 1),), add=1),
            Link(24, (Part(8), Part(16, 2))),
        ),
        kernel=3, stored=(1, 2), joined=((16, 2), (8, 1)),
    ),
]  # fmt: skip
STORED_PAIR = PAIRS[4]
