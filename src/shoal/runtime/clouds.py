"""Preemption notices of cloud providers, as functions for `preemption.watch(poll=…)`.

    preemption.watch(poll=[preemption.clouds.gce()])

Each function queries the metadata server of its own machine over plain HTTP, bypassing any proxy.
Where there is no such server, the first failure is logged and polling continues.

Sources: Google, *Preemptible and Spot VMs* and *Query the metadata server for maintenance event
notices*; Amazon, *Spot Instance interruption notices*; Microsoft, *Scheduled Events for Linux VMs*.
"""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

from shoal.arguments import shown
from shoal.colour import local
from shoal.errors import WrongType, raise_all

__all__ = ["Ask", "aws", "azure", "gce"]

_GCE = "http://metadata.google.internal/computeMetadata/v1/instance/"
_AWS = "http://169.254.169.254/latest/"
_AZURE = "http://169.254.169.254/metadata/scheduledevents?api-version=2020-07-01"
_ANSWER_S = 2.0
_MOST_BYTES = 1 << 20
_GCE_S = 30.0  # from the notice until power-off
_TOKEN_S = 21_600  # lifetime of an AWS token: six hours; renewed halfway
_AZURE_ENDS = ("Preempt", "Terminate", "Reboot", "Redeploy")  # not "Freeze", which is a pause
_OPEN = urllib.request.build_opener(urllib.request.ProxyHandler({})).open


class Ask:
    """A query: returns None, or the reason and the seconds left (None: unknown)."""

    def __init__(self, source: str, ask: Callable[[], tuple[str, float | None] | None]) -> None:
        self.source = source
        self._ask = ask

    def __call__(self) -> tuple[str, float | None] | None:
        """Query once."""
        return self._ask()


@local
def gce(url: str = _GCE) -> Ask:
    """Return a query of Google's metadata server for preemption and host maintenance.

    Local.

    A preempted machine has 30 s. Maintenance counts if it terminates the machine, as it does where
    accelerators are attached; live migration does not count.

    Args:
      url: URL of the directory `instance/`, for tests.

    >>> gce().source
    'gce'
    """

    _check_url("gce", url)

    def ask() -> tuple[str, float | None] | None:
        headers = {"Metadata-Flavor": "Google"}
        if _text(url + "preempted", headers) == "TRUE":
            return "preempted", _GCE_S
        event = _text(url + "maintenance-event", headers)
        return (event, None) if event.startswith("TERMINATE") else None

    return Ask("gce", ask)


@local
def aws(url: str = _AWS) -> Ask:
    """Return a query of Amazon's metadata server (IMDSv2) for spot instance interruptions.

    Local.

    Args:
      url: URL of the directory `latest/`, for tests.

    >>> aws().source
    'aws'
    """
    _check_url("aws", url)
    token = ("", 0.0)  # and when it expires

    def fresh_token() -> str:
        nonlocal token
        if time.monotonic() >= token[1]:
            headers = {"X-aws-ec2-metadata-token-ttl-seconds": str(_TOKEN_S)}
            until = time.monotonic() + _TOKEN_S / 2
            token = _text(url + "api/token", headers, method="PUT"), until
        return token[0]

    def ask() -> tuple[str, float | None] | None:
        nonlocal token
        headers = {"X-aws-ec2-metadata-token": fresh_token()}
        try:
            action = json.loads(_text(url + "meta-data/spot/instance-action", headers))
        except urllib.error.HTTPError as error:
            if error.code == 404:  # nothing is planned
                return None
            if error.code == 401:  # the next query gets a new token
                token = ("", 0.0)
            raise
        when = datetime.fromisoformat(action["time"])
        return f"spot instance: {action['action']} at {action['time']}", _seconds_until(when)

    return Ask("aws", ask)


@local
def azure(url: str = _AZURE, *, machines: Iterable[str] | None = None) -> Ask:
    """Return a query of Azure's metadata server for Scheduled Events.

    Local.

    Preempt, Terminate, Reboot and Redeploy count; Freeze, a pause of seconds, does not.

    Args:
      url: URL of the events, for tests.
      machines: names of virtual machines; events of other machines are ignored. None: all events
        that this machine sees, which are those of its availability set or scale set.

    >>> azure().source
    'azure'
    """
    wanted, problems = _names_of(machines)
    _check_url("azure", url, problems)

    def ask() -> tuple[str, float | None] | None:
        for event in json.loads(_text(url, {"Metadata": "true"})).get("Events", ()):
            counts = wanted is None or wanted.intersection(event.get("Resources", ()))
            if event["EventType"] in _AZURE_ENDS and counts:
                began = not event.get("NotBefore")  # empty once it has started
                left_s = 0.0 if began else _seconds_until(parsedate_to_datetime(event["NotBefore"]))
                return f"{event['EventType']} ({event['EventId']})", left_s
        return None

    return Ask("azure", ask)


def _check_url(cloud: str, url: object, problems: Iterable[str] = ()) -> None:
    is_text = isinstance(url, str) and url != ""
    wrong = [] if is_text else [WrongType(f"url={shown(url)} must be the address of a server")]
    raise_all(cloud, [*wrong, *problems])


def _names_of(machines: object) -> tuple[frozenset[str] | None, list[str]]:
    """Return the names of machines, and what is wrong with them."""
    if machines is None:
        return None, []
    names: list[object] = [None]
    if isinstance(machines, Iterable) and not isinstance(machines, str | bytes):
        names = list(machines)
    texts = [name for name in names if isinstance(name, str)]
    wrong = f"machines={shown(machines)} must be the names of virtual machines"
    return frozenset(texts), [] if len(texts) == len(names) else [WrongType(wrong)]


def _text(url: str, headers: Mapping[str, str], *, method: str = "GET") -> str:
    request = urllib.request.Request(url, headers=dict(headers), method=method)
    with _OPEN(request, timeout=_ANSWER_S) as answer:
        return str(answer.read(_MOST_BYTES).decode(errors="replace").strip())


def _seconds_until(when: datetime) -> float:
    """Return the seconds until then, by this machine's clock, which its cloud sets."""
    if when.tzinfo is None:
        when = when.replace(tzinfo=UTC)
    return max(0.0, (when - datetime.now(UTC)).total_seconds())
