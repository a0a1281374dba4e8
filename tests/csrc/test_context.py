"""Programs that test what context attention adds to attention: calls for tiles of one kind, and copies."""

from pathlib import Path

import pytest

from .programs import SOURCES, assert_all_ok, build, succeed

pytestmark = pytest.mark.gpu


def test_tiles_that_see_received_keys(tmp_path: Path) -> None:
    forward = [str(path.relative_to(SOURCES)) for path in (SOURCES / "attention/sm90/forward").glob("*.cu")]
    sources = [*forward, "attention/sm90/tile_schedule.cu", "common/sm90/tensor_map.cu"]
    assert_all_ok(succeed(build("forward_subset_units", sources, tmp_path)))


def test_received_tiles_and_rows_that_are_copied(tmp_path: Path) -> None:
    sources = ["attention/sm90/received_tiles.cu", "collectives/part_rows.cu"]
    assert_all_ok(succeed(build("part_rows_units", sources, tmp_path)))


def test_stages_of_the_backward_pass(tmp_path: Path) -> None:
    backward = [str(path.relative_to(SOURCES)) for path in (SOURCES / "attention/sm90/backward").glob("*.cu")]
    sources = [*backward, "attention/sm90/tile_schedule.cu", "common/sm90/tensor_map.cu"]
    assert_all_ok(succeed(build("backward_stage_units", sources, tmp_path)))
