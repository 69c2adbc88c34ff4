"""Folders to hand out are whole, each secret is in one place, and TLS accepts what our authority signed alone."""

import re
import ssl
import stat
from base64 import b64decode
from collections import Counter
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import tomli_w
from cryptography.hazmat.primitives.serialization import load_pem_private_key, load_ssh_private_key

from kit.documents import blocks
from kit.experiments import file_bytes
from kit.refusals import PPFLError, assert_refused
from kit.sites import VISITS
from ppfl.cli import main
from ppfl.federation.certificates import create_authority, create_certificate
from ppfl.federation.provisioning import init_federation, load_secure_sums, registered_sites, revoke_site, revoked_keys
from ppfl.federation.secure_sums import SecureSettings
from ppfl.federation.secure_sums.key_agreement import SiteIdentity
from ppfl.federation.site_settings import load_site
from ppfl.runs import load_experiment

SITES = ["north", "south", "east"]
HOST = "fl.example.org"
SECRETS = {"authority.key": 1, "server.key": 1, "secret": 1, "site.key": len(SITES)}
GUIDE = (Path(__file__).parents[2] / "docs" / "federation.md").read_text()


@pytest.fixture
def file(tmp_path):
    (tmp_path / "experiment.toml").write_text(tomli_w.dumps(VISITS))
    return tmp_path / "experiment.toml"


@pytest.fixture
def out(tmp_path, file):
    init_federation(file, SITES, HOST, tmp_path / "clinics")
    return tmp_path / "clinics"


def secret_of(file):
    """What must not be known: the number that a private key is, or the bytes of a plain secret."""
    content = file.read_bytes()
    if file.name == "secret":
        return content
    load = load_ssh_private_key if file.name == "site.key" else load_pem_private_key
    number = load(content, None).private_numbers().private_value
    return number.to_bytes((number.bit_length() + 7) // 8, "big")


def readable(content):
    """What a file has as it is, and what stands in it as base64."""
    blocks = re.findall(rb"-----BEGIN [A-Z ]+-----(.*?)-----END", content, flags=re.DOTALL)
    return b" ".join([content, *(b64decode(b"".join(block.split())) for block in blocks)])


def test_every_secret_is_in_one_file_that_only_its_owner_reads(out):
    found = {out / name: content for name, content in file_bytes(out).items()}
    private = [path for path in found if path.name in SECRETS]
    assert Counter(path.name for path in private) == SECRETS
    for path in private:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
        assert [other for other, content in found.items() if secret_of(path) in readable(content)] == [path]
    assert not [path for path, content in found.items() if b"PRIVATE" in content and path not in private]
    for folder in (out / "authority", out / "server" / "sites", *(out / "sites" / name for name in SITES)):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_site_gets_its_own_key_and_a_config_to_fill_in_and_the_server_the_experiment(out, file):
    keys, asked = registered_sites(out / "server"), load_experiment(file)
    assert sorted(keys) == sorted(SITES) and len({*keys.values()}) == len(SITES)
    assert load_experiment(out / "server" / "experiment.toml") == asked
    for name in SITES:
        folder = out / "sites" / name
        secure = load_secure_sums(folder / "secure_sums.toml")
        assert secure.settings == SecureSettings() and secure.public_keys.keys() == keys.keys()
        SiteIdentity(name, (folder / "site.key").read_bytes(), secure.public_keys)  # refuses a key of another site
        settings = load_site(folder / "site.toml")
        assert (settings.name, settings.superlink, settings.allow) == (name, f"{HOST}:9092", ())
        assert (folder / settings.root_certificate).is_file() and (folder / settings.private_key).is_file()
        assert settings.data == asked.data


def test_sites_are_added_and_a_revoked_one_is_gone_from_all_lists(out, file):
    before = registered_sites(out / "server")
    init_federation(file, ["west"], HOST, out)
    after = registered_sites(out / "server")
    assert {name: after[name] for name in before} == before and "west" in after
    with pytest.raises(SystemExit, match="0"):
        main(["federation", "revoke", "south", "--folder", str(out)])
    left = ["east", "north", "west"]
    assert sorted(registered_sites(out / "server")) == left and not (out / "sites" / "south").exists()
    assert revoked_keys(out / "server") == [before["south"]]
    for folder in (out / "server", *(out / "sites" / name for name in left)):
        assert sorted(load_secure_sums(folder / "secure_sums.toml").public_keys) == left
    assert_refused(lambda: revoke_site(out, "south"), PPFLError, "'south'", "east, north, west")
    init_federation(file, ["south"], HOST, out)
    assert registered_sites(out / "server")["south"] != before["south"]


def test_what_cannot_be_made_leaves_nothing_behind_and_a_folder_in_use_as_it_is(out, file, tmp_path):
    before = file_bytes(out)
    for sites, host, folder, word in [
        ([], "here", "new", "no site"),
        (["../a"], "here", "new", "cannot be a folder"),
        (["a"], "https://here", "new", "no host name"),
        (["west", "North"], HOST, "clinics", "'north'"),
        (["west"], HOST, ".", "other files"),
    ]:
        assert_refused(lambda: init_federation(file, sites, host, tmp_path / folder), PPFLError, word)
    file.write_text(tomli_w.dumps(VISITS | {"rounds": 4}))
    assert_refused(lambda: init_federation(file, ["west"], HOST, out), PPFLError, "another experiment")
    assert not (tmp_path / "new").exists() and file_bytes(out) == before


def shake_hands(folder, server, trusted, host):
    """A TLS handshake between two ends that exchange bytes in memory; raises what a client would see."""
    (folder / "server.pem").write_bytes(server.certificate + server.private_key)
    serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    serving.load_cert_chain(folder / "server.pem")
    asking = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    asking.verify_flags |= ssl.VERIFY_X509_STRICT
    asking.load_verify_locations(cadata=trusted.certificate.decode())
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = asking.wrap_bio(down, up, server_hostname=host)
    other = serving.wrap_bio(up, down, server_side=True)
    for _ in range(10):
        for end in (client, other):
            with suppress(ssl.SSLWantReadError):
                end.do_handshake()
    assert client.version() == "TLSv1.3" and client.getpeercert() is not None


def test_a_site_connects_to_a_server_that_the_authority_signed_and_to_no_other(tmp_path):
    authority, month = create_authority(), timedelta(days=31)
    server = create_certificate(authority, ["localhost", "127.0.0.1"])
    expired = create_certificate(authority, ["localhost"], days=30, valid_from=datetime.now(UTC) - month)
    forged = create_certificate(server, ["localhost"])  # by someone who took the server's key
    forged = forged._replace(certificate=forged.certificate + server.certificate)
    for host in ("localhost", "127.0.0.1"):
        shake_hands(tmp_path, server, authority, host)
    for shown, trusted, host, reason in [
        (server, create_authority(), "localhost", "unable to get|self-signed|signature"),
        (server, authority, "elsewhere.example", "Hostname mismatch"),
        (expired, authority, "localhost", "expired"),
        (forged, authority, "localhost", "invalid CA|CA cert"),
    ]:
        with pytest.raises(ssl.SSLCertVerificationError, match=reason):
            shake_hands(tmp_path, shown, trusted, host)


def test_the_guide_names_the_folders_files_and_settings_that_there_are(tmp_path):
    (names,) = re.findall(r"federation init \S+ --sites (\S+) ", GUIDE)
    (tmp_path / "experiment.toml").write_text(blocks(GUIDE, "toml")[0])
    init_federation(tmp_path / "experiment.toml", names.split(","), "server", tmp_path / "clinics")
    assert (tmp_path / "clinics" / "sites" / "north" / "start.txt").read_text() in blocks(GUIDE, "sh")
    rows = re.findall(r"^\| `(clinics/\S+)` \| .*? \| (.*) \|$", GUIDE, flags=re.MULTILINE)
    assert len(rows) == 3
    for folder, held in rows:
        for pattern in re.findall(r"`([^`]+)`", held):
            assert list((tmp_path / folder).glob(pattern)), (folder, pattern)
    (table,) = re.findall(r"^\| `\[settings\]` \|.*?\n\n", GUIDE, flags=re.MULTILINE | re.DOTALL)
    assert {*re.findall(r"^\| `(\w+)` \| ", table, flags=re.MULTILINE)} == {*SecureSettings.model_fields}
    (estimator,) = (block for block in blocks(GUIDE, "toml") if "[estimator]" in block)
    (tmp_path / "estimator.toml").write_text(estimator)
    assert load_experiment(tmp_path / "estimator.toml").estimator is not None
