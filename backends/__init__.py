"""What differs by hardware. `registry.py` chooses a backend, `api.py` is the contract.

Runs on: any (pure).
"""
