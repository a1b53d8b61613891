"""Structured output: grammars compiled in processes of their own, matched token by token.

Runs on: any (pure).
"""
