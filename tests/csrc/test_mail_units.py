"""How processes give each other file descriptors."""

from pathlib import Path

from .programs import assert_all_ok, build_for_host, succeed


def test_units(tmp_path: Path) -> None:
    assert_all_ok(succeed(build_for_host("mail_units", ["collectives/descriptor_mail.cc"], tmp_path)))
