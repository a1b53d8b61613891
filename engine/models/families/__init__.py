"""One file a family of models: what it differs in.

Runs on: any (pure).
"""
