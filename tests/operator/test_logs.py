# SPDX-License-Identifier: Apache-2.0
"""The operator writes the log lines that every part writes, also for what kopf logs."""

from __future__ import annotations

import io
import json
import logging
import subprocess
import sys
from typing import Any

import kopf
import pytest
from kopf._core.actions.loggers import ObjectLogger

from atp_operator.logs import JsonFormatter, no_refusals

PROGRAM = """
import logging
from atp_operator.logs import configure
configure("info", "json")
log = logging.getLogger("atp_operator.controller")
log.info("handled %d", 3, extra={"job": "team-a/digits"})
log.debug("not told")
logging.getLogger("aiohttp.access").info("not told either")
try:
    raise RuntimeError("leadership was lost")
except RuntimeError:
    log.exception("pass failed")
"""


def test_one_object_a_line_with_what_was_given_and_the_error() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stdout == ""
    first, second = [json.loads(line) for line in done.stderr.splitlines()]
    assert first.pop("time").endswith("+00:00")
    assert first == {
        "level": "info",
        "logger": "atp_operator.controller",
        "message": "handled 3",
        "job": "team-a/digits",
    }
    assert second["level"] == "error" and "RuntimeError: leadership was lost" in second["error"]


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
    logger.filters.clear()


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


def test_refusals_fill_no_log(lines: Any) -> None:
    """kopf logs each as an error; whoever may make objects could fill the disk."""
    logger = logging.getLogger("kopf.objects")
    logger.addFilter(no_refusals)
    logger.error("Handler 'validate-atpjob' failed permanently: spec has 550000 bytes")
    logger.error("Handler 'see-switches' failed with an exception and will stop now: x")
    (line,) = lines()
    assert "see-switches" in line["message"]
