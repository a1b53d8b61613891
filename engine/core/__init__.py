"""The pure scheduler: no torch, no clock, no thread. Time is an argument, randomness a seed.

Runs on: any (pure).
"""
