"""What crosses between the parts: configuration, messages, sampling parameters, errors.

Runs on: any (pure).
"""
