# SPDX-License-Identifier: Apache-2.0
"""The operator writes the log lines that every part writes, also for what kopf logs."""

from __future__ import annotations

import io
import json
import logging
from typing import Any

import kopf
import pytest
from kopf._core.actions.loggers import ObjectLogger

from atp_operator.logs import JsonFormatter


@pytest.fixture
def lines() -> Any:
    """What is logged to kopf's logger of objects, as it comes out."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter())
    logger = logging.getLogger("kopf.objects")
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield lambda: [json.loads(line) for line in stream.getvalue().splitlines()]
    logger.removeHandler(handler)
    logger.setLevel(before)


def body(name: str, **meta: Any) -> Any:
    return kopf.Body({"kind": "ATPJob", "apiVersion": "atp.dev/v1alpha1", "metadata": {"name": name, **meta}})


def test_kopf_names_the_object_and_keeps_its_settings_to_itself(lines: Any) -> None:
    logger = ObjectLogger(body=body("digits", namespace="team-a"), settings=kopf.OperatorSettings())
    logger.info("handled %d", 3, extra={"handler": "see_jobs"})
    ObjectLogger(body=body("tor-7"), settings=kopf.OperatorSettings()).warning("cluster-wide")
    first, second = lines()
    assert first.pop("time").endswith("+00:00")
    assert first == {
        "level": "info",
        "logger": "kopf.objects",
        "message": "handled 3",
        "handler": "see_jobs",
        "object": "ATPJob/team-a/digits",
    }
    assert second["object"] == "ATPJob/tor-7" and second["level"] == "warning"


def test_an_exception_is_in_the_line(lines: Any) -> None:
    try:
        raise RuntimeError("leadership was lost")
    except RuntimeError:
        logging.getLogger("kopf.objects").exception("pass failed")
    (line,) = lines()
    assert line["level"] == "error" and "RuntimeError: leadership was lost" in line["error"]


def test_a_record_is_left_as_it_was_for_other_handlers() -> None:
    record = logging.makeLogRecord({"msg": "x", "settings": object(), "k8s_ref": {"kind": "Pod", "name": "p"}})
    JsonFormatter().format(record)
    assert hasattr(record, "settings") and hasattr(record, "k8s_ref") and not hasattr(record, "object")
