"""What a step costs beside the device's work, from the engine's counters."""

from dataclasses import replace

from stoker.engine.api.messages import Stats
from stoker.http.overhead import Overhead, overhead

BEFORE = Stats(steps=10, generated_tokens=1000, plan_s=1.0, launch_s=2.0, commit_s=3.0, cpu_s=5.0)


def test_of_some_steps():
    after = replace(
        BEFORE,
        steps=110,
        generated_tokens=26_600,
        plan_s=1.01,
        launch_s=2.03,
        commit_s=3.05,
        cpu_s=5.07,
        wait_s=0.81,
        device_s=0.72,
    )
    spent = overhead(BEFORE, after, loop_cpu_s=0.512)
    expected = Overhead(python_ms=0.9, gil_wait_ms=0.2, loop_us=20.0, device_idle=0.2)
    assert [round(value, 6) for value in spent] == list(expected)


def test_of_no_step():
    assert overhead(BEFORE, BEFORE, 1.0) == Overhead()


def test_a_device_that_was_never_idle():
    """Its last step may have ended after the GPU thread's own time was taken."""
    after = replace(BEFORE, steps=11, wait_s=0.1, device_s=0.11)
    assert overhead(BEFORE, after, 0.0).device_idle == 0.0
