"""Secrets: tokens and URLs with passwords, from the environment and from nowhere else.

They never enter the configuration tree, a run directory or a log: values are `SecretStr`, which
prints as asterisks, and only the code that speaks to the service unwraps them.
"""

from __future__ import annotations

import ipaddress
from contextlib import suppress
from typing import Literal, TypeAlias

from pydantic import SecretStr
from pydantic_settings import BaseSettings, SettingsConfigDict

from echelon.errors import ConfigError, UsageError

SecretName: TypeAlias = Literal[
    "tushare_token",
    "echelon_redis_url",
    "echelon_cache_key",
    "echelon_token",
    "apca_api_key_id",
    "apca_api_secret_key",
    "echelon_sheet_webhook",
    "echelon_kafka",
]


class Secrets(BaseSettings):
    """Every secret, by its environment variable in lower case; None where unset or empty."""

    model_config = SettingsConfigDict(
        frozen=True,
        extra="ignore",
        env_ignore_empty=True,
        hide_input_in_errors=True,
        use_attribute_docstrings=True,
    )

    tushare_token: SecretStr | None = None
    """the token of your tushare.pro account (its user page shows it)"""
    echelon_redis_url: SecretStr | None = None
    """the URL of the Redis cache, such as redis://:password@host:6379/0"""
    echelon_cache_key: SecretStr | None = None
    """the key that signs entries of the Redis cache, a long random text"""
    echelon_token: SecretStr | None = None
    """the token that clients of the decision service send, a long random text"""
    apca_api_key_id: SecretStr | None = None
    """the key of your Alpaca account (its dashboard shows it; a paper account has its own)"""
    apca_api_secret_key: SecretStr | None = None
    """the secret key that belongs to APCA_API_KEY_ID (shown once, when the keys are made)"""
    echelon_sheet_webhook: SecretStr | None = None
    """the URL that order sheets are posted to, https except on this machine"""
    echelon_kafka: SecretStr | None = None
    """security settings of Kafka's client, a JSON object by librdkafka's names, such as
    {"security.protocol": "SASL_SSL", "sasl.mechanism": "PLAIN", "sasl.username": …}"""

    def require(self, name: SecretName) -> SecretStr:
        """Return the secret, or say which environment variable to set and how."""
        value: SecretStr | None = getattr(self, name)
        if value is None or not value.get_secret_value().strip():
            variable, what = name.upper(), type(self).model_fields[name].description
            raise ConfigError(
                f"the environment variable {variable} is not set; it must hold {what}. "
                f"Set it for this shell with `export {variable}=…`; secrets are never read from "
                "configuration files."
            )
        return value


def is_loopback(host: str | None) -> bool:
    """Whether a name is this machine's own: elsewhere nothing is sent in the clear."""
    with suppress(ValueError):
        return ipaddress.ip_address(host or "").is_loopback
    return host == "localhost"


_LEAST_TOKEN = 16


def require_token() -> str:
    """ECHELON_TOKEN, by which servers on this machine know their clients."""
    token = Secrets().require("echelon_token").get_secret_value()
    if len(token) < _LEAST_TOKEN or not token.isascii():
        raise UsageError(f"ECHELON_TOKEN: expected at least {_LEAST_TOKEN} characters of ASCII.")
    return token
