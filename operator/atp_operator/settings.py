# SPDX-License-Identifier: Apache-2.0
"""Settings of the operator, from the environment."""

from __future__ import annotations

import json
import os
import socket
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field

from .injection import SidecarConfig
from .model import Limits


class SettingsError(ValueError):
    """A variable is missing or wrong; the text names it."""


@dataclass(frozen=True)
class Settings:
    """All that is configured from outside."""

    sidecar: SidecarConfig
    namespace: str = "atp-system"
    identity: str = ""
    agent_tls_dir: str = ""
    agent_insecure: bool = False
    agent_port: int = 9560
    agent_server_name: str = "atp-switch-agent"
    manage_software_switches: bool = True
    webhook_tls_dir: str = ""
    webhook_port: int = 9443
    webhook_address: str = "0.0.0.0"
    metrics_port: int = 9100
    lease_name: str = "atp-operator"
    lease_seconds: float = 15.0
    resync_seconds: float = 10.0
    log_level: str = "INFO"
    log_format: str = "json"
    limits: Limits = field(default_factory=Limits)

    @staticmethod
    def from_env(env: Mapping[str, str] | None = None) -> Settings:
        """Read ATP_* variables; raises SettingsError naming all that is wrong."""
        source = os.environ if env is None else env
        errors: list[str] = []

        def number(name: str, default: float) -> float:
            text = source.get(name, "")
            if not text:
                return default
            try:
                value = float(text)
            except ValueError:
                value = -1.0
            if value < 0:
                errors.append(f"{name} is {text!r}: give a number of at least 0")
                return default
            return value

        def flag(name: str, default: bool) -> bool:
            text = source.get(name, "").lower()
            if text in ("", "true", "false", "1", "0"):
                return default if not text else text in ("true", "1")
            errors.append(f"{name} is {text!r}: true or false")
            return default

        image = source.get("ATP_SIDECAR_IMAGE", "")
        if not image:
            errors.append("ATP_SIDECAR_IMAGE is empty: give the image of the sidecar")
        resources: dict[str, object] = {}
        text = source.get("ATP_SIDECAR_RESOURCES", "")
        if text:
            try:
                loaded = json.loads(text)
                if not isinstance(loaded, dict):
                    raise ValueError("not an object")
                resources = loaded
            except ValueError as error:
                errors.append(f"ATP_SIDECAR_RESOURCES is not a JSON object with requests and limits ({error})")
        tls_dir = source.get("ATP_AGENT_TLS_DIR", "")
        insecure = flag("ATP_AGENT_INSECURE", False)
        if not tls_dir and not insecure:
            errors.append(
                "ATP_AGENT_TLS_DIR is empty: give the directory with ca.crt, tls.crt and tls.key for the switch agents "
                "(ATP_AGENT_INSECURE=true is for development only)"
            )
        defaults = Limits()
        limits = Limits(
            switch_wait=number("ATP_SWITCH_WAIT_SECONDS", defaults.switch_wait),
            switch_loss=number("ATP_SWITCH_LOSS_SECONDS", defaults.switch_loss),
            start_timeout=number("ATP_START_TIMEOUT_SECONDS", defaults.start_timeout),
            quarantine=number("ATP_QUARANTINE_SECONDS", defaults.quarantine),
            release_wait=number("ATP_RELEASE_WAIT_SECONDS", defaults.release_wait),
            restart_backoff=number("ATP_RESTART_BACKOFF_SECONDS", defaults.restart_backoff),
        )
        host = source.get("POD_NAME") or socket.gethostname()
        settings = Settings(
            sidecar=SidecarConfig(
                image=image,
                pull_policy=source.get("ATP_IMAGE_PULL_POLICY") or "IfNotPresent",
                resources=resources,
                shm_size=source.get("ATP_SIDECAR_SHM_SIZE") or "1Gi",
            ),
            namespace=source.get("ATP_NAMESPACE") or source.get("POD_NAMESPACE") or "atp-system",
            # Unique per process: a container that restarts in the same pod is another writer to the switches.
            identity=f"{host}_{uuid.uuid4().hex[:8]}",
            agent_tls_dir=tls_dir,
            agent_insecure=insecure,
            agent_port=int(number("ATP_AGENT_PORT", 9560)),
            agent_server_name=source.get("ATP_AGENT_SERVER_NAME") or "atp-switch-agent",
            manage_software_switches=flag("ATP_MANAGE_SOFTWARE_SWITCHES", True),
            webhook_tls_dir=source.get("ATP_WEBHOOK_TLS_DIR", ""),
            webhook_port=int(number("ATP_WEBHOOK_PORT", 9443)),
            webhook_address=source.get("ATP_WEBHOOK_ADDRESS") or "0.0.0.0",
            metrics_port=int(number("ATP_METRICS_PORT", 9100)),
            lease_name=source.get("ATP_LEASE_NAME") or "atp-operator",
            lease_seconds=number("ATP_LEASE_SECONDS", 15.0),
            resync_seconds=number("ATP_RESYNC_SECONDS", 10.0),
            log_level=source.get("ATP_LOG_LEVEL") or "INFO",
            log_format=source.get("ATP_LOG_FORMAT") or "json",
            limits=limits,
        )
        if errors:
            raise SettingsError("; ".join(errors))
        return settings
