"""The real `stoker` command on a real engine, with faults, for a process that was forked.

A prompt that begins with one of these token ids brings the fault; FAULT_STEP_S makes every step
last longer, and FAULT_LOAD_S the start. Sockets send little that is not read.
"""

import os
import socket
import sys
import threading
import time

import torch

import stoker.http.app  # noqa: F401 (once, for all that are forked)
from stoker.engine.build import Builder
from stoker.engine.runtime.runner import ModelRunner
from stoker.http import cli, connection

RAISE, HANG, POISON, HUGE = 250, 251, 252, 253  # as test_server.py has them

load, launch, listen = Builder.load, ModelRunner.launch, connection.listen


def faulty_load(self):
    print("loading", flush=True)
    time.sleep(float(os.environ.get("FAULT_LOAD_S", "0")))
    scheduler, runner = load(self)
    runner.model._embedding.weight[POISON] = torch.nan  # so are keys, values and logits then
    return scheduler, runner


def faulty_launch(self, plan, *rest):
    time.sleep(float(os.environ.get("FAULT_STEP_S", "0")))
    begins = plan.q_lens.cumsum() - plan.q_lens
    for first in plan.tokens[begins[plan.q_lens == plan.kv_lens]].tolist():
        if first == RAISE:
            raise RuntimeError("an illegal memory access was encountered, in /secret/kernel.cu")
        if first == HANG:
            threading.Event().wait()
        if first == HUGE and plan.num_tokens > 4:
            raise torch.OutOfMemoryError("tried to allocate 1024 GiB")
    return launch(self, plan, *rest)


def faulty_listen(config):
    sock = listen(config)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)
    return sock


def run(arguments, variables, stdout, stderr):
    """`stoker ARGUMENTS` with these environment variables and output files."""
    for name in [name for name in os.environ if name.startswith("STOKER_")]:
        del os.environ[name]
    os.environ.update(variables)
    for descriptor, path in ((1, stdout), (2, stderr)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND), descriptor)
    Builder.load, ModelRunner.launch = faulty_load, faulty_launch
    connection.listen = faulty_listen
    sys.exit(cli.main(arguments))
