"""Secure aggregation between sites: the server reads totals over sites, and nothing of one site. `SecureSums` is the
server's side, around any transport; `MaskedSite` is the other side, around a site."""

from .masked_site import MaskedSite
from .secure_settings import SecureSettings
from .secure_transport import SecureSums

__all__ = ["MaskedSite", "SecureSettings", "SecureSums"]
