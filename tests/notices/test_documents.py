"""How the clouds' documents are interpreted, and that no document does harm."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_agents.notices import Notice, Trouble, aws, azure, gcp
from elastic_agents.notices.file import seconds_in
from elastic_agents.notices.notice_watch import AZURE_TAG, cloud_of, read_dmi
from elastic_agents.notices.types import LATE, moment

NOW = datetime(2026, 5, 4, 12, 0, 0, tzinfo=UTC)


def encoded(value: object) -> bytes:
    return json.dumps(value).encode()


# AWS.


@pytest.mark.parametrize("action", ["terminate", "stop", "hibernate"])
def test_a_spot_interruption_leaves_the_seconds_until_its_time(action: str) -> None:
    body = encoded({"action": action, "time": "2026-05-04T12:01:30Z"})
    assert aws.instance_action(body, NOW) == Notice("AWS", "preemption", f"spot interruption ({action})", 90.0)


@pytest.mark.parametrize("time", ["2026-05-04T15:00:00Z", "soon", None, 7])
def test_a_time_that_cannot_be_is_none_and_the_two_minutes_count(time: object) -> None:
    assert aws.instance_action(encoded({"action": "terminate", "time": time}), NOW).seconds == 120.0


def test_a_time_that_has_passed_leaves_a_few_seconds() -> None:
    body = encoded({"action": "terminate", "time": "2026-05-04T11:00:00Z"})
    assert aws.instance_action(body, NOW).seconds == LATE


def test_a_rebalance_recommendation_is_only_logged_unless_requested() -> None:
    body = encoded({"noticeTime": "2026-05-04T12:00:00Z"})
    assert aws.rebalance(body, leaves=False) == Notice("AWS", "rebalance", "rebalance recommendation", None, False)
    assert aws.rebalance(body, leaves=True) == Notice("AWS", "rebalance", "rebalance recommendation", 120.0, True)


def event(**fields: str) -> dict[str, str]:
    return {
        "NotBefore": "4 May 2026 12:01:00 GMT",
        "Code": "system-reboot",
        "Description": "scheduled reboot",
        "EventId": "instance-event-0d59",
        "NotAfter": "4 May 2026 12:17:00 GMT",
        "State": "active",
    } | fields


def test_maintenance_makes_a_node_leave_two_minutes_before_it_may_begin() -> None:
    far = event(NotBefore="6 May 2026 12:00:00 GMT", EventId="far")
    over = event(State="completed")
    begun = event(NotBefore="4 May 2026 11:00:00 GMT", Code="instance-stop", EventId="begun")
    found = aws.scheduled(encoded([far, event(), over, begun]), NOW)
    assert [(x.id, x.seconds, x.leaves) for x in found] == [
        ("far", 2 * 86400.0, False),
        ("instance-event-0d59", 60.0, True),
        ("begun", LATE, True),
    ]
    assert found[1].why == "maintenance (system-reboot)"


def test_an_auto_scaling_group_that_terminates_the_instance_is_a_notice() -> None:
    notice = aws.lifecycle(b"Terminated\n")
    assert notice is not None
    assert (notice.kind, notice.seconds, notice.leaves) == ("scale-in", None, True)
    assert aws.lifecycle(b"InService") is None


# GCP.


def test_a_preemption_on_gcp_leaves_thirty_seconds() -> None:
    assert gcp.preempted("TRUE") == Notice("GCP", "preemption", "preemption", 30.0)
    assert gcp.preempted("FALSE") is None


def test_a_live_migration_makes_no_node_leave_and_a_termination_does() -> None:
    assert gcp.maintenance("NONE") is None
    migrated, ended = gcp.maintenance("MIGRATE_ON_HOST_MAINTENANCE"), gcp.maintenance("TERMINATE_ON_HOST_MAINTENANCE")
    assert migrated is not None
    assert not migrated.leaves
    assert ended is not None
    assert (ended.leaves, ended.seconds) == (True, 49.0)


# Azure.


def scheduled(kind: str = "Preempt", *resources: str, **fields: str) -> bytes:
    found = {
        "EventId": "A123",
        "EventStatus": "Scheduled",
        "EventType": kind,
        "ResourceType": "VirtualMachine",
        "Resources": list(resources) or ["train_3"],
        "NotBefore": "Mon, 04 May 2026 12:00:25 GMT",
        "Description": "",
        "EventSource": "Platform",
        "DurationInSeconds": -1,
    } | fields
    return encoded({"DocumentIncarnation": 2, "Events": [found]})


def test_only_events_that_name_this_machine_count() -> None:
    assert azure.events(scheduled("Preempt", "train_4"), lambda: "train_3", NOW) == []
    (notice,) = azure.events(scheduled("Preempt", "train_4", "_TRAIN_3"), lambda: "train_3", NOW)
    assert notice == Notice("Azure", "preemption", "Preempt", 25.0, id="A123", alone=False)
    (notice,) = azure.events(scheduled(), lambda: "train_3", NOW)
    assert notice.alone
    assert azure.events(encoded({"DocumentIncarnation": 1, "Events": []}), lambda: "train_3", NOW) == []


@pytest.mark.parametrize(
    ("kind", "before", "status", "expected"),
    [
        ("Freeze", "Mon, 04 May 2026 12:15:00 GMT", "Scheduled", ("maintenance", 900.0, False)),
        ("Reboot", "Mon, 04 May 2026 12:15:00 GMT", "Scheduled", ("maintenance", 900.0, True)),
        ("Reboot", "", "Started", ("maintenance", None, True)),
        ("Redeploy", "Mon, 11 May 2026 12:00:00 GMT", "Scheduled", ("maintenance", 7 * 86400.0, False)),
        ("Terminate", "Mon, 04 May 2026 12:04:00 GMT", "Scheduled", ("scale-in", 240.0, True)),
    ],
)
def test_an_event_states_how_long_it_can_wait(
    kind: str, before: str, status: str, expected: tuple[str, float | None, bool]
) -> None:
    (notice,) = azure.events(scheduled(kind, NotBefore=before, EventStatus=status), lambda: "train_3", NOW)
    assert (notice.kind, notice.seconds, notice.leaves) == expected


# Whatever comes.

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(
                ["action", "time", "noticeTime", "NotBefore", "State", "Code", "Events", "Resources", "EventType"]
            ),
            inner,
            max_size=5,
        )
    ),
    max_leaves=15,
)

DOCUMENTS = st.binary(max_size=200) | JSON.map(encoded)

PARSERS: list[Callable[[bytes], Any]] = [
    lambda body: aws.instance_action(body, NOW),
    lambda body: aws.rebalance(body, leaves=True),
    lambda body: aws.scheduled(body, NOW),
    aws.lifecycle,
    lambda body: gcp.preempted(body.decode(errors="replace")),
    lambda body: gcp.maintenance(body.decode(errors="replace")),
    lambda body: azure.events(body, lambda: "train_3", NOW),
]


@given(DOCUMENTS)
def test_any_document_is_understood_or_raises_trouble(body: bytes) -> None:
    for parse in PARSERS:
        try:
            found = parse(body)
        except Trouble:
            continue
        notices = found if isinstance(found, list) else [found] if found is not None else []
        assert all(isinstance(x, Notice) and (x.seconds is None or x.seconds == x.seconds) for x in notices)


def test_the_text_of_a_document_cannot_add_log_lines() -> None:
    (notice,) = aws.scheduled(encoded([event(Code="x\n[elastic-launch] done\x1b[2J\ud800")]), NOW)
    assert notice.why == "maintenance (x[elastic-launch] done[2J)"


def test_json_that_is_nested_too_deeply_is_trouble() -> None:
    for parse in (PARSERS[0], PARSERS[2], PARSERS[6]):
        with pytest.raises(Trouble):
            parse(b"[" * 60_000)


@given(st.text(max_size=70) | st.datetimes(timezones=st.none() | st.just(UTC)).map(str) | st.integers())
def test_a_time_is_read_or_none(text: object) -> None:
    found = moment(text)
    assert found is None or found.tzinfo is UTC


def test_times_are_read_as_the_clouds_write_them() -> None:
    written = [
        "2026-05-04T12:00:00Z",
        "4 May 2026 12:00:00 GMT",
        "Mon, 04 May 2026 12:00:00 GMT",
        "2026-05-04T12:00:00",
    ]
    assert [moment(text) for text in written] == [NOW] * 4


@given(st.text(max_size=20) | st.floats().map(str))
def test_the_seconds_in_a_file_can_be_waited_for(text: str) -> None:
    found = seconds_in(text)
    assert found is None or 0 <= found <= 1e6


# Where this is.


@pytest.mark.parametrize(
    ("dmi", "cloud"),
    [
        ({"sys_vendor": "Amazon EC2", "product_name": "p5.48xlarge"}, "aws"),
        ({"sys_vendor": "Xen", "product_name": "HVM domU", "bios_version": "4.11.amazon"}, "aws"),
        ({"sys_vendor": "Google", "product_name": "Google Compute Engine"}, "gcp"),
        ({"sys_vendor": "Microsoft Corporation", "chassis_asset_tag": AZURE_TAG}, "azure"),
        ({"sys_vendor": "Microsoft Corporation", "chassis_asset_tag": "8888-0000"}, None),
        ({"sys_vendor": "QEMU", "product_name": "Standard PC (Q35 + ICH9, 2009)"}, None),
        ({}, None),
    ],
)
def test_the_firmware_shows_the_cloud(dmi: dict[str, str], cloud: str | None) -> None:
    assert cloud_of(dmi) == cloud


def test_a_machine_without_firmware_files_is_in_no_cloud(tmp_path: Any) -> None:
    assert read_dmi(tmp_path / "none") == {}
    (tmp_path / "product_name").write_text("Google Compute Engine\n")
    (tmp_path / "sys_vendor").mkdir()
    assert read_dmi(tmp_path) == {"product_name": "Google Compute Engine"}
