"""The real `stoker` command on a real engine, with faults: python faulty_serve.py serve MODEL ...

A prompt that begins with one of these token ids brings the fault; FAULT_STEP_S makes every step
last longer, and FAULT_LOAD_S the start. Sockets send little that is not read.
"""

import os
import socket
import sys
import threading
import time

import torch

from stoker.engine.build import Builder
from stoker.engine.runtime.runner import ModelRunner
from stoker.http import cli, connection

RAISE, HANG, POISON, HUGE = 250, 251, 252, 253  # as test_server.py has them

load, launch, listen = Builder.load, ModelRunner.launch, connection.listen


def faulty_load(self):
    time.sleep(float(os.environ.get("FAULT_LOAD_S", "0")))
    scheduler, runner = load(self)
    runner.model._embedding.weight[POISON] = torch.nan  # so are keys, values and logits then
    return scheduler, runner


def faulty_launch(self, plan):
    time.sleep(float(os.environ.get("FAULT_STEP_S", "0")))
    begins = plan.q_lens.cumsum() - plan.q_lens
    for first in plan.tokens[begins[plan.q_lens == plan.kv_lens]].tolist():
        if first == RAISE:
            raise RuntimeError("an illegal memory access was encountered, in /secret/kernel.cu")
        if first == HANG:
            threading.Event().wait()
        if first == HUGE and plan.num_tokens > 4:
            raise torch.OutOfMemoryError("tried to allocate 1024 GiB")
    return launch(self, plan)


def faulty_listen(config):
    sock = listen(config)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)
    return sock


Builder.load, ModelRunner.launch, connection.listen = faulty_load, faulty_launch, faulty_listen
print("faults are in place", flush=True)
sys.exit(cli.main(sys.argv[1:]))
