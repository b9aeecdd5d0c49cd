"""The clouds' metadata servers, played by a server here that gives their answers."""

from __future__ import annotations

import json
import urllib.error
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest

from runtime.metadata_server import Metadata
from shoal.runtime import clouds


@pytest.fixture
def metadata(monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # nobody is there: it must not be asked
    server = Metadata()
    yield server
    server.close()


@pytest.mark.parametrize(
    ("preempted", "event", "expected"),
    [
        ("FALSE", "NONE", None),
        ("FALSE", "MIGRATE_ON_HOST_MAINTENANCE", None),
        ("FALSE", "TERMINATE_ON_HOST_MAINTENANCE", ("TERMINATE_ON_HOST_MAINTENANCE", None)),
        ("TRUE", "NONE", ("preempted", 30.0)),
        ("TRUE\n", "TERMINATE_ON_HOST_MAINTENANCE", ("preempted", 30.0)),
    ],
)
def test_google(metadata, preempted, event, expected):
    metadata.required = {"Metadata-Flavor": "Google"}
    metadata.answers = {"GET /preempted": preempted, "GET /maintenance-event": event}
    assert clouds.gce(metadata.url)() == expected


def until(text, seconds):
    """Is that the number of seconds from now, but for what the test itself took?"""
    return seconds - 60 < text <= seconds


def test_amazon(metadata):
    ask = clouds.aws(metadata.url)
    metadata.answers = {"PUT /api/token": "secret"}
    metadata.required = {"X-aws-ec2-metadata-token": "secret"}
    assert [ask(), ask()] == [None, None]
    when = (datetime.now(UTC) + timedelta(seconds=1000)).strftime("%Y-%m-%dT%H:%M:%SZ")
    told = json.dumps({"action": "terminate", "time": when})
    metadata.answers["GET /meta-data/spot/instance-action"] = told
    reason, left_s = ask()
    assert reason == f"spot instance: terminate at {when}"
    assert until(left_s, 1000)
    assert [path for verb, path in metadata.asked if verb == "PUT"] == ["/api/token"]


def test_amazon_gives_a_new_token_when_the_old_one_is_no_good(metadata):
    ask = clouds.aws(metadata.url)
    metadata.answers = {"PUT /api/token": "secret"}
    metadata.required = {"X-aws-ec2-metadata-token": "another"}
    with pytest.raises(urllib.error.HTTPError, match="401"):
        ask()
    metadata.answers["PUT /api/token"] = "another"
    assert ask() is None


def test_a_time_that_has_passed_leaves_nothing(metadata):
    told = json.dumps({"action": "stop", "time": "2017-09-18T08:22:00Z"})
    metadata.answers = {"PUT /api/token": "x", "GET /meta-data/spot/instance-action": told}
    expected = ("spot instance: stop at 2017-09-18T08:22:00Z", 0.0)
    assert clouds.aws(metadata.url)() == expected


def event(kind, *, not_before="", machines=("m1",), status="Scheduled"):
    return {
        "EventId": "602d9444", "EventType": kind, "ResourceType": "VirtualMachine",
        "Resources": list(machines), "EventStatus": status, "NotBefore": not_before,
        "Description": "", "EventSource": "Platform", "DurationInSeconds": -1,
    }  # fmt: skip


def test_azure(metadata):
    metadata.required = {"Metadata": "true"}
    url = metadata.url + "metadata/scheduledevents?api-version=2020-07-01"
    path = "GET /metadata/scheduledevents?api-version=2020-07-01"

    def ask(*events, machines=None):
        metadata.answers[path] = json.dumps({"DocumentIncarnation": 1, "Events": events})
        return clouds.azure(url, machines=machines)()

    later = datetime.now(UTC).replace(microsecond=0) + timedelta(seconds=900)
    not_before = format_datetime(later, usegmt=True)
    assert ask() is None
    assert ask(event("Freeze", not_before=not_before)) is None
    reason, left_s = ask(event("Freeze"), event("Preempt", not_before=not_before))
    assert reason == "Preempt (602d9444)"
    assert until(left_s, 900)
    assert ask(event("Redeploy", status="Started")) == ("Redeploy (602d9444)", 0.0)
    assert ask(event("Preempt"), machines=["m2"]) is None
    assert ask(event("Preempt"), machines=["m2", "m1"]) == ("Preempt (602d9444)", 0.0)


def test_cloud_queries_raise_without_a_metadata_server(metadata):
    with pytest.raises(OSError, match="404"):
        clouds.gce(metadata.url)()
    metadata.answers = {"GET /preempted": "x"}
    for ask in (clouds.gce, clouds.aws, clouds.azure):
        with pytest.raises((OSError, ValueError)):
            ask("http://127.0.0.1:9/")()
