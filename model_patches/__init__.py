"""Patches that make a transformers model serve many requests, each under its own positional plan.

Knows transformers and torch. Knows nothing of requests, queues or HTTP, and imports nothing from `service`.
"""
