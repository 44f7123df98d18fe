"""Keys as files: who gets what, who may read it, and what is refused."""

from __future__ import annotations

import stat

import pytest

from ipc.keys import KeyTrouble, make, read_client, read_server


def test_each_side_gets_what_it_needs_and_no_more(tmp_path):
    assert make(tmp_path, ["a", "b"]) == [tmp_path / "server", tmp_path / "a", tmp_path / "b"]
    server, a, b = read_server(tmp_path / "server"), read_client(tmp_path / "a"), read_client(tmp_path / "b")
    assert server.clients == {a.own.public: "a", b.own.public: "b"}
    assert a.server == b.server == server.own.public
    secrets = {server.own.secret, a.own.secret, b.own.secret}
    assert len(secrets) == 3
    files = {str(path.relative_to(tmp_path)): path for path in tmp_path.rglob("*") if path.is_file()}
    assert set(files) == {
        *("server/server.key", "server/clients/a.pub", "server/clients/b.pub"),
        *("a/client.key", "a/server.pub", "b/client.key", "b/server.pub"),
    }
    for name, path in files.items():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, name
        assert any(secret in path.read_text() for secret in secrets) == name.endswith(".key")
    for path in tmp_path.rglob("*"):
        assert path.is_file() or stat.S_IMODE(path.stat().st_mode) == 0o700


def test_a_client_that_comes_later_changes_nothing_for_the_others(tmp_path):
    make(tmp_path, ["a"])
    before = read_server(tmp_path)
    make(tmp_path, ["b"])
    after = read_server(tmp_path)
    assert after.own == before.own
    assert sorted(after.clients.values()) == ["a", "b"]
    with pytest.raises(KeyTrouble, match="is there already; remove it"):
        make(tmp_path, ["b"])
    assert read_server(tmp_path) == after


def test_the_directory_in_which_both_were_made_will_do_for_either(tmp_path):
    make(tmp_path, ["client"])
    assert read_server(tmp_path) == read_server(tmp_path / "server")
    assert read_client(tmp_path) == read_client(tmp_path / "client")


@pytest.mark.parametrize("name", ["", "server", "a/b", "..", "-x", "x" * 65])
def test_names_that_cannot_be(tmp_path, name):
    with pytest.raises(KeyTrouble, match="must be a plain word"):
        make(tmp_path, [name])
    assert list(tmp_path.iterdir()) == []


def test_what_others_can_read_is_no_secret(tmp_path):
    make(tmp_path, ["client"])
    (tmp_path / "client" / "client.key").chmod(0o640)
    with pytest.raises(KeyTrouble, match=r"can be read by others; try: chmod 600 .*client.key"):
        read_client(tmp_path)


def test_keys_that_are_none(tmp_path):
    with pytest.raises(KeyTrouble, match=r"holds no server.key; make keys with: speclane keys"):
        read_server(tmp_path)
    make(tmp_path, ["client"])
    secret = read_client(tmp_path).own.secret
    key = tmp_path / "client" / "client.key"
    for content in ("", "short\n", key.read_text().splitlines()[0], "\x00" * 40):
        key.write_text(content)
        with pytest.raises(KeyTrouble, match="holds no") as refused:
            read_client(tmp_path)
        assert secret not in str(refused.value)
    key.unlink()
    (tmp_path / "server" / "clients" / "client.pub").unlink()
    with pytest.raises(KeyTrouble, match=r"holds no client.key"):
        read_client(tmp_path)
    with pytest.raises(KeyTrouble, match="lists nobody"):
        read_server(tmp_path)


def test_a_secret_is_in_no_text_of_its_pair(tmp_path):
    make(tmp_path, ["client"])
    keys = read_client(tmp_path)
    assert keys.own.secret not in repr(keys) + str(keys.own)
