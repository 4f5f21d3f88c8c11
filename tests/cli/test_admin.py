"""`nnsight-lab admin` where it cannot do what it is asked: one line each."""

import pytest

from nnsight_lab.cli.main import main


def refused(capsys, *words):
    """The line that says why."""
    assert main(["admin", *words]) == 1
    return capsys.readouterr().err


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://host", "8000"])
def test_what_is_no_address_is_told_the_form_of_one(capsys, url):
    line = refused(capsys, url, "leases")
    assert "is no address: http://host:port, or unix:/path" in line
    assert line.count("\n") == 1


# A client of a Unix socket that cannot connect leaves its own.
@pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "unix:/nowhere/lab.sock"])
def test_a_server_that_is_not_there_is_one_line(capsys, url):
    line = refused(capsys, url, "edits", "--json")
    assert "does not answer" in line
    assert line.count("\n") == 1


def test_a_token_file_that_is_not_there_is_named(capsys, tmp_path):
    path = tmp_path / "none"
    assert str(path) in refused(capsys, "http://127.0.0.1:9", "--token-file", str(path), "leases")


def test_a_token_is_no_argument(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["admin", "http://127.0.0.1:9", "--token", "secret", "leases"])
    assert ended.value.code == 2
