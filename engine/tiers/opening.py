"""Opening the tiers that an operator asks for; where one cannot be had, a line says why, and there is none."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from penstock.engine.planning.device import RunnerFacts
from penstock.engine.planning.request_queue import StepSeconds
from penstock.engine.sizes import size_text
from penstock.engine.tiers.block_file import digest_of
from penstock.engine.tiers.disk import DiskTier
from penstock.engine.tiers.folder import BlockFolder, FolderError
from penstock.engine.tiers.host import HostTier
from penstock.engine.tiers.peer import PeerTier
from penstock.engine.tiers.tier import Tier
from penstock.engine.tiers.tiers import Tiers

log = logging.getLogger("penstock.engine")


@dataclass(frozen=True, slots=True, kw_only=True)
class TierOptions:
    """The tiers that an operator asks for."""

    weights: str
    """Differs between models, and between ways to round their weights."""
    host_bytes: int = 0
    """0 for no tier in host memory."""
    disk: Path | None = None
    disk_bytes: int = 0
    peer_headers: Mapping[str, str] | None = None
    """What shows other servers that this one belongs to their cluster; None if none gives it blocks, or takes them."""


def digest(options: TierOptions, layout: str) -> bytes:
    """Returns what the contents of two servers' blocks have to have in common to mean the same."""
    return digest_of((options.weights, layout))


def open_tiers(
    options: TierOptions, facts: RunnerFacts, step_seconds: StepSeconds, wake: Callable[[], None]
) -> Tiers | None:
    """Opens the tiers and starts their threads; None if there are none.

    Args:
        wake: see `Tiers`.
    """
    if not options.host_bytes and options.disk is None and options.peer_headers is None:
        return None
    carrier, state_carrier = facts.carrier, facts.state_carrier
    if carrier is None or not (carrier.num_bytes or state_carrier):
        log.warning(
            "no KV block outlives its place in memory: that is not possible for a model in several processes"
        )
        return None
    layout = carrier.layout if state_carrier is None else state_carrier.layout
    own, tiers, peers = digest(options, layout), list[Tier](), None
    if options.host_bytes:
        tiers.append(HostTier(options.host_bytes))
        log.info("KV blocks in host memory: at most %s", size_text(options.host_bytes))
    if options.disk is not None:
        try:
            folder = BlockFolder(options.disk.expanduser(), options.disk_bytes)
        except FolderError as error:
            log.error("no KV blocks on disk: %s", error)
        else:
            tiers.append(DiskTier(folder, own))
    if options.peer_headers is not None and state_carrier is not None:
        log.info("no KV is exchanged with other servers: layers keep a state")
    elif options.peer_headers is not None:
        peers = PeerTier(own, carrier.num_bytes, options.peer_headers)
        tiers.append(peers)
    if not tiers:
        return None
    opened = Tiers(tiers, carrier, step_seconds, wake, peers=peers, digest=own, state_carrier=state_carrier)
    opened.start()
    return opened
