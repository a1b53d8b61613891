"""The contract's numeric checks: each op of a provider against plain float64 torch.

The tests run them where a provider can run, `stoker check-backend` on the machine at hand.

Runs on: gpu.
"""
