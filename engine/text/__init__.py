"""Text: tokenizer, detokenizer, chat templates. Knows nothing of models or devices.

Runs on: loop, pool.
"""
