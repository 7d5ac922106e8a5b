"""Processes held still by a process of its own: who lets them go on, however somebody ends."""

from __future__ import annotations

import json
import subprocess
import sys
import time

from infra.holding import Hold
from tests.fleet import wait_until
from tests.test_strikes import ROOT, Counter
from tests.test_strikes import counter as counter


def test_a_process_stands_still_until_the_longer_of_two_holds_lets_it_go(counter: Counter) -> None:
    longer, shorter = Hold([counter.where], seconds=600.0), Hold([counter.where], seconds=0.5)
    wait_until(lambda: shorter.is_over, 30)
    shorter.release()
    time.sleep(1.5)
    assert counter.stands_still()
    longer.release()
    assert counter.counts_on()


def test_a_process_goes_on_when_who_stopped_it_is_killed(counter: Counter) -> None:
    asker = (
        "import json, sys, time\n"
        "from infra.holding import Hold\n"
        "hold = Hold([json.loads(sys.argv[1])], seconds=600.0)\n"
        "print(hold.num_held, flush=True)\n"
        "time.sleep(600)\n"
    )
    command = [sys.executable, "-c", asker, json.dumps(counter.where)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"1\n"
        assert counter.stands_still()
        process.kill()
    assert counter.counts_on()


def test_a_process_goes_on_when_what_holds_it_is_killed(counter: Counter) -> None:
    hold = Hold([counter.where], seconds=600.0)
    assert counter.stands_still()
    hold._process.kill()
    hold._process.wait()
    assert hold.is_over
    assert counter.stands_still()
    hold.release()
    assert counter.counts_on()
