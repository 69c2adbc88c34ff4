"""A run says which code made it."""

import shutil
import subprocess

import pytest

from ppfl.runs.provenance import commit_of

ME = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_the_commit_is_that_of_the_packages_own_repository(tmp_path):
    def git(*words):
        done = subprocess.run(("git", "-C", tmp_path, *ME, *words), capture_output=True, text=True, check=True)
        return done.stdout.strip()

    assert commit_of(tmp_path) is None
    git("init")
    assert commit_of(tmp_path) is None  # nothing was committed
    source = tmp_path / "source"
    source.write_text("1")
    git("add", "source")
    git("commit", "-m", "one")
    git("tag", "v1")  # a name may be moved
    commit = git("rev-parse", "HEAD")[:7]
    assert commit_of(tmp_path) == commit
    source.write_text("2")
    assert commit_of(tmp_path) == f"{commit}-dirty"
    installed = tmp_path / ".venv"
    installed.mkdir()
    assert commit_of(installed) is None  # it is somebody else's repository
