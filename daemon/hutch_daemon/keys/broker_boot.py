"""The input of a starting broker: the paths of its files, and the boot line made from the settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hutch_daemon.settings import Settings
from hutch_shared import broker_link as link

__all__ = ["BrokerPaths", "boot_line", "own_prices"]


@dataclass(frozen=True, slots=True)
class BrokerPaths:
    """The broker's files. Agents may enter only the directory of `socket`, which contains no other file."""

    socket: Path
    control: Path
    token: Path
    log: Path

    @classmethod
    def under(cls, runtime: Path, state: Path) -> BrokerPaths:
        """Return the usual paths."""
        return cls(
            socket=runtime / "broker" / "broker.sock",
            control=runtime / "broker-control.sock",
            token=state / "broker.token",
            log=state / "broker.log",
        )


def boot_line(
    settings: Settings, paths: BrokerPaths, token: str, environ: Mapping[str, str], *, everyone: bool
) -> link.BrokerBoot:
    """Return the boot line. `token` is the control link's.

    Proxies come from `environ` (`HTTPS_PROXY`, `NO_PROXY`) unless the settings name one.
    """
    chosen = settings.broker
    proxies = {name[:-6].lower(): value for name, value in environ.items() if name.lower().endswith("_proxy") and value}
    if chosen.proxy is not None:
        proxies = {**proxies, "https": chosen.proxy}
    return link.BrokerBoot(
        token=token,
        control=str(paths.control),
        socket=str(paths.socket),
        everyone=everyone,
        tcp=chosen.tcp,
        ca_file=chosen.ca_file,
        proxies=proxies,
        prices=own_prices(settings),
        connect_timeout=chosen.connect_timeout,
        first_byte_timeout=chosen.first_byte_timeout,
        chunk_timeout=chosen.chunk_timeout,
        key_timeout=chosen.key_timeout,
        body=chosen.body,
        budget_wait=chosen.budget_wait,
    )


def own_prices(settings: Settings) -> dict[str, link.Price]:
    """Return the prices of the settings, by model."""
    return {
        model: link.Price(
            price.input, price.output, price.cache_read, price.cache_write, price.cache_write_1h, price.search
        )
        for provider in settings.providers.values()
        for model, price in provider.prices.items()
    }
