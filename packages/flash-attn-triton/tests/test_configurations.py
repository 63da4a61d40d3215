"""Which tiles a launch gets: by architecture, head size and what takes registers."""

import pytest

from kernel_pytorch.flash_attn_triton.kernels import configurations as tiles

TABLES = {"forward": tiles.FORWARD, "keys": tiles.KEYS, "queries": tiles.QUERIES}
each_table = pytest.mark.parametrize("table", TABLES.values(), ids=list(TABLES))


def chosen(table, architecture=90, depth=64, itemsize=2, is_busy=False):
    return tiles.configuration(table, architecture, depth, itemsize, is_busy)


@each_table
@pytest.mark.parametrize("architecture", [80, 86, 87, 89, 90, 100, 103, 110, 120, 121])
def test_every_head_size_has_one(table, architecture):
    for depth in range(1, 257):
        for itemsize, is_busy in ((2, False), (2, True), (4, False), (4, True)):
            found = chosen(table, architecture, depth, itemsize, is_busy)
            assert min(found.rows, found.columns) >= 16  # a matrix instruction takes no less
            assert found.warps in (4, 8)


@each_table
def test_what_takes_registers_has_smaller_tiles(table):
    plain = chosen(table, depth=64)
    features, unaligned = chosen(table, depth=64, is_busy=True), chosen(table, depth=40)
    both = chosen(table, depth=40, is_busy=True)
    assert features == unaligned == table.busy[64]
    assert both == chosen(table, depth=64, itemsize=4) == table.small[64]
    areas = [tile.rows * tile.columns for tile in (plain, features, both)]
    assert areas == sorted(areas, reverse=True)
    assert areas[0] > areas[2]


@each_table
def test_cards_with_little_shared_memory_share_their_tiles(table):
    assert chosen(table, 89) == chosen(table, 120) == table.half[120][64]
    assert chosen(table, 103) == table.half[100][64]
    assert chosen(table, 90, depth=96) == table.half[90][128]


def test_the_interpreter_takes_one_for_all():
    assert chosen(tiles.KEYS, None, 256, 4, True) == tiles.INTERPRETED
