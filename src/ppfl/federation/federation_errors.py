"""Errors of a federation of real sites."""

from ..errors import PPFLError


class FederationError(PPFLError):
    """A site or a server that cannot be reached, or that does not keep to the protocol."""
