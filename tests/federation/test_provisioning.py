"""Folders to hand out: whole, readable by what uses them, and with each secret in one place."""

import re
import stat
from base64 import b64decode
from collections import Counter
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import load_pem_private_key, load_ssh_private_key, load_ssh_public_key

from ppfl.cli import main
from ppfl.core.errors import PPFLError
from ppfl.federation.provisioning import (
    init_federation,
    load_secure_sums,
    registered_sites,
    revoke_site,
    revoked_keys,
)
from ppfl.federation.secure_sums import SecureSettings
from ppfl.federation.secure_sums.key_agreement import SiteIdentity
from ppfl.federation.site_settings import load_site
from ppfl.runs.load import load_experiment, load_settings

EXPERIMENT = """\
name = "clinics"
rounds = 3
[data]
name = "csv"
file = "visits.csv"
client = "patient"
target = "outcome"
[model]
name = "linear"
[algorithm]
name = "fedavg"
lr = 0.1
"""
SITES = ["north", "south", "east"]
SECRETS = {"authority.key", "server.key", "secret", "site.key"}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "experiment.toml").write_text(EXPERIMENT)
    return tmp_path / "experiment.toml"


@pytest.fixture
def out(tmp_path: Path, file: Path) -> Path:
    init_federation(file, SITES, "fl.example.org", tmp_path / "clinics")
    return tmp_path / "clinics"


def files_in(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.rglob("*")) if path.is_file()]


def secret_of(file: Path) -> bytes:
    """What must not be known: the number that a private key is, or the bytes of a plain secret."""
    content = file.read_bytes()
    if file.name == "secret":
        return content
    load = load_ssh_private_key if file.name == "site.key" else load_pem_private_key
    number = load(content, None).private_numbers().private_value
    return number.to_bytes((number.bit_length() + 7) // 8, "big")


def readable(file: Path) -> bytes:
    """A file as it is, and what stands in it as base64."""
    content = file.read_bytes()
    blocks = re.findall(rb"-----BEGIN [A-Z ]+-----(.*?)-----END", content, flags=re.DOTALL)
    return b" ".join([content, *(b64decode(b"".join(block.split())) for block in blocks)])


def test_every_secret_is_in_one_file_that_only_its_owner_reads(out: Path) -> None:
    found = files_in(out)
    private = [path for path in found if path.name in SECRETS]
    assert Counter(path.name for path in private) == {
        "authority.key": 1, "server.key": 1, "secret": 1, "site.key": len(SITES),
    }  # fmt: skip
    for path in private:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
        assert [other for other in found if secret_of(path) in readable(other)] == [path]
    for path in found:
        assert path in private or b"PRIVATE" not in path.read_bytes(), path
    for folder in (out / "authority", out / "server" / "sites", *(out / "sites" / name for name in SITES)):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_site_gets_its_own_key_and_nothing_of_the_others(out: Path) -> None:
    keys = registered_sites(out / "server")
    assert sorted(keys) == sorted(SITES)
    for name in SITES:
        folder = out / "sites" / name
        assert {path.name for path in folder.iterdir()} == {
            "site.key", "authority.pem", "site.toml", "experiment.toml", "secure_sums.toml", "start.txt",
        }  # fmt: skip
        private = load_ssh_private_key((folder / "site.key").read_bytes(), None)
        assert private.public_key() == load_ssh_public_key(keys[name])
        assert len((folder / "start.txt").read_text().splitlines()) == 2
        secure = load_secure_sums(folder / "secure_sums.toml")
        assert secure.settings == SecureSettings() and secure.public_keys.keys() == keys.keys()
        SiteIdentity(name, (folder / "site.key").read_bytes(), secure.public_keys)  # refuses a key of another site
    assert len({*keys.values()}) == len(SITES)


def test_the_server_has_its_certificate_and_the_experiment(out: Path, file: Path) -> None:
    server = out / "server"
    certificate, authority = (
        x509.load_pem_x509_certificate((server / name).read_bytes()) for name in ("server.pem", "authority.pem")
    )
    certificate.verify_directly_issued_by(authority)
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["fl.example.org", "localhost"]
    assert [str(address) for address in names.get_values_for_type(x509.IPAddress)] == ["127.0.0.1"]
    key = load_pem_private_key((server / "server.key").read_bytes(), None)
    assert key.public_key() == certificate.public_key()
    signer = load_pem_private_key((out / "authority" / "authority.key").read_bytes(), None)
    assert signer.public_key() == authority.public_key()
    assert load_experiment(server / "experiment.toml") == load_experiment(file)


def test_an_experiment_keeps_the_name_of_its_file(tmp_path: Path, file: Path) -> None:
    (tmp_path / "visits.toml").write_text(EXPERIMENT.replace('name = "clinics"\n', ""))
    init_federation(tmp_path / "visits.toml", SITES, "fl.example.org", tmp_path / "new")
    assert load_experiment(tmp_path / "new" / "server" / "experiment.toml").name == "visits"


def test_a_sites_config_is_one_to_fill_in(out: Path, file: Path) -> None:
    found = load_settings(out / "sites" / "north" / "site.toml")
    assert found["superlink"] == "fl.example.org:9092" and found["name"] == "north" and found["allow"] == []
    for name in ("root_certificate", "private_key"):
        assert (out / "sites" / "north" / found[name]).is_file()
    settings = load_site(out / "sites" / "north" / "site.toml")
    assert (settings.name, settings.superlink) == ("north", "fl.example.org:9092")
    experiment = load_experiment(file)
    assert type(experiment.data).model_validate(found["data"]) == experiment.data


def test_a_revoked_site_is_gone_from_all_lists(out: Path, file: Path) -> None:
    key = registered_sites(out / "server")["south"]
    revoke_site(out, "south")
    assert sorted(registered_sites(out / "server")) == ["east", "north"]
    assert revoked_keys(out / "server") == [key]
    for folder in (out / "server", out / "sites" / "north", out / "sites" / "east"):
        assert sorted(load_secure_sums(folder / "secure_sums.toml").public_keys) == ["east", "north"]
    assert not (out / "sites" / "south").exists()
    with pytest.raises(PPFLError, match="no site 'south' in .*its sites are: east, north"):
        revoke_site(out, "south")
    init_federation(file, ["south"], "fl.example.org", out)  # with a key of its own, and revoked a second time
    assert registered_sites(out / "server")["south"] != key
    revoke_site(out, "south")
    assert len(revoked_keys(out / "server")) == 2


def test_sites_are_added_later(out: Path, file: Path) -> None:
    before = registered_sites(out / "server")
    init_federation(file, ["west"], "fl.example.org", out)
    after = registered_sites(out / "server")
    assert {name: after[name] for name in before} == before and "west" in after
    assert load_secure_sums(out / "sites" / "north" / "secure_sums.toml").public_keys.keys() == after.keys()
    assert load_settings(out / "sites" / "west" / "site.toml")["superlink"] == "fl.example.org:9092"


@pytest.mark.parametrize(
    ("sites", "host", "found"),
    [
        ([], "here", "no site is named"),
        (["a", "A"], "here", "not all different"),
        (["../a"], "here", "cannot be a folder"),
        (["a"], "https://here", "no host name"),
    ],
)
def test_what_cannot_be_made_leaves_nothing_behind(
    tmp_path: Path, file: Path, sites: list[str], host: str, found: str
) -> None:
    with pytest.raises(PPFLError, match=found):
        init_federation(file, sites, host, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_folder_in_use_is_not_written_to(out: Path, file: Path, tmp_path: Path) -> None:
    before = {path: path.read_bytes() for path in files_in(out)}
    with pytest.raises(PPFLError, match="has a site 'north' already; revoke it first"):
        init_federation(file, ["west", "North"], "fl.example.org", out)
    file.write_text(EXPERIMENT.replace("rounds = 3", "rounds = 4"))
    with pytest.raises(PPFLError, match="was made for another experiment"):
        init_federation(file, ["west"], "fl.example.org", out)
    assert {path: path.read_bytes() for path in files_in(out)} == before
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("")
    with pytest.raises(PPFLError, match="has other files in it"):
        init_federation(file, ["west"], "fl.example.org", tmp_path / "full")


def test_a_file_without_keys_is_refused(tmp_path: Path) -> None:
    (tmp_path / "secure_sums.toml").write_text("[settings]\nmin_sites = 2\n")
    with pytest.raises(PPFLError, match="no table"):
        load_secure_sums(tmp_path / "secure_sums.toml")
    (tmp_path / "secure_sums.toml").write_text("[public_keys]\n[settings]\nmin_sites = 1\n")
    with pytest.raises(PPFLError, match="min_sites"):
        load_secure_sums(tmp_path / "secure_sums.toml")


def test_the_commands_make_folders_and_take_keys_back(
    tmp_path: Path, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new"
    made = ["init", str(file), "--sites", "a,b", "--sites", "c", "--server-host", "10.0.0.1", "--port", "9999"]
    for arguments in ([*made, "--out", str(out)], ["revoke", "b", "--folder", str(out)]):
        with pytest.raises(SystemExit) as ended:
            main(["federation", *arguments])
        assert ended.value.code == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "to site 'c'" in said and "the key of site 'b' is revoked" in said
    assert sorted(registered_sites(out / "server")) == ["a", "c"]
    assert load_site(out / "sites" / "a" / "site.toml").superlink == "10.0.0.1:9999"
    with pytest.raises(SystemExit) as ended:
        main(["federation", "revoke", "z", "--folder", str(out)])
    assert ended.value.code == 2
