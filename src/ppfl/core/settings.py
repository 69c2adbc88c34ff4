"""What all settings have in common."""

from pydantic import BaseModel, ConfigDict


class Settings(BaseModel):
    """Frozen, owns its defaults, checks itself, knows no other key."""

    model_config = ConfigDict(frozen=True, extra="forbid")
