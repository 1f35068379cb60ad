"""Anthropic's Messages API, in front of the same conversations that chat has.

body ─► inputs ─► translate ─► ChatRequest ─► Conversation ─► parts ─► call ─► blocks, events
"""
