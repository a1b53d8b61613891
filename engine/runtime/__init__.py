"""Runs plans on a device: weights, KV buffers, inputs, sampler, runner.

Runs on: gpu.
"""
