"""The settings: one frozen tree, read from TOML and the environment, checked as a whole.

A setting is written once, in `tree`; `preheat config`, docs/settings.md and the error messages are
made from it. No other package reads the environment.
"""

from preheat.config.checks import NAME, OF_EMBEDDED
from preheat.config.places import cache_folder, environment, log_folder, log_socket, secret_from
from preheat.config.reading import check, load
from preheat.config.toml import to_toml
from preheat.config.tree import (
    L1,
    L2,
    NAMED,
    Admin,
    Choice,
    EngineSettings,
    Exact,
    Listen,
    ModelSettings,
    NamespaceSettings,
    RequestLog,
    Settings,
    Telemetry,
    TenantSettings,
    fields_of,
)
from preheat.config.values import address_of, is_loopback, upstreams_of, variants_of

__all__ = [
    "L1",
    "L2",
    "NAME",
    "NAMED",
    "OF_EMBEDDED",
    "Admin",
    "Choice",
    "EngineSettings",
    "Exact",
    "Listen",
    "ModelSettings",
    "NamespaceSettings",
    "RequestLog",
    "Settings",
    "Telemetry",
    "TenantSettings",
    "address_of",
    "cache_folder",
    "check",
    "environment",
    "fields_of",
    "is_loopback",
    "load",
    "log_folder",
    "log_socket",
    "secret_from",
    "to_toml",
    "upstreams_of",
    "variants_of",
]
