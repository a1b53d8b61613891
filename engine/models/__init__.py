"""Decoder models: what a checkpoint says (config), shared blocks, and a small file per family.

Runs on: gpu.
"""
