"""Folders to hand out before a federation begins: one for the server and one for each site.

```
FOLDER/authority/     authority.key                  makes certificates of servers; keep it away from the net
FOLDER/server/        server.pem, server.key         the server's certificate, and the key to it
                      authority.pem, secret          whom to trust; how the server's programs know each other
                      sites/NAME.pub, revoked/       public keys of sites that may connect, and that may not
                      experiment.toml, secure_sums.toml, address.txt
FOLDER/sites/NAME/    site.key, authority.pem        the site's private key; the authority it trusts
                      site.toml, secure_sums.toml    what its owner fills in; the public keys of all sites
                      experiment.toml                what will be run, to check the data against
                      start.txt                      two commands
```

No secret is in two files. A site's private key goes with its folder and is deleted here once that has been handed over.
"""

from __future__ import annotations

import json
import re
import secrets
import shutil
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import tomli_w

from ..core.registry import python_names
from ..errors import SettingError
from ..io.files import PARTIAL, same_folder_key, write_bytes, write_text, write_toml, writing
from ..runs import load_experiment
from ..runs.experiment import Experiment
from ..runs.load import load_settings
from .certificates import create_authority, create_certificate, create_key_pair
from .federation_errors import FederationError
from .private_files import write_private_file, write_secret
from .secure_sums.key_agreement import PublicKeys
from .secure_sums.secure_settings import SecureSettings

PORT = 9092  # where Flower's SuperLink listens to SuperNodes
_SITE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_SITE_TOML = """\
# Site {name}. Fill in [data]: it stays here, and the server never sees it.
name = "{name}"
superlink = "{superlink}"
root_certificate = "authority.pem"
private_key = "site.key"
# Without the "#", the server reads totals over sites and no sum of this one; it must be so at all sites.
# secure_sums = "secure_sums.toml"
# Functions that the server's experiment may name, for networks and metrics. Read their code before you allow them.
allow = []{named}

# As in the experiment. Change paths to where your own data are; columns must have the names that other sites use.
{data}"""
_START = """\
pip install "ppfl[flower]"
ppfl federation site site.toml
"""


class SecureSumsFile(NamedTuple):
    """What `secure_sums.toml` says."""

    settings: SecureSettings
    public_keys: PublicKeys


def init_federation(
    file: Path,
    sites: Sequence[str],
    server_host: str,
    out: Path,
    *,
    port: int = PORT,
    secure: SecureSettings | None = None,
) -> None:
    """Make the folders of a federation; in a folder that init has made, add sites to it."""
    experiment = load_experiment(file)
    _check_names(sites)
    if (out / "server").is_dir():
        _add_sites(out, experiment, sites)
        return
    if out.exists() and any(out.iterdir()):
        raise SettingError(f"{out} has other files in it; choose a folder that does not exist yet")
    settings = SecureSettings() if secure is None else secure
    settings.needed(max(len(sites), settings.min_sites))
    partial = out.with_name(out.name + PARTIAL)
    shutil.rmtree(partial, ignore_errors=True)
    with writing(out):
        _write_server(partial, file, server_host, port)
        for name in sites:
            _write_site(partial, name, experiment, f"{server_host}:{port}")
        _write_secure_sums(partial, settings)
        if out.exists():
            out.rmdir()
        partial.rename(out)


def revoke_site(out: Path, name: str) -> None:
    """Take a site's key back: the server refuses it from its next start."""
    key = out / "server" / "sites" / f"{name}.pub"
    if not key.is_file():
        known = ", ".join(registered_sites(out / "server")) or "none"
        raise FederationError(f"there is no site {name!r:.80} in {out}; its sites are: {known}")
    with writing(key):
        key.replace(out / "server" / "revoked" / f"{name}-{secrets.token_hex(4)}.pub")  # it may be revoked again
        shutil.rmtree(out / "sites" / name, ignore_errors=True)
        _write_secure_sums(out, load_secure_sums(out / "server" / "secure_sums.toml").settings)


def registered_sites(server: Path) -> dict[str, bytes]:
    """Public keys of the sites that may connect, by name; `server` is the server's folder."""
    return {file.stem: file.read_bytes() for file in sorted((server / "sites").glob("*.pub"))}


def revoked_keys(server: Path) -> list[bytes]:
    """Public keys that may not connect any more; a SuperLink with a database still has them."""
    return [file.read_bytes() for file in sorted((server / "revoked").glob("*.pub"))]


def load_secure_sums(file: Path) -> SecureSumsFile:
    """Settings of secure sums, and the public keys of all sites, from `secure_sums.toml`."""
    found = load_settings(file)
    keys = found.get("public_keys")
    if not isinstance(keys, dict) or not all(isinstance(key, str) for key in keys.values()):
        raise SettingError(f"{file} has no table [public_keys] with one key per site; use the file that init made")
    try:
        settings = SecureSettings.model_validate(found.get("settings", {}))
    except ValueError as error:
        raise SettingError(f"{file}: {' '.join(str(error).split())}") from None
    return SecureSumsFile(settings, {name: key.encode() for name, key in keys.items()})


def _add_sites(out: Path, experiment: Experiment, sites: Sequence[str]) -> None:
    if load_experiment(out / "server" / "experiment.toml") != experiment:
        raise SettingError(
            f"{out} was made for another experiment than {experiment.name!r} is now; choose another folder"
        )
    known = {same_folder_key(name): name for name in registered_sites(out / "server")}
    for name in sites:
        if same_folder_key(name) in known:
            raise SettingError(
                f"{out} has a site {known[same_folder_key(name)]!r} already; revoke it first, or choose another name"
            )
    superlink = (out / "server" / "address.txt").read_text().strip()
    with writing(out):
        for name in sites:
            shutil.rmtree(out / "sites" / name, ignore_errors=True)  # half written by an earlier try
            _write_site(out, name, experiment, superlink)
        _write_secure_sums(out, load_secure_sums(out / "server" / "secure_sums.toml").settings)


def _check_names(sites: Sequence[str]) -> None:
    if not sites:
        raise SettingError("no site is named; write --sites a --sites b, one name for each site")
    for name in sites:
        if not _SITE_NAME.fullmatch(name):
            raise SettingError(f"site {name!r:.80} cannot be a folder; use letters, digits, dots, _ and -")
    if len({same_folder_key(name) for name in sites}) < len(sites):
        raise SettingError(f"sites {', '.join(sites)} are not all different; give each its own name")


def _write_server(out: Path, file: Path, host: str, port: int) -> None:
    authority, server = create_authority(), out / "server"
    own = [name for name in ("localhost", "127.0.0.1") if name != host]  # by which its own programs reach it
    certificate = create_certificate(authority, [host, *own])
    for folder in (out / "authority", server / "sites", server / "revoked"):
        folder.mkdir(parents=True, mode=0o700)
    write_private_file(out / "authority" / "authority.key", authority.private_key)
    write_private_file(server / "server.key", certificate.private_key)
    write_secret(server / "secret")
    write_bytes(server / "server.pem", certificate.certificate)
    write_bytes(server / "authority.pem", authority.certificate)
    text = file.read_text(encoding="utf-8")
    named = "name" in tomllib.loads(text)  # where it is not, an experiment is named after its file
    write_text(server / "experiment.toml", text if named else f"name = {json.dumps(file.stem)}\n{text}")
    write_text(server / "address.txt", f"{host}:{port}\n")


def _write_site(out: Path, name: str, experiment: Experiment, superlink: str) -> None:
    """The key that lets it connect comes last: what is left of a try that failed opens nothing."""
    folder, pair = out / "sites" / name, create_key_pair()
    folder.mkdir(parents=True, mode=0o700)
    write_private_file(folder / "site.key", pair.private_key)
    write_bytes(folder / "authority.pem", (out / "server" / "authority.pem").read_bytes())
    write_text(folder / "site.toml", _site_toml(name, experiment, superlink))
    write_bytes(folder / "experiment.toml", (out / "server" / "experiment.toml").read_bytes())
    write_text(folder / "start.txt", _START)
    write_bytes(out / "server" / "sites" / f"{name}.pub", pair.public_key)


def _site_toml(name: str, experiment: Experiment, superlink: str) -> str:
    asked = experiment.model_dump(mode="json", exclude_none=True)
    functions = python_names(asked)
    named = f"  # the experiment names {', '.join(functions)}" if functions else ""
    return _SITE_TOML.format(name=name, superlink=superlink, named=named, data=tomli_w.dumps({"data": asked["data"]}))


def _write_secure_sums(out: Path, settings: SecureSettings) -> None:
    """The same file for the server and all sites that are here."""
    keys = {name: key.decode().strip() for name, key in registered_sites(out / "server").items()}
    content: dict[str, Any] = {"settings": settings.model_dump(), "public_keys": keys}
    for folder in (out / "server", *(out / "sites" / name for name in keys)):
        if folder.is_dir():  # a site's folder may have been handed over
            write_toml(folder / "secure_sums.toml", content)
