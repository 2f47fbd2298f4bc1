"""The sizes of a batch."""

import numpy as np

from streamloader.augment.layout import Layout, alike


def test_a_dense_batch_has_one_size() -> None:
    layout = Layout.dense(3, 4, 5, 6)

    assert (layout.count, layout.channels, layout.size) == (3, 4, (5, 6))
    assert layout.heights.tolist() == [5, 5, 5]


def test_images_that_differ_have_none() -> None:
    assert Layout(3, np.array([5, 5]), np.array([6, 7])).size is None
    assert Layout(3, np.array([5, 4]), np.array([6, 6])).size is None
    assert Layout.dense(0, 3, 5, 6).size is None


def test_alike_repeats_a_size() -> None:
    heights, widths = alike(2, (3, 4))

    assert (heights.tolist(), widths.tolist()) == ([3, 3], [4, 4])
