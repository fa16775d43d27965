"""Whose secret is taken: a file of this user's own."""

import os

import pytest

from xtrain.backends.handshake import read_secret


@pytest.mark.verifies("xtrain.backends.handshake:read_secret")
def test_a_secret_in_another_users_file_is_refused(tmp_path, monkeypatch):
    """Who owns the file can read it and change its mode, whatever that is now."""
    file = tmp_path / "secret"
    file.write_bytes(b"sixteen in file.")
    file.chmod(0o600)
    monkeypatch.delenv("XTRAIN_SECRET", raising=False)
    monkeypatch.setenv("XTRAIN_SECRET_FILE", str(file))
    assert read_secret() == b"sixteen in file."
    owner = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    with pytest.raises(ValueError, match="must belong to you"):
        read_secret()
