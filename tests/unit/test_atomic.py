import pytest

from labkit.atomic import replacing


def test_file_appears_when_the_block_ends(tmp_path):
    target = tmp_path / "new" / "table.csv.gz"
    with replacing(target) as partial:
        partial.write_text("a")
        assert not target.exists()
        assert partial.suffixes == [".csv", ".gz"]
    assert target.read_text() == "a"
    assert list(target.parent.iterdir()) == [target]


def test_error_leaves_the_old_file_and_nothing_else(tmp_path):
    target = tmp_path / "table.csv"
    target.write_text("old")

    def write_half():
        with replacing(target) as partial:
            partial.write_text("half")
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_half()
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]
