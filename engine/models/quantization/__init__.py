"""How checkpoints keep weights in few bits: what their config says, and a class for each scheme.

Runs on: any (pure).
"""
