"""Sources against real servers that speak the clouds' protocols, correctly and incorrectly."""

from __future__ import annotations

import json
import logging
import queue
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path

import pytest
from harness import wait_for
from metadata_servers import AZURE, GCP, NAME, Service, serving

from elastic_agents.notices import Notice, NoticeWatch, Source, Trouble, aws, gcp
from elastic_agents.notices.aws import META, Aws
from elastic_agents.notices.azure import Azure
from elastic_agents.notices.gcp import Gcp

ACTION = META + "spot/instance-action"

SOURCES: dict[str, Callable[[str], Source]] = {"aws": Aws, "gcp": Gcp, "azure": Azure}


def ahead(seconds: float) -> datetime:
    return datetime.now(UTC) + timedelta(seconds=seconds)


def quiet(cloud: str, service: Service) -> None:
    """The documents of a machine that nothing happens to."""
    if cloud == "gcp":
        service.tell(GCP + "preempted", "FALSE")
        service.tell(GCP + "maintenance-event", "NONE")
    if cloud == "azure":
        service.tell(NAME, "train_3")
        service.tell(AZURE, {"DocumentIncarnation": 1, "Events": []})


def preempt(cloud: str, service: Service, seconds: float = 60.0) -> None:
    if cloud == "aws":
        time = ahead(seconds).strftime("%Y-%m-%dT%H:%M:%SZ")
        service.tell(ACTION, {"action": "terminate", "time": time})
    if cloud == "gcp":
        service.tell(GCP + "preempted", "TRUE")
    if cloud == "azure":
        event = {
            "EventId": "E-1",
            "EventStatus": "Scheduled",
            "EventType": "Preempt",
            "Resources": ["train_3"],
            "NotBefore": format_datetime(ahead(seconds), usegmt=True),
        }
        service.tell(AZURE, {"DocumentIncarnation": 2, "Events": [event]})


@pytest.fixture(params=["aws", "gcp", "azure"])
def cloud(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def service(cloud: str, tmp_path: Path) -> Iterator[Service]:
    with serving(cloud, tmp_path) as service:
        quiet(cloud, service)
        yield service


@pytest.fixture
def source(cloud: str, service: Service, monkeypatch: pytest.MonkeyPatch) -> Iterator[Source]:
    # A proxy would return another machine's metadata.
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    made = SOURCES[cloud](service.base)
    made.pause = 0.02
    yield made
    made.close()


def test_nothing_happens_until_a_preemption_does(cloud: str, service: Service, source: Source) -> None:
    assert source.poll() == []
    preempt(cloud, service)
    (notice,) = source.poll()
    assert (notice.kind, notice.leaves) == ("preemption", True)
    promised = {"aws": 60.0, "gcp": 30.0, "azure": 30.0}[cloud]
    assert notice.seconds is not None
    assert promised - 20 < notice.seconds <= promised


@pytest.mark.parametrize("fault", ["status:500", "garbage", "page", "huge", "trickle"])
def test_a_broken_service_is_reported_once_and_recovers(
    cloud: str,
    service: Service,
    source: Source,
    fault: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(f"elastic_agents.notices.{cloud}.DEADLINE", 0.3)
    monkeypatch.setattr("elastic_agents.notices.azure.FIRST", 0.3)
    monkeypatch.setattr("elastic_agents.notices.gcp.WAIT", 0.2)
    found: queue.Queue[Notice] = queue.Queue()
    service.break_by(fault)
    with NoticeWatch([source], found.put), caplog.at_level(logging.INFO):
        wait_for("two attempts", lambda: len(service.asked()) > 2)
        assert found.empty()
        service.break_by("")
        preempt(cloud, service)
        assert found.get(timeout=30).kind == "preemption"
    assert caplog.messages
    assert all(line.startswith(f"no notices from {source.name} for now: ") for line in caplog.messages)
    assert len(caplog.messages) == len(set(caplog.messages)), "each is said once"


def test_a_notice_that_comes_and_vanishes_is_one_notice(
    cloud: str, service: Service, source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gcp, "WAIT", 0.1)
    found: queue.Queue[Notice] = queue.Queue()
    with NoticeWatch([source], found.put):
        for _ in range(3):
            preempt(cloud, service)
            asked = len(service.asked())
            wait_for("a look at it", lambda asked=asked: len(service.asked()) > asked + 4)
            quiet(cloud, service)
            if cloud == "aws":
                service.tell(ACTION, None)
            asked = len(service.asked())
            wait_for("a look when it is gone", lambda asked=asked: len(service.asked()) > asked + 4)
    assert found.qsize() == 1


@pytest.mark.parametrize("cloud", ["azure"], indirect=True)
def test_an_event_that_had_begun_before_the_agent_makes_no_node_leave(service: Service, source: Source) -> None:
    """A machine that was rebooted finds the reboot listed for some minutes more."""

    def tell(*events: tuple[str, str]) -> None:
        rest = {"EventStatus": "Started", "Resources": ["train_3"], "NotBefore": ""}
        service.tell(AZURE, {"Events": [{"EventId": number, "EventType": kind, **rest} for number, kind in events]})

    tell(("E-1", "Reboot"))
    found: queue.Queue[Notice] = queue.Queue()
    with NoticeWatch([source], found.put):
        assert not found.get(timeout=20).leaves
        tell(("E-1", "Reboot"), ("E-2", "Preempt"))
        notice = found.get(timeout=20)
        assert (notice.id, notice.leaves, notice.seconds) == ("E-2", True, None)


class Scripted(Source):
    """A source that says one thing after the other."""

    name, watched, pause = "script", "a script", 0.0

    def __init__(self, *polls: list[Notice]) -> None:
        self._polls = list(polls)
        self.done = threading.Event()

    def poll(self) -> list[Notice]:
        if not self._polls:
            self.done.set()
            return []
        return self._polls.pop(0)


def test_a_node_that_leaves_receives_notices_that_shorten_its_time() -> None:
    late, sooner = Notice("script", "maintenance", "reboot", 60.0), Notice("script", "preemption", "preemption", 30.0)
    hint = replace(late, kind="rebalance", leaves=False)
    other = replace(hint, kind="migration")
    script = Scripted([hint], [late], [late, hint, other, sooner], [replace(sooner, seconds=20.0)])
    found: queue.Queue[Notice] = queue.Queue()
    with NoticeWatch([script], found.put):
        assert script.done.wait(20)
    assert [found.get_nowait() for _ in range(found.qsize())] == [hint, late, sooner]


def test_a_request_that_is_under_way_ends_when_the_agent_does(cloud: str, service: Service, source: Source) -> None:
    service.break_by("silent")
    with NoticeWatch([source], lambda notice: None):
        wait_for("a request", service.asked)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("notices-")]


@pytest.mark.parametrize("cloud", ["aws"], indirect=True)
def test_a_token_that_has_expired_is_renewed(service: Service, source: Source) -> None:
    assert source.poll() == []
    assert source.poll() == []
    assert len(service.asked("PUT")) == 1, "a token is used again"
    service.expire_tokens()
    preempt("aws", service)
    (notice,) = source.poll()
    assert notice.kind == "preemption"
    assert len(service.asked("PUT")) == 2
    service.break_by("status:401")
    with pytest.raises(Trouble, match="gives no token"):
        source.poll()


@pytest.mark.parametrize("cloud", ["aws"], indirect=True)
def test_a_token_that_never_comes_is_explained_by_the_hop_limit(
    service: Service, source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(aws, "DEADLINE", 0.2)
    service.break_by("silent")
    with pytest.raises(Trouble, match="--http-put-response-hop-limit 2"):
        source.poll()


def test_a_service_that_does_not_answer_is_not_blamed_on_hops() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        base = f"http://127.0.0.1:{probe.getsockname()[1]}"
    for make in SOURCES.values():
        with pytest.raises(Trouble, match="does not answer"):
            make(base).poll()


@pytest.mark.parametrize("cloud", ["aws"], indirect=True)
def test_hints_on_aws_make_no_node_leave_and_do_not_hide_each_other(service: Service, source: Source) -> None:
    service.tell(META + "events/recommendations/rebalance", {"noticeTime": "2026-05-04T12:00:00Z"})
    service.tell(META + "autoscaling/target-lifecycle-state", "InService")
    far = {
        "NotBefore": format_datetime(ahead(1e5), usegmt=True),
        "Code": "system-reboot",
        "EventId": "e",
        "State": "active",
    }
    service.tell(META + "events/maintenance/scheduled", [far])
    assert [(x.kind, x.leaves) for x in source.poll()] == [("maintenance", False), ("rebalance", False)]
    (_, early) = Aws(service.base, early=True).poll()
    assert early.leaves
    service.tell(META + "events/maintenance/scheduled", "a login page")
    assert [x.kind for x in source.poll()] == ["rebalance"]
    service.tell(META + "autoscaling/target-lifecycle-state", "Terminated")
    assert [x.kind for x in source.poll()] == ["scale-in"]


@pytest.mark.parametrize("cloud", ["gcp"], indirect=True)
@pytest.mark.parametrize("answer", [None, "A_KIND_OF_LATER"])
def test_on_gcp_trouble_with_one_document_does_not_hide_the_other(
    answer: str | None, service: Service, source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gcp, "WAIT", 0.1)
    service.tell(GCP + "maintenance-event", answer)
    for _ in range(2):
        with pytest.raises(Trouble) as raised:
            source.poll()
        assert "maintenance-event" in f"{raised.value.what} {raised.value.detail}"
    preempt("gcp", service)
    assert [x.kind for x in source.poll()] == ["preemption"]
    service.tell(GCP + "preempted", answer)
    service.tell(GCP + "maintenance-event", "TERMINATE_ON_HOST_MAINTENANCE")
    assert [x.kind for x in source.poll()] == ["maintenance"]


@pytest.mark.parametrize("cloud", ["gcp"], indirect=True)
def test_on_gcp_the_server_is_asked_to_wait_and_no_change_is_missed(
    service: Service, source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gcp, "WAIT", 1)
    assert source.poll() == []
    found: queue.Queue[Notice] = queue.Queue()
    with NoticeWatch([source], found.put):
        wait_for("a request that waits", lambda: service.asked("GET", f"{GCP}preempted?wait_for_change=true"))
        preempt("gcp", service)
        assert found.get(timeout=30).seconds == 30.0
    assert all("last_etag=" in x["path"] for x in service.asked("GET", f"{GCP}preempted?"))


@pytest.mark.parametrize("cloud", ["azure"], indirect=True)
def test_on_azure_the_event_is_approved_if_it_concerns_this_machine_only(service: Service, source: Source) -> None:
    preempt("azure", service)
    (notice,) = source.poll()
    watch = NoticeWatch([source], lambda notice: None)
    with watch:
        watch.acknowledge(notice)
    (post,) = service.asked("POST")
    assert json.loads(post["body"]) == {"StartRequests": [{"EventId": "E-1"}]}
    assert post["path"] == f"{AZURE}?api-version=2020-07-01"
    assert source.acknowledge(Notice("Azure", "maintenance", "Reboot", id="E-2", alone=False)) == ""
    assert len(service.asked("POST")) == 1
