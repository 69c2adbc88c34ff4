"""Folders to hand out are whole, each secret is in one place, and TLS accepts what our authority signed alone."""

import re
import ssl
import stat
from base64 import b64decode
from collections import Counter
from configparser import ConfigParser
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import tomli_w
import yaml
from cryptography import x509
from cryptography.hazmat.primitives.serialization import load_pem_private_key, load_ssh_private_key, load_ssh_public_key

from kit.refusals import PPFLError, SettingError, assert_refused
from kit.sites import VISITS
from ppfl.cli import main
from ppfl.federation.certificates import Issued, create_authority, create_certificate
from ppfl.federation.provisioning import init_federation, load_secure_sums, registered_sites, revoke_site, revoked_keys
from ppfl.federation.secure_sums import SecureSettings
from ppfl.federation.secure_sums.fixed_point import fixed_point
from ppfl.federation.secure_sums.key_agreement import SiteIdentity
from ppfl.federation.site_settings import load_site
from ppfl.runs import Experiment, load_experiment

SITES = ["north", "south", "east"]
HOST = "fl.example.org"
SECRETS = {"authority.key": 1, "server.key": 1, "secret": 1, "site.key": len(SITES)}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "experiment.toml").write_text(tomli_w.dumps(VISITS))
    return tmp_path / "experiment.toml"


@pytest.fixture
def out(tmp_path: Path, file: Path) -> Path:
    init_federation(file, SITES, HOST, tmp_path / "clinics")
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
    assert Counter(path.name for path in private) == SECRETS
    for path in private:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
        assert [other for other in found if secret_of(path) in readable(other)] == [path]
    for path in found:
        assert path in private or b"PRIVATE" not in path.read_bytes(), path
    for folder in (out / "authority", out / "server" / "sites", *(out / "sites" / name for name in SITES)):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_site_gets_its_own_key_nothing_of_the_others_and_a_config_to_fill_in(out: Path, file: Path) -> None:
    keys = registered_sites(out / "server")
    assert sorted(keys) == sorted(SITES) and len({*keys.values()}) == len(SITES)
    names = {"site.key", "authority.pem", "site.toml", "experiment.toml", "secure_sums.toml", "start.txt"}
    for name in SITES:
        folder = out / "sites" / name
        assert {path.name for path in folder.iterdir()} == names
        private = load_ssh_private_key((folder / "site.key").read_bytes(), None)
        assert private.public_key() == load_ssh_public_key(keys[name])
        assert len((folder / "start.txt").read_text().splitlines()) == 2
        secure = load_secure_sums(folder / "secure_sums.toml")
        assert secure.settings == SecureSettings() and secure.public_keys.keys() == keys.keys()
        SiteIdentity(name, (folder / "site.key").read_bytes(), secure.public_keys)  # refuses a key of another site
        settings = load_site(folder / "site.toml")
        assert (settings.name, settings.superlink, settings.allow) == (name, f"{HOST}:9092", ())
        assert (folder / settings.root_certificate).is_file() and (folder / settings.private_key).is_file()
        assert settings.data == load_experiment(file).data


def test_the_server_has_a_certificate_for_its_hosts_and_the_experiment(out: Path, file: Path, tmp_path: Path) -> None:
    certificate = x509.load_pem_x509_certificate((out / "server" / "server.pem").read_bytes())
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == [HOST, "localhost"]
    assert [str(address) for address in names.get_values_for_type(x509.IPAddress)] == ["127.0.0.1"]
    assert load_experiment(out / "server" / "experiment.toml") == load_experiment(file)
    nameless = {name: value for name, value in VISITS.items() if name != "name"}
    (tmp_path / "of-the-file.toml").write_text(tomli_w.dumps(nameless))
    init_federation(tmp_path / "of-the-file.toml", SITES, HOST, tmp_path / "new")
    assert load_experiment(tmp_path / "new" / "server" / "experiment.toml").name == "of-the-file"


def test_sites_are_added_and_a_revoked_one_is_gone_from_all_lists(out: Path, file: Path) -> None:
    before = registered_sites(out / "server")
    init_federation(file, ["west"], HOST, out)
    after = registered_sites(out / "server")
    assert {name: after[name] for name in before} == before and "west" in after
    assert load_secure_sums(out / "sites" / "north" / "secure_sums.toml").public_keys.keys() == after.keys()
    revoke_site(out, "south")
    left = ["east", "north", "west"]
    assert sorted(registered_sites(out / "server")) == left and not (out / "sites" / "south").exists()
    assert revoked_keys(out / "server") == [before["south"]]
    for folder in (out / "server", *(out / "sites" / name for name in left)):
        assert sorted(load_secure_sums(folder / "secure_sums.toml").public_keys) == left
    assert_refused(lambda: revoke_site(out, "south"), PPFLError, "'south'", "east, north, west")
    init_federation(file, ["south"], HOST, out)  # with a key of its own, and revoked a second time
    assert registered_sites(out / "server")["south"] != before["south"]
    revoke_site(out, "south")
    assert len(revoked_keys(out / "server")) == 2


def test_what_cannot_be_made_leaves_nothing_behind_and_a_folder_in_use_as_it_is(out, file, tmp_path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("")
    before = {path: path.read_bytes() for path in files_in(out)}
    for sites, host, folder, word in [
        ([], "here", "new", "no site"),
        (["a", "A"], "here", "new", "different"),
        (["../a"], "here", "new", "cannot be a folder"),
        (["a"], "https://here", "new", "no host name"),
        (["west", "North"], HOST, "clinics", "'north'"),
        (["west"], HOST, "full", "other files"),
    ]:
        assert_refused(lambda: init_federation(file, sites, host, tmp_path / folder), PPFLError, word)
    file.write_text(tomli_w.dumps(VISITS | {"rounds": 4}))
    assert_refused(lambda: init_federation(file, ["west"], HOST, out), PPFLError, "another experiment")
    assert not (tmp_path / "new").exists() and {path: path.read_bytes() for path in files_in(out)} == before
    for text, word in [("[settings]\n", "no table"), ("[public_keys]\n[settings]\nmin_sites = 1\n", "min_sites")]:
        (tmp_path / "keys.toml").write_text(text)
        assert_refused(lambda: load_secure_sums(tmp_path / "keys.toml"), PPFLError, word)


def test_the_commands_make_folders_and_take_keys_back(tmp_path: Path, file: Path, capsys) -> None:
    out = tmp_path / "new"
    made = ["init", str(file), "--sites", "a,b", "--sites", "c", "--server-host", "10.0.0.1", "--port", "9999"]
    revoke = ["revoke", "b", "--folder", str(out)]
    for arguments, code in ([*made, "--out", str(out)], 0), (revoke, 0), (revoke, 2):
        with pytest.raises(SystemExit) as ended:
            main(["federation", *arguments])
        assert ended.value.code == code
    said = " ".join(capsys.readouterr().out.split())
    assert "to site 'c'" in said and "the key of site 'b' is revoked" in said
    assert sorted(registered_sites(out / "server")) == ["a", "c"]
    assert load_site(out / "sites" / "a" / "site.toml").superlink == "10.0.0.1:9999"


# ---------------------------------------------------------------------- certificates

AUTHORITY = create_authority()
SERVER = create_certificate(AUTHORITY, ["localhost", "127.0.0.1"])


def shake_hands(folder: Path, server: Issued, trusted: bytes | None, host: str = "localhost") -> None:
    """A TLS handshake between two ends that exchange bytes in memory; raises what a client would see."""
    (folder / "certificate.pem").write_bytes(server.certificate)
    (folder / "key.pem").write_bytes(server.private_key)
    serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    serving.load_cert_chain(folder / "certificate.pem", folder / "key.pem")
    asking = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    asking.verify_flags |= ssl.VERIFY_X509_STRICT
    if trusted is not None:
        asking.load_verify_locations(cadata=trusted.decode())
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = asking.wrap_bio(down, up, server_hostname=host)
    other = serving.wrap_bio(up, down, server_side=True)
    for _ in range(10):
        for end in (client, other):
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
    assert client.version() == "TLSv1.3" and client.getpeercert() is not None


def expired() -> Issued:
    return create_certificate(AUTHORITY, ["localhost"], days=30, valid_from=datetime.now(UTC) - timedelta(days=31))


def signed_by_the_server() -> Issued:
    """Whoever takes the server's key must not be able to make certificates that sites trust."""
    forged = create_certificate(SERVER, ["localhost"])
    return forged._replace(certificate=forged.certificate + SERVER.certificate)


def test_a_site_connects_to_a_server_that_the_authority_signed_and_to_no_other(tmp_path: Path) -> None:
    for host in ("localhost", "127.0.0.1"):
        shake_hands(tmp_path, SERVER, AUTHORITY.certificate, host)
    for server, trusted, host, reason in [
        (SERVER, None, "localhost", "unable to get|self-signed"),
        (SERVER, create_authority().certificate, "localhost", "unable to get|self-signed|signature"),
        (SERVER, AUTHORITY.certificate, "elsewhere.example", "Hostname mismatch"),
        (expired(), AUTHORITY.certificate, "localhost", "expired"),
        (signed_by_the_server(), AUTHORITY.certificate, "localhost", "invalid CA|CA cert"),
    ]:
        with pytest.raises(ssl.SSLCertVerificationError, match=reason):
            shake_hands(tmp_path, server, trusted, host)
    for hosts in ([], ["https://here"], ["here:9092"], [""]):
        assert_refused(lambda: create_certificate(AUTHORITY, hosts), SettingError, "host")


# ---------------------------------------------------------------------- docs/federation.md

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "federation.md").read_text()


def blocks(kind: str) -> list[str]:
    return re.findall(rf"```{kind}\n(.*?)```", GUIDE, flags=re.DOTALL)


def test_the_guide_names_the_folders_and_files_that_the_command_makes(tmp_path: Path) -> None:
    (sites,) = re.findall(r"federation init \S+ --sites (\S+) ", GUIDE)
    (tmp_path / "experiment.toml").write_text(blocks("toml")[0])
    init_federation(tmp_path / "experiment.toml", sites.split(","), "server", tmp_path / "clinics")
    (compose,) = (yaml.safe_load(block) for block in blocks("yaml"))
    assert compose["services"].keys() == {"server", *sites.split(",")}
    mounted = {name: tmp_path / one["volumes"][0].split(":")[0] for name, one in compose["services"].items()}
    for name, folder in mounted.items():
        assert folder.is_dir() and folder.name == name
        command = compose["services"][name]["command"]
        assert name == "server" or (folder / command.removeprefix("ppfl federation site /srv/ppfl/")).is_file()
    assert len({*mounted.values()}) == len(mounted)
    assert (tmp_path / "clinics" / "sites" / "north" / "start.txt").read_text() in blocks("sh")
    rows = re.findall(r"^\| `(clinics/\S+)` \| .*? \| (.*) \|$", GUIDE, flags=re.MULTILINE)
    assert len(rows) == 3
    for folder, held in rows:
        for pattern in re.findall(r"`([^`]+)`", held):
            assert list((tmp_path / folder).glob(pattern)), (folder, pattern)
    for block in blocks("ini"):  # services run in the folders that they may write to
        unit = ConfigParser(interpolation=None)
        unit.optionxform = str
        unit.read_string(block)
        assert unit["Service"]["ReadWritePaths"] == unit["Service"]["WorkingDirectory"]
        assert " federation " in unit["Service"]["ExecStart"]


def settings_of_table(heading: str) -> dict[str, str]:
    """The settings that the guide lists under a heading, and their defaults."""
    (table,) = re.findall(rf"^\| `\[{heading}\]` \|.*?\n\n", GUIDE, flags=re.MULTILINE | re.DOTALL)
    return dict(re.findall(r"^\| `(\w+)` \| ([^|]+) \| ", table, flags=re.MULTILINE))


def test_the_settings_and_bits_are_those_of_the_guide() -> None:
    preparation = type(Experiment.model_validate(VISITS | {"preparation": {}}).preparation)
    inside = {"count_target"}  # [estimator] sets it
    assert settings_of_table("preparation").keys() == preparation.model_fields.keys() - inside
    told, settings = settings_of_table("settings"), SecureSettings()
    assert told.keys() == SecureSettings.model_fields.keys()
    for name, value in told.items():
        power = re.fullmatch(r"2\^(-?\d+)", value)
        expected = 2.0 ** int(power[1]) if power else None if name == "threshold" else int(value)
        assert getattr(settings, name) == expected
    ((step, largest, sites),) = re.findall(
        r"`step = (\S+)` with `largest = (\d+)` takes 32\s+bits for up to (\d+)", GUIDE
    )
    bits = [fixed_point(float(step), float(largest), int(sites) + more).bits for more in (0, 1)]
    assert bits == [32, 64]
